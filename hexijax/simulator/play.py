"""Plays a Program against costs until its steps repeat.

    Program, Plan, Chain, Cluster -> simulate -> Timeline

Every task starts when the host has dispatched it, what it reads is there, and its
queues are free; queues serve in the order of dispatch. Steps follow each other as the
runtime dispatches them, so that a step's update overlaps the next step's first
forwards.
"""

import dataclasses

from hexijax.cluster import Cluster
from hexijax.collector import collector_paused
from hexijax.costs.buffers import BufferBytes
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.sums import MOMENTS
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.program.program import Program, Update
from hexijax.simulator.account import account
from hexijax.simulator.memory import curves, lives
from hexijax.simulator.steps import Steps
from hexijax.simulator.tasks import tasks
from hexijax.simulator.timeline import Timeline


def simulate(
    program: Program,
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    moments: int = MOMENTS,
    costs: PlanCosts | None = None,
    events: bool = True,
    sizes: BufferBytes | None = None,
) -> Timeline:
    """The steady state of a training Program.

    Args:
      program: ``lower(plan, chain, ...)``.
      plan: what is where.
      chain: the model.
      cluster: devices and links.
      moments: fp32 arrays of the optimizer for each parameter; ``costs`` has its own.
      costs: durations; None: those of the cluster's profiles.
      events: keep every use of a queue, for pictures; a search does without.
      sizes: of the buffers; None: memory is not looked at.

    Raises:
      UserError: the Program evaluates, or holds instructions of host offload.
    """
    if not any(isinstance(i, Update) for i in program.body):
        raise UserError(
            "The Program has no Update: it evaluates, and its steps do not wait for "
            "each other. Simulate a training Program."
        )
    costs = costs or PlanCosts(plan, chain, cluster, moments)
    with collector_paused():
        steps = Steps(tasks(program, costs, cluster))
        step_s = steps.until_they_repeat()
        made = account(steps, step_s, devices(program, plan, costs), events=events)
        return with_memory(made, program, steps, costs, sizes) if sizes else made


def with_memory(
    timeline: Timeline,
    program: Program,
    steps: Steps,
    costs: PlanCosts,
    sizes: BufferBytes,
) -> Timeline:
    """The same with what each device holds."""
    found = lives(program, steps, timeline.step_s, costs, sizes)
    memory = curves(found, steps, timeline.step_s, costs)
    return dataclasses.replace(timeline, memory=memory)


def devices(program: Program, plan: Plan, costs: PlanCosts) -> tuple[str, ...]:
    """Those of a training plan's stages, then homes that are no stage."""
    homes = [i.home for i in program.body if isinstance(i, Update)]
    places = (*(place for place, _ in plan.stages()), *homes)
    return tuple(dict.fromkeys(d for place in places for d in costs.devices(place)))
