"""Plays a few of many microbatches, where all that follow repeat them.

    Plan -> a short plan, played -> its cycle -> a step of the whole plan

A pipeline has found its cycle when the last microbatches enter every stage of a replica
equally far apart, several times in a row; or each as far from the one some before it,
where a few come in turns. A longer run then is the same as a later
start: the short plan is played again with all its stages starting later by what is left
out. Under ``layered`` a pass is of a few long microbatches. Where there is no cycle,
where hosts may hold devices up, and where little is left out, the plan is played in
full.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.buffers import BufferBytes
from hexijax.costs.instructions import PlanCosts
from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan, Replica, Schedule, stage_place
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Backward, Forward
from hexijax.simulator.account import account
from hexijax.simulator.play import devices, with_memory
from hexijax.simulator.steps import Steps
from hexijax.simulator.tasks import tasks
from hexijax.simulator.timeline import Timeline

EQUAL = 1e-6
"""Cycles that differ by less, relatively, are one."""

WORTH = 3
"""A plan of fewer times its short form's microbatches is played in full."""

ROUNDS = 3
"""Cycles that must be equal."""

A_PASS = 12
"""Microbatches that are played for those of a layered pass: a step is said to be up to
2% longer than it is, since sums find room only between them."""

PERIODS = (1, 2, 3, 4, 6, 12)
"""Microbatches, or rounds of the schedule, after which starts may repeat."""

HOST_ROOM = 0.9
"""Hosts that need a larger part of the step may hold devices up."""


def by_cycles(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    costs: PlanCosts,
    rules: StepRules,
    *,
    groups: Sequence[Group] | None,
    whole_leaves: bool,
    events: bool,
    sizes: BufferBytes | None,
) -> Timeline | None:
    """A step of the plan, or None where it must be played in full."""
    if sizes and plan.schedule is Schedule.GPIPE:  # it holds all microbatches at once
        return None
    if plan.schedule is Schedule.LAYERED:  # each segment has a cycle of its own
        if events or sizes or not passes_repeat(plan):
            return None
        return _by_passes(plan, chain, cluster, costs, rules, groups, whole_leaves)
    apart = [_apart(replica, plan.schedule) for replica in plan.replicas]
    lengths = [
        _length(replica, plan.schedule, n)
        for replica, n in zip(plan.replicas, apart, strict=True)
    ]
    short = _short(plan, lengths)
    if _work(plan) < WORTH * _work(short):
        return None
    program = lower(
        short,
        chain,
        rules=rules,
        costs=costs,
        whole_leaves=whole_leaves,
        marked=sizes is not None,
        checked=False,
        groups=groups,
    )
    steps = Steps(tasks(program, costs, cluster))
    steps.play()
    starts_s = _starts_s(steps)
    ways = [True, False] if plan.schedule is Schedule.GPIPE else [True]
    skips_s: dict[Place, float] = {}
    times: dict[Place, float] = {}
    for r, replica in enumerate(plan.replicas):
        left_out = replica.microbatches - lengths[r]
        if not left_out:
            continue
        places = [stage_place(r, s) for s in range(len(replica.stages))]
        cycles_s = [
            _cycle_s(
                [starts_s[p, way] for p in places if (p, way) in starts_s],
                lengths[r],
                apart[r],
            )
            for way in ways
        ]
        if None in cycles_s:
            return None
        skip_s = sum(c for c in cycles_s if c is not None) * left_out / apart[r]
        skips_s |= dict.fromkeys(places, skip_s)
        times |= dict.fromkeys(places, replica.microbatches / lengths[r])
    steps = Steps(tasks(program, costs, cluster, skips_s))
    step_s = steps.until_they_repeat()
    made = account(
        steps, step_s, devices(program, plan, costs), times=times, events=events
    )
    if max(made.host_s.values()) > HOST_ROOM * step_s:
        return None
    return with_memory(made, program, steps, costs, sizes) if sizes else made


def passes_repeat(plan: Plan) -> bool:
    """Whether a layered plan's passes over a segment are microbatches in a row, with
    nothing between them."""
    return all(
        len(replica.stages) == 1
        and not replica.stages[0].waits
        and not replica.stages[0].residuals
        for replica in plan.replicas
    )


def _by_passes(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    costs: PlanCosts,
    rules: StepRules,
    groups: Sequence[Group] | None,
    whole_leaves: bool,
) -> Timeline | None:
    """A step of which each pass is a few long microbatches, that stand for all.

    Sums and joins find room between them, as between the many.
    """
    counts = [min(replica.microbatches, A_PASS) for replica in plan.replicas]
    short = _short(plan, counts)
    if _work(plan) < WORTH * _work(short):
        return None
    costs.repeats = {
        stage_place(r, 0): replica.microbatches / n
        for r, (replica, n) in enumerate(zip(plan.replicas, counts, strict=True))
    }
    try:
        program = lower(
            short,
            chain,
            rules=rules,
            costs=costs,
            whole_leaves=whole_leaves,
            marked=False,
            checked=False,
            groups=groups,
        )
        steps = Steps(tasks(program, costs, cluster))
    finally:
        costs.repeats = {}
    step_s = steps.until_they_repeat()
    made = account(steps, step_s, devices(program, plan, costs), events=False)
    return None if max(made.host_s.values()) > HOST_ROOM * step_s else made


def _apart(replica: Replica, schedule: Schedule) -> int:
    """Microbatches of one round of the schedule."""
    if schedule is Schedule.INTERLEAVED:
        return len({stage.devices for stage in replica.stages})
    return 1


def _length(replica: Replica, schedule: Schedule, apart: int) -> int:
    """Microbatches enough to find a cycle: to fill all stages, and some rounds."""
    sets = len({stage.devices for stage in replica.stages})
    fill = 2 * sets - 1 if schedule is Schedule.EAGER else sets
    longest = PERIODS[-1] if apart == 1 else 1
    least = fill + min(fill, 16) + (ROUNDS + longest) * apart
    total = replica.microbatches
    return min(least + (total - least) % (apart * longest), total)


def _work(plan: Plan) -> int:
    return sum(len(r.stages) * r.microbatches for r in plan.replicas)


def _short(plan: Plan, lengths: Sequence[int]) -> Plan:
    replicas = tuple(
        dataclasses.replace(r, microbatches=n, samples=n * r.microbatch_size)
        for r, n in zip(plan.replicas, lengths, strict=True)
    )
    return dataclasses.replace(
        plan, replicas=replicas, batch_size=sum(r.samples for r in replicas)
    )


def _starts_s(steps: Steps) -> dict[tuple[Place, bool], dict[int, float]]:
    """By stage and whether forward: when each microbatch's first segment starts."""
    found: dict[tuple[Place, bool], dict[int, float]] = {}
    for task, start_s in zip(steps.work, steps.starts, strict=True):
        i = task.instruction
        if isinstance(i, Forward | Backward):
            key = (i.place, isinstance(i, Forward))
            found.setdefault(key, {}).setdefault(i.microbatches[0], start_s)
    return found


def _cycle_s(
    starts_s: Sequence[Mapping[int, float]], length: int, apart: int
) -> float | None:
    """Of a round, by the last ones of every stage; None: they do not repeat."""
    for period in PERIODS:
        count, by = ROUNDS + period, period * apart
        last = [length - 1 - k * apart for k in range(count)]
        if last[-1] - by < 0:
            return None
        cycles = [starts[m] - starts[m - by] for starts in starts_s for m in last]
        longest_s = max(cycles)
        if longest_s - min(cycles) <= EQUAL * longest_s:
            return longest_s / period
    return None
