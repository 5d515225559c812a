"""Plans that accumulate by layers, or do not, and that free and move less or more.

    Plan -> keeping -> (Plan, ...), judged by simulation

The search frees the parameters of all segments and lets all borders wait in host memory
where some must. Here single segments get theirs back, the first ones first: nothing
hides the gather that a step begins with.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

from hexijax.layers.chain import Remat
from hexijax.plan.plan import Memory, Params, Plan, Schedule, Stage
from hexijax.planner.options import PlanOptions

PARTS = (1.0, 0.5, 0.25, 0.12, 0.06, 0.0)
"""Of the segments in question, and one at least."""


def keeping(plan: Plan, options: PlanOptions) -> Iterator[Plan]:
    """The plan under the other schedule, or with more kept where it is."""
    yield from _schedules(plan, options)
    for changed in (_less_freed, _less_waiting):
        made: list[Plan] = []
        for part in PARTS:
            other = _each(plan, functools.partial(changed, part=part))
            if other.replicas != plan.replicas and other not in made:
                made.append(other)
                yield other


def _less_freed(stage: Stage, part: float) -> Stage:
    """The first of the freed segments kept, a part of them and one at least."""
    freed = [g for g in range(len(stage.segments)) if stage.frees(g)]
    params = list(stage.params)
    for g in freed[: max(1, round(part * len(freed)))]:
        params[g] = Params.KEPT
    return dataclasses.replace(stage, params=tuple(params)) if freed else stage


def _less_waiting(stage: Stage, part: float) -> Stage:
    """The last of the borders on the host on the device: they wait for least."""
    waits = list(stage.waits)
    away = [g for g in range(len(stage.segments)) if stage.waits_on_host(g)]
    for g in away[::-1][: max(1, round(part * len(away)))]:
        waits[g] = Memory.DEVICE
    return dataclasses.replace(stage, waits=tuple(waits)) if away else stage


def _schedules(plan: Plan, options: PlanOptions) -> Iterator[Plan]:
    """Of replicas of one stage: layers outside and microbatches inside, or not."""
    several = len(plan.replicas) > 1 or plan.replicas[0].stages[0].lanes > 1
    single = all(len(replica.stages) == 1 for replica in plan.replicas)
    if options.schedule is not None or not several or not single:
        return
    if not options.layered:
        return
    if plan.schedule is Schedule.LAYERED:
        if any(stage.params for _, stage in plan.stages()):
            yield from _halved(plan)
        else:
            yield _freed(plan)
            yield from map(_freed, _halved(plan))
        yield _plain(plan)
        return
    yield dataclasses.replace(plan, schedule=Schedule.LAYERED, prediction=None)
    if Remat.FULL in options.remat:
        plan = _recomputed(plan)
        yield dataclasses.replace(plan, schedule=Schedule.LAYERED, prediction=None)


def _plain(plan: Plan) -> Plan:
    made = _each(plan, lambda stage: dataclasses.replace(stage, params=(), waits=()))
    return dataclasses.replace(made, schedule=Schedule.ONE_F_ONE_B)


def _freed(plan: Plan) -> Plan:
    """With nothing to gather when a step ends, and more when it begins."""

    def freed(stage: Stage) -> Stage:
        every = (Params.FREED,) * len(stage.segments)
        return dataclasses.replace(stage, params=every)

    return _each(plan, freed)


def _halved(plan: Plan) -> Iterator[Plan]:
    """In microbatches of half the size, or what lanes divide of it: a pass of several
    has sums and gathers to run beside."""
    replicas = []
    for replica in plan.replicas:
        lanes = max(stage.lanes for stage in replica.stages)
        size = max(1, replica.microbatch_size // (2 * lanes)) * lanes
        count = -(-replica.samples // size)
        replicas.append(
            dataclasses.replace(replica, microbatch_size=size, microbatches=count)
        )
    if tuple(replicas) != plan.replicas:
        yield dataclasses.replace(plan, replicas=tuple(replicas), prediction=None)


def _recomputed(plan: Plan) -> Plan:
    """With nothing kept of any microbatch but its borders."""

    def recomputed(stage: Stage) -> Stage:
        return dataclasses.replace(stage, remat=(Remat.FULL,) * stage.num_layers)

    return _each(plan, recomputed)


def _each(plan: Plan, changed: Callable[[Stage], Stage]) -> Plan:
    """The plan with every stage changed; nothing is predicted of it."""
    replicas = tuple(
        dataclasses.replace(replica, stages=tuple(map(changed, replica.stages)))
        for replica in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas, prediction=None)
