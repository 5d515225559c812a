"""Plays a Program against costs until its steps repeat.

    Program, Plan, Chain, Cluster -> simulate -> Timeline

Every task starts when the host has dispatched it, what it reads is there, and its
queues are free; queues serve in the order of dispatch. Steps follow each other as the
runtime dispatches them, so that a step's update overlaps the next step's first
forwards.
"""

from hexijax.cluster import Cluster
from hexijax.collector import collector_paused
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.memory import MOMENTS
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.program.program import Program, Update
from hexijax.simulator.account import account
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
        return account(steps, step_s, devices(program, plan, costs), events=events)


def devices(program: Program, plan: Plan, costs: PlanCosts) -> tuple[str, ...]:
    """Those of a training plan's stages, then homes that are no stage."""
    homes = [i.home for i in program.body if isinstance(i, Update)]
    places = (*(place for place, _ in plan.stages()), *homes)
    return tuple(dict.fromkeys(d for place in places for d in costs.devices(place)))
