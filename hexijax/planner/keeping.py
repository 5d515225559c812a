"""Plans that accumulate by layers, or do not, and that free and move less or more.

    Plan -> keeping -> (Plan, ...), judged by simulation

The search frees the parameters of all segments and lets all borders wait in host memory
where some must. Here single segments get theirs back, the first ones first: nothing
hides the gather that a step begins with.
"""

import dataclasses
from collections.abc import Iterator

from hexijax.layers.chain import Remat
from hexijax.plan.plan import Memory, Params, Plan, Replica, Schedule, Stage
from hexijax.planner.options import PlanOptions


def keeping(plan: Plan, options: PlanOptions) -> Iterator[Plan]:
    """The plan under the other schedule, or with more kept where it is."""
    yield from _schedules(plan, options)
    for changed in (_less_freed, _less_waiting):
        made: list[tuple[Replica, ...]] = []
        for part in (1.0, 0.5, 0.0):
            replicas = tuple(
                dataclasses.replace(
                    replica, stages=tuple(changed(s, part) for s in replica.stages)
                )
                for replica in plan.replicas
            )
            if replicas != plan.replicas and replicas not in made:
                made.append(replicas)
                yield dataclasses.replace(plan, replicas=replicas, prediction=None)


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
        if not any(stage.params for _, stage in plan.stages()):
            yield _freed(plan)
        yield _plain(plan)
        return
    yield dataclasses.replace(plan, schedule=Schedule.LAYERED, prediction=None)
    if Remat.FULL in options.remat:
        plan = _recomputed(plan)
        yield dataclasses.replace(plan, schedule=Schedule.LAYERED, prediction=None)


def _plain(plan: Plan) -> Plan:
    replicas = tuple(
        dataclasses.replace(
            replica,
            stages=tuple(
                dataclasses.replace(stage, params=(), waits=())
                for stage in replica.stages
            ),
        )
        for replica in plan.replicas
    )
    return dataclasses.replace(
        plan, replicas=replicas, schedule=Schedule.ONE_F_ONE_B, prediction=None
    )


def _freed(plan: Plan) -> Plan:
    """With nothing to gather when a step ends, and more when it begins."""
    replicas = tuple(
        dataclasses.replace(
            replica,
            stages=tuple(
                dataclasses.replace(stage, params=(Params.FREED,) * len(stage.segments))
                for stage in replica.stages
            ),
        )
        for replica in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas, prediction=None)


def _recomputed(plan: Plan) -> Plan:
    """With nothing kept of any microbatch but its borders."""
    replicas = tuple(
        dataclasses.replace(
            replica,
            stages=tuple(
                dataclasses.replace(stage, remat=(Remat.FULL,) * stage.num_layers)
                for stage in replica.stages
            ),
        )
        for replica in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas)
