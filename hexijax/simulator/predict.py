"""A plan's step on a timeline, from the plan alone.

    Plan, Chain, Cluster -> fold -> lower -> cycles, or play -> Timeline

What every other room asks when it wants to know how long a plan takes. Equal replicas
and repeating microbatches are played once, so that 10,000 devices take seconds.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from hexijax.cluster import Cluster
from hexijax.collector import collector_paused
from hexijax.costs.borders import OURS, Carriage
from hexijax.costs.buffers import BufferBytes
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.memory import plan_memory
from hexijax.costs.sums import MOMENTS
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Program
from hexijax.simulator.cycles import by_cycles
from hexijax.simulator.fold import Fold, fold
from hexijax.simulator.memory import all_devices
from hexijax.simulator.play import simulate
from hexijax.simulator.timeline import Timeline

Value = TypeVar("Value")


@collector_paused()
def predict(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    moments: int = MOMENTS,
    whole_leaves: bool = False,
    rules: StepRules | None = None,
    events: bool = True,
    memory: bool = False,
    carriage: Carriage = OURS,
    order: Callable[[Program, PlanCosts], Program] | None = None,
    folded: bool = True,
) -> Timeline:
    """The steady state of a plan's training step.

    Args:
      plan: what is where.
      chain: the model.
      cluster: devices and links.
      moments: fp32 arrays of the optimizer for each parameter.
      whole_leaves: no leaf's state is cut, for optimizers that look inside a leaf.
      rules: what an update must know about all gradients; None: nothing.
      events: keep every use of a queue, for pictures; a search does without.
      memory: look at what each device holds, too; it costs as much as playing.
      carriage: how activations move, where another system runs the plan.
      order: puts the Program into another system's order, which is played in full;
        None: as lowered.
      folded: play what repeats once; events are those of what is played.
    """
    rules = rules or StepRules()
    folded = folded and order is None
    part = Fold(plan=plan, copies=None, like={})
    if folded and not whole_leaves:  # whole leaves lie unlike in equal replicas
        part = fold(plan, chain, cluster)
    costs = PlanCosts(
        part.plan,
        chain,
        cluster,
        moments,
        whole_leaves=whole_leaves,
        copies=part.copies,
        carriage=carriage,
    )
    groups = tuple(costs.groups.values())
    sizes = None
    if memory:
        sizes = BufferBytes(
            part.plan, chain, cluster, costs, moments, whole_leaves=whole_leaves
        )
    timeline = None
    if folded:
        timeline = by_cycles(
            part.plan,
            chain,
            cluster,
            costs,
            rules,
            groups=groups,
            whole_leaves=whole_leaves,
            events=events,
            sizes=sizes,
        )
    if timeline is None:
        program = lower(
            part.plan,
            chain,
            rules=rules,
            costs=costs,
            whole_leaves=whole_leaves,
            marked=memory or order is not None,
            checked=False,
            groups=groups,
        )
        if order:
            program = order(program, costs)
        timeline = simulate(
            program,
            part.plan,
            chain,
            cluster,
            costs=costs,
            events=events,
            sizes=sizes,
        )
    if memory and part.copies is not None:
        held = plan_memory(plan, chain, cluster, moments=moments)
        state = {device: parts.state_bytes for device, parts in held.items()}
        curves = all_devices(timeline.memory, part.like, state)
        timeline = dataclasses.replace(timeline, memory=curves)
    return _whole(timeline, part)


def _whole(timeline: Timeline, part: Fold) -> Timeline:
    """The figures of all that the part stands for."""
    if part.copies is None:
        return timeline

    def all_of(figures: Mapping[str, Value]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, value in figures.items():
            owner, *way = name.split(" ")  # `a/0`, `a out`, `a > b`
            others = part.like.get(owner, (owner,))
            end = part.like.get(way[-1], ()) if ">" in way else ()
            for i, other in enumerate(others):
                if len(end) == len(others):  # a link inside what stands for others
                    way = [">", end[i]]
                found[" ".join((other, *way))] = value
        return found

    return dataclasses.replace(
        timeline,
        busy_s=all_of(timeline.busy_s),
        idle_s=all_of(timeline.idle_s),
        link_bytes=all_of(timeline.link_bytes),
        host_s=all_of(timeline.host_s),
    )
