"""A plan's step on a timeline, from the plan alone.

    Plan, Chain, Cluster -> predict -> Timeline

What every other room asks when it wants to know how long a plan takes.
"""

from collections.abc import Callable

from hexijax.cluster import Cluster
from hexijax.costs.borders import OURS, Carriage
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.memory import MOMENTS
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Program
from hexijax.simulator.play import simulate
from hexijax.simulator.timeline import Timeline


def predict(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    moments: int = MOMENTS,
    whole_leaves: bool = False,
    rules: StepRules | None = None,
    events: bool = True,
    carriage: Carriage = OURS,
    order: Callable[[Program, PlanCosts], Program] | None = None,
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
      carriage: how activations move, where another system runs the plan.
      order: puts the Program into another system's order; None: as lowered.
    """
    costs = PlanCosts(
        plan, chain, cluster, moments, whole_leaves=whole_leaves, carriage=carriage
    )
    program = lower(
        plan,
        chain,
        rules=rules or StepRules(),
        costs=costs,
        whole_leaves=whole_leaves,
        checked=False,
    )
    if order:
        program = order(program, costs)
    return simulate(program, plan, chain, cluster, costs=costs, events=events)
