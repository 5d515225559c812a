"""Plan -> Program, by passes of one file each.

    schedules -> compute -> moves -> paths -> placement -> window -> passes -> linearise
    -> waiting -> free -> check

The Program of a plan is a pure function of plan, chain, rules and costs.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from hexijax.collector import collector_paused
from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan, PlanError, UpdateOrder
from hexijax.program.buckets import buckets
from hexijax.program.check import check
from hexijax.program.compute import compute
from hexijax.program.free import free
from hexijax.program.linearise import Costs, UnitCosts, linearise
from hexijax.program.moves import moves
from hexijax.program.passes import passes
from hexijax.program.paths import paths
from hexijax.program.placement import (
    GroupPlaces,
    StepRules,
    agree_on_loss,
    agree_on_scale,
    group_places,
    loads,
    prologue,
    renew,
    sync,
)
from hexijax.program.program import Backward, Instruction, Program, Update
from hexijax.program.rules.fault import Faults
from hexijax.program.rules.runs import check_layers
from hexijax.program.waiting import Order, Pools, waiting
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
        made = _lowered(plan, chain, rules, costs, groups, evaluation, whole_leaves)
        if marked:
            made = made._replace(
                body=free(made.body), drain=free(made.drain, repeats=False)
            )
    program = Program(**made._asdict())
    if checked:
        check(program, plan, chain, whole_leaves=whole_leaves)
    return program


class _Lowered(NamedTuple):
    """Sections whose last reads are not marked, pools, and what may be leaving."""

    prologue: Order
    body: Order
    drain: Order
    pools: Pools
    leaving: tuple[tuple[Place, int], ...]


def _lowered(
    plan: Plan,
    chain: Chain,
    rules: StepRules,
    costs: Costs | None,
    groups: Sequence[Group] | None,
    evaluation: bool,
    whole_leaves: bool,
) -> _Lowered:
    check_layers(plan, chain, Faults(Program()))
    _check_grads(plan, rules)
    if groups is None:
        groups = buckets(plan, chain, whole_leaves=whole_leaves)
    places = group_places(plan, chain, groups, whole_leaves=whole_leaves)
    streams, waits = compute(plan, chain, groups, evaluation=evaluation)
    common = [*moves(plan, streams), agree_on_loss(plan)]
    before = prologue(places)
    if rules.dynamic_scale and not evaluation:
        before.append(agree_on_scale(plan, body=False))
        common.append(agree_on_scale(plan, body=True))
    costs = costs or UnitCosts(plan)
    if not evaluation:
        places = paths(plan, places, streams, costs, rules)
    loaded = loads(plan, chain, evaluation=evaluation, rules=rules)
    passing = passes(places, streams)

    def ordered(late: Sequence[GroupPlaces]) -> tuple[Order, Order]:
        """The body, and its late instructions in their order."""
        others, renewal = common, [i for g in late for i in renew(g, rules, step=-1)]
        if not evaluation:
            names = {g.group for g in late}
            others = [*common, *sync(places, streams, rules, names)]
        after = (*waits, *window(plan, streams, others))
        order = linearise(plan, passing, others, loaded, costs, after, renewal)
        ids = set(map(id, renewal))
        return order, tuple(i for i in order if id(i) in ids)

    order, drain = ordered(())
    if plan.order is UpdateOrder.PRIORITY and not evaluation:
        order, drain = ordered(late_groups(places, order))
    drain = tuple(map(dataclasses.replace, drain))  # marked apart from the body
    body, pools = waiting(plan, order)
    leaving = tuple((at, stage.leaving) for at, stage in plan.stages() if stage.leaving)
    return _Lowered(tuple(before), body, drain, pools, leaving)


def _check_grads(plan: Plan, rules: StepRules) -> None:
    """Updates may come as early as the plan counts on."""
    few = [place for place, stage in plan.stages() if stage.grads]
    if few and rules.update_waits:
        raise PlanError(
            f"Stage {few[0]} has room for gradients of {plan.stage(few[0]).grads} "
            "passes at once ('grads'), and clip_norm, skip_nonfinite and a dynamic "
            "loss scale need those of all before the first update. Plan anew for this "
            "training, or train without them."
        )


def late_groups(
    places: Sequence[GroupPlaces], order: Sequence[Instruction]
) -> list[GroupPlaces]:
    """Those whose updates find no time before the last backward begins: what is left
    of them then goes by who needs it first, and that is the next step's forward."""
    last = max(at for at, i in enumerate(order) if isinstance(i, Backward))
    early = {i.group for i in order[:last] if isinstance(i, Update)}
    return [g for g in places if g.trainable and g.group not in early]
