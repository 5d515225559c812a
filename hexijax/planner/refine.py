"""Plans that differ from one by a single number: the last steps, judged by simulation.

    Plan -> variants -> (Plan, ...): schedules, borders, microbatches, shares, segments

The search decides by formula what the simulator then corrects here: a border moved by a
layer, another microbatch size, a few samples from the replica that ends last.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from hexijax.layers.chain import Remat
from hexijax.plan.plan import (
    Memory,
    Params,
    Place,
    Plan,
    Replica,
    Schedule,
    Stage,
    stage_place,
)
from hexijax.planner.keeping import keeping
from hexijax.planner.options import PlanOptions
from hexijax.planner.segments import segments

Choice = TypeVar("Choice", Params, Memory)


def variants(plan: Plan, options: PlanOptions) -> Iterator[Plan]:
    """Each one number away; replicas of equal form change together."""
    if options.layers_per_segment is None and len(plan.replicas) > 1:
        for most in (None, 4, 2, 1):
            replicas = tuple(_segmented(replica, most) for replica in plan.replicas)
            if replicas != plan.replicas:
                yield dataclasses.replace(plan, replicas=replicas, prediction=None)
    yield from _schedules(plan, options)
    yield from keeping(plan, options)
    for group in _equal_replicas(plan):
        first = plan.replicas[group[0]]
        for policy in options.remat:
            changed = _remat(first, policy)
            if changed != first:
                yield _with(plan, group, changed)
        yield from (
            _with(plan, group, changed) for changed in _microbatches(first, options)
        )
        if (
            options.layers_per_stage is None
            and plan.schedule is not Schedule.INTERLEAVED
        ):
            for k in range(len(first.stages) - 1):
                for by in (1, -1):
                    moved = _border_moved(first, k, by)
                    if moved:
                        yield _with(plan, group, moved)
        if options.layers_per_segment is None:
            for most in (None, 4, 2, 1):
                cut = _segmented(first, most)
                if cut != first:
                    yield _with(plan, group, cut)
    yield from _halved(plan)
    yield from _shares(plan)
    yield from _orders(plan)


ALIKE = (Schedule.ONE_F_ONE_B, Schedule.EAGER, Schedule.ZERO_BUBBLE)
"""Schedules that ask the same of stages and layers."""


def _schedules(plan: Plan, options: PlanOptions) -> Iterator[Plan]:
    """Other orders of the same microbatches."""
    pipelines = any(len(replica.stages) > 1 for replica in plan.replicas)
    if options.schedule is None and pipelines and plan.schedule in ALIKE:
        for schedule in ALIKE:
            if schedule is not plan.schedule:
                yield dataclasses.replace(plan, schedule=schedule, prediction=None)


def _equal_replicas(plan: Plan) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        key = (
            tuple(
                (
                    s.layers,
                    s.lanes,
                    s.tensor,
                    s.dtype,
                    s.segments,
                    s.remat,
                    s.params,
                    s.waits,
                )
                for s in replica.stages
            ),
            replica.microbatches,
            replica.microbatch_size,
        )
        groups.setdefault(key, []).append(r)
    return list(groups.values())


def _with(plan: Plan, group: list[int], changed: Replica) -> Plan:
    """The plan with a replica's form given to all of its group."""
    replicas = list(plan.replicas)
    for r in group:
        old = replicas[r]
        stages = tuple(
            dataclasses.replace(new, devices=stage.devices)
            for new, stage in zip(changed.stages, old.stages, strict=True)
        )
        replicas[r] = dataclasses.replace(
            changed,
            stages=stages,
            samples=old.samples,
            microbatches=-(-old.samples // changed.microbatch_size),
        )
    return dataclasses.replace(plan, replicas=tuple(replicas), prediction=None)


def _most(stage: Stage) -> int | None:
    """Most layers of a segment, as it seems from the stage."""
    return None if len(stage.segments) == 1 else max(stage.segments)


def _cut(stage: Stage, layers: tuple[int, int], remat: tuple[Remat, ...]) -> Stage:
    made = segments(layers[1] - layers[0], _most(stage))
    return dataclasses.replace(resegmented(stage, made), layers=layers, remat=remat)


def resegmented(stage: Stage, made: tuple[int, ...]) -> Stage:
    """The stage cut anew; what some segment freed or had on the host all do."""

    def every(found: tuple[Choice, ...], *wanted: Choice) -> tuple[Choice, ...]:
        return next(((each,) * len(made) for each in wanted if each in found), ())

    return dataclasses.replace(
        stage,
        segments=made,
        params=every(stage.params, Params.FREED, Params.STREAMED),
        waits=every(stage.waits, Memory.HOST),
        residuals=every(stage.residuals, Memory.HOST),
    )


def _border_moved(replica: Replica, k: int, by: int) -> Replica | None:
    """A layer from stage k + 1 to stage k, or the other way."""
    a, b = replica.stages[k], replica.stages[k + 1]
    border = a.layers[1] + by
    if not a.layers[0] < border < b.layers[1]:
        return None
    if by > 0:
        remat_a, remat_b = (*a.remat, a.remat[-1]), b.remat[1:]
    else:
        remat_a, remat_b = a.remat[:-1], (b.remat[0], *b.remat)
    stages = list(replica.stages)
    stages[k] = _cut(a, (a.layers[0], border), remat_a)
    stages[k + 1] = _cut(b, (border, b.layers[1]), remat_b)
    return dataclasses.replace(replica, stages=tuple(stages))


def _microbatches(replica: Replica, options: PlanOptions) -> Iterator[Replica]:
    """Other sizes: near ones, and those that leave less padding; those first."""
    lanes = [stage.lanes for stage in replica.stages]
    step = max(lanes)
    if any(step % n for n in lanes):
        return
    size, samples = replica.microbatch_size, replica.samples
    wanted = {size - step, size + step, size * 2, size // 2}
    count = replica.microbatches
    wanted |= {-(-samples // n) for n in (count - 1, count, count + 1) if n > 0}
    # Of other counts near, those that pad less.
    near = {n: -(-samples // n) for n in range(count - 4, count + 5) if n > 0}
    padding = count * size - samples
    wanted |= {each for n, each in near.items() if n * each - samples < padding}
    cap = options.max_microbatch_size

    def closeness(each: int) -> tuple[int, int]:
        return -(-samples // each) * each - samples, abs(each - size)

    sizes = {-(-w // step) * step for w in wanted if w > 0}
    for each in sorted(sizes, key=closeness):
        if each == size or each - step >= samples:
            continue
        if cap is None or each // min(lanes) <= cap:
            yield dataclasses.replace(replica, microbatch_size=each)


def _segmented(replica: Replica, most: int | None) -> Replica:
    stages = tuple(
        resegmented(stage, segments(stage.num_layers, most)) for stage in replica.stages
    )
    return dataclasses.replace(replica, stages=stages)


def _remat(replica: Replica, policy: Remat) -> Replica:
    stages = tuple(
        dataclasses.replace(stage, remat=(policy,) * stage.num_layers)
        for stage in replica.stages
    )
    return dataclasses.replace(replica, stages=stages)


def _halved(plan: Plan) -> Iterator[Plan]:
    """All replicas with half the lanes, and twice as many."""
    replicas: list[Replica] = []
    for replica in plan.replicas:
        size, samples = replica.microbatch_size, replica.samples
        if size % 2 or samples < 2 or any(stage.lanes % 2 for stage in replica.stages):
            return
        for half in (0, 1):
            stages = []
            for stage in replica.stages:
                count = len(stage.devices) // 2
                own = stage.devices[half * count : (half + 1) * count]
                stages.append(
                    dataclasses.replace(stage, devices=own, lanes=stage.lanes // 2)
                )
            part = dataclasses.replace(
                replica, stages=tuple(stages), microbatch_size=size // 2
            )
            replicas.append(_with_samples(part, (samples + half) // 2))
    become = {
        stage_place(r, k): (stage_place(2 * r, k), stage_place(2 * r + 1, k))
        for r, replica in enumerate(plan.replicas)
        for k in range(len(replica.stages))
    }
    yield _replaced(plan, replicas, become)


def _replaced(
    plan: Plan, replicas: Sequence[Replica], become: Mapping[Place, Sequence[Place]]
) -> Plan:
    """The plan with other replicas; state goes to what its places have become."""
    state = tuple(
        dataclasses.replace(
            share,
            shares={
                new: amount / len(places)
                for place, amount in share.shares.items()
                for places in [become.get(place, (place,))]
                for new in places
            },
        )
        for share in plan.state
    )
    return dataclasses.replace(
        plan, replicas=tuple(replicas), state=state, prediction=None
    )


def _shares(plan: Plan) -> Iterator[Plan]:
    """A microbatch's samples, or one, from one replica to another."""
    few = range(min(len(plan.replicas), 6))
    for r in few:
        for s in few:
            if r == s:
                continue
            giver, taker = plan.replicas[r], plan.replicas[s]
            for count in sorted({1, giver.microbatch_size, taker.microbatch_size}):
                if giver.samples > count:
                    replicas = list(plan.replicas)
                    replicas[r] = _with_samples(giver, giver.samples - count)
                    replicas[s] = _with_samples(taker, taker.samples + count)
                    yield dataclasses.replace(
                        plan, replicas=tuple(replicas), prediction=None
                    )


def _orders(plan: Plan) -> Iterator[Plan]:
    """Neighbours swapped: replicas, whose order is that of sums, and devices of stages
    that differ in where they are only."""
    for r in range(min(len(plan.replicas), 5) - 1):
        if plan.replicas[r] != plan.replicas[r + 1]:
            replicas = list(plan.replicas)
            replicas[r : r + 2] = replicas[r + 1], replicas[r]
            become = {
                stage_place(old, k): (stage_place(new, k),)
                for old, new in ((r, r + 1), (r + 1, r))
                for k in range(len(plan.replicas[old].stages))
            }
            yield _replaced(plan, replicas, become)
    if plan.schedule in (Schedule.INTERLEAVED, Schedule.LAYERED):
        return
    for r, replica in enumerate(plan.replicas[:4]):
        for k in range(min(len(replica.stages), 9) - 1):
            a, b = replica.stages[k : k + 2]
            if (a.lanes, a.tensor, a.dtype) == (b.lanes, b.tensor, b.dtype):
                stages = list(replica.stages)
                stages[k] = dataclasses.replace(a, devices=b.devices)
                stages[k + 1] = dataclasses.replace(b, devices=a.devices)
                changed = dataclasses.replace(replica, stages=tuple(stages))
                replicas = [*plan.replicas[:r], changed, *plan.replicas[r + 1 :]]
                yield dataclasses.replace(
                    plan, replicas=tuple(replicas), prediction=None
                )


def _with_samples(replica: Replica, samples: int) -> Replica:
    return dataclasses.replace(
        replica,
        samples=samples,
        microbatches=-(-samples // replica.microbatch_size),
    )
