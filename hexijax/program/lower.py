"""Plan -> Program, by passes of one file each.

    schedules -> compute -> moves -> paths -> placement -> window -> passes -> linearise
    -> waiting -> free -> check

The Program of a plan is a pure function of plan, chain, rules and costs.
"""

from collections.abc import Sequence

from hexijax.collector import collector_paused
from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Plan, UpdateOrder
from hexijax.program.check import check
from hexijax.program.compute import compute
from hexijax.program.free import free
from hexijax.program.linearise import Costs, UnitCosts, linearise
from hexijax.program.moves import moves
from hexijax.program.passes import passes
from hexijax.program.paths import paths
from hexijax.program.placement import (
    StepRules,
    agree_on_loss,
    agree_on_scale,
    group_places,
    loads,
    prologue,
    sync,
)
from hexijax.program.program import Instruction, Program, ProgramError
from hexijax.program.rules.fault import Faults
from hexijax.program.rules.runs import check_layers
from hexijax.program.waiting import Pools, waiting
from hexijax.program.window import window

__all__ = ["Costs", "StepRules", "lower"]


def lower(
    plan: Plan,
    chain: Chain,
    *,
    rules: StepRules,
    costs: Costs | None = None,
    evaluation: bool = False,
    whole_leaves: bool = False,
    marked: bool = True,
    checked: bool = True,
    groups: Sequence[Group] | None = None,
) -> Program:
    """The Program of one step.

    Args:
      plan: what is where.
      chain: the model it belongs to.
      rules: what an update must know about all gradients.
      costs: durations that settle the order; None: a layer takes 1 forward, 2 backward.
      evaluation: forwards and metrics only, the parameters stay.
      whole_leaves: no leaf's state is cut, for optimizers that look inside a leaf.
      marked: last reads die, and what nobody reads is freed; who looks at no memory
        does without.
      checked: prove it; a search that lowers many plans proves the one it chose.
      groups: the buckets; None: the plan's own. A simulated part of a plan has the
        whole plan's.
    """
    with collector_paused():
        before, order, pools = _lowered(
            plan, chain, rules, costs, groups, evaluation, whole_leaves
        )
        body = free(order) if marked else order
    program = Program(prologue=before, body=body, pools=pools)
    if checked:
        check(program, plan, chain, whole_leaves=whole_leaves)
    return program


def _refuse(plan: Plan) -> None:
    """Parts of a plan that no Program does yet."""
    for what, asked in (("'order priority'", plan.order is UpdateOrder.PRIORITY),):
        if asked:
            raise ProgramError(
                f"The plan asks for {what}, which this version does not run. Take it "
                "out of the plan."
            )


def _lowered(
    plan: Plan,
    chain: Chain,
    rules: StepRules,
    costs: Costs | None,
    groups: Sequence[Group] | None,
    evaluation: bool,
    whole_leaves: bool,
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...], Pools]:
    """The prologue, the body's order, and what pools it needs."""
    _refuse(plan)
    check_layers(plan, chain, Faults(Program()))
    places = group_places(plan, chain, groups, whole_leaves=whole_leaves)
    streams, waits = compute(plan, chain, groups, evaluation=evaluation)
    others = [*moves(plan, streams), agree_on_loss(plan)]
    before = prologue(places)
    costs = costs or UnitCosts(plan)
    if not evaluation:
        places = paths(plan, places, streams, costs, rules)
        others += sync(places, streams, rules)
        if rules.dynamic_scale:
            before.append(agree_on_scale(plan, body=False))
            others.append(agree_on_scale(plan, body=True))
    waits = (*waits, *window(plan, streams, others))
    order = linearise(
        plan,
        passes(places, streams),
        others,
        loads(plan, chain, evaluation=evaluation, rules=rules),
        costs,
        waits,
    )
    return tuple(before), *waiting(plan, order)
