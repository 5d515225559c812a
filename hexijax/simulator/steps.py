"""Queues over which tasks are played, step after step, until the steps repeat.

    tasks -> Steps -> starts, ends, and what each task waited for last

Time and memory are linear in tasks, about half a microsecond each a step.
"""

import bisect
import collections
from collections.abc import Iterable, Sequence

from hexijax.costs.rates import HOST_CALL_S
from hexijax.program.clock import together
from hexijax.simulator.uses import Task, Use

MOST_STEPS, LEAST_STEPS = 24, 6
"""Played before the last half of them is taken as the steady state: how many, by how
long a step is."""

MOST_TASKS = 1_000_000
"""Of those steps together: the ends of a step are a small part of a long one."""

LONGEST_ROUND = 6
"""Steps after which queues are looked at for repeating: where ways are shared, long and
short steps may take turns."""

SAME = 1e-9
"""Queues that advance by amounts which differ by less, relatively, repeat."""

HOST, STEP_BEFORE, QUEUE = -1, -2, -3
"""What a task may have waited for last, beside another task; ``QUEUE - q`` is queue q.
"""


MOST_GAPS = 32
"""Of a way, that later copies may still use."""

NO_GAPS: tuple[list[float], list[float]] = ([], [])

Held = tuple[tuple[int, float], ...]
"""Ways that a copy takes, and for how long."""


class Steps:
    """Queues, and the step played last."""

    def __init__(self, work: Sequence[Task]) -> None:
        self.work = work
        uses = collections.Counter([task.use for task in work])
        self.queues = Queues(uses)
        self._compiled = self._compile()
        self.hosts = self.queues.hosts
        self._host_s = [0.0] * len(self.hosts)
        calls = dict.fromkeys(self.hosts, 0.0)
        for use, times in uses.items():
            for host, count in use.hosts:
                calls[host] += count * times
        self.host_step_s = {host: HOST_CALL_S * count for host, count in calls.items()}
        self.free_s = [0.0] * self.queues.number
        self._ways = Ways(self.free_s)
        self.free_before_s = list(self.free_s)
        self.starts: list[float] = []
        self.ends: list[float] = [0.0] * len(work)
        self.bound: list[int] = []
        """Of each task, what it waited for last."""
        self._end_s = 0.0

    def _compile(self) -> "list[Compiled]":
        """Tasks with numbers for names."""
        numbers = {use: self.queues.numbers(use) for use in self.queues.uses}
        made: list[Compiled] = []
        for task in self.work:
            queues, calls, behind, held = numbers[task.use]
            rest: Rest | None = None
            if behind or held or task.before or task.along or task.held:
                rest = (behind, task.before, task.along, held, task.held)
            made.append((queues, task.use.seconds, calls, task.after, rest))
        return made

    def until_they_repeat(self) -> float:
        """Plays steps; returns how long one takes in the steady state.

        Where long and short ones take turns, that is their mean.
        """
        host_s = max(self.host_step_s.values(), default=0.0)
        before: list[tuple[float, list[float]]] = [(0.0, list(self.free_s))]
        most = max(LEAST_STEPS, min(MOST_STEPS, MOST_TASKS // max(len(self.work), 1)))
        for _ in range(most):
            self.play()
            for count, (end_s, free_s) in enumerate(reversed(before), 1):
                if count > LONGEST_ROUND:
                    break
                round_s = self._end_s - end_s
                if self._repeat(free_s, round_s, host_s * count):
                    return round_s / count
            before.append((self._end_s, list(self.free_s)))
        half = most // 2
        return max(host_s, (self._end_s - before[-1 - half][0]) / half)

    def play(self) -> float:
        """One more step; returns the time from the last one's end to its own."""
        free_s, host_s, before_ends = self.free_s, self._host_s, self.ends
        self.free_before_s = list(free_s)
        starts: list[float] = []
        ends: list[float] = []
        bound: list[int] = []
        for queues, seconds, hosts, after, rest in self._compiled:
            start, cause = 0.0, HOST
            if rest is not None:
                for cause in rest[4]:  # the host waits, and dispatches nothing else
                    for host, _ in hosts:
                        host_s[host] = max(host_s[host], ends[cause])
            for host, call_s in hosts:
                host_s[host] += call_s
                if host_s[host] > start:
                    start = host_s[host]
            for task in after:
                if ends[task] > start:
                    start, cause = ends[task], task
            for queue in queues:
                if free_s[queue] > start:
                    start, cause = free_s[queue], QUEUE - queue
            if rest is None:
                end = start + seconds
                for queue in queues:
                    free_s[queue] = end
            else:
                behind, before, along, held, _ = rest
                for queue in behind:
                    if free_s[queue] > start:
                        start, cause = free_s[queue], QUEUE - queue
                for task, skip_s in before:
                    if before_ends[task] + skip_s > start:
                        start, cause = before_ends[task] + skip_s, STEP_BEFORE
                for task in along:
                    if starts[task] > start:
                        start, cause = starts[task], task
                if held:
                    ready = start
                    start, way = self._ways.take(start, held)
                    if start > ready:
                        cause = QUEUE - way
                end = start + seconds
                for task in along:
                    if ends[task] > end:
                        end = ends[task]
                for queue in queues:
                    free_s[queue] = end
            starts.append(start)
            ends.append(end)
            bound.append(cause)
        self.starts, self.ends, self.bound = starts, ends, bound
        last_s, self._end_s = self._end_s, max(ends)
        return self._end_s - last_s

    def _repeat(self, before_s: Sequence[float], round_s: float, host_s: float) -> bool:
        """Whether every queue advanced by the whole round, and no host needs longer."""
        return host_s <= round_s * (1 + SAME) and all(
            abs(now_s - then_s - round_s) <= SAME * round_s
            for now_s, then_s in zip(self.free_s, before_s, strict=True)
            if now_s > then_s
        )


class Ways:
    """Ways out and in: they carry what is ready first, in no order of dispatch."""

    def __init__(self, free_s: list[float]) -> None:
        self._free_s = free_s
        """From when each queue is free for good."""
        self._gaps: dict[int, tuple[list[float], list[float]]] = {}
        """Times before that in which a way is free: begins and ends, in order."""

    def take(self, ready_s: float, held: Held) -> tuple[float, int]:
        """The earliest time at which all ways are free long enough, and the last way
        that had to be waited for; they are taken from then on."""
        free_s = self._free_s
        for way, _ in held:
            if free_s[way] > ready_s:
                break
        else:  # as a rule: nothing to wait for
            for way, hold_s in held:
                if ready_s > free_s[way]:
                    self._gap(way, free_s[way], ready_s)
                free_s[way] = ready_s + hold_s
            return ready_s, held[0][0]
        at_s, late, moved = ready_s, held[0][0], True
        while moved:
            moved = False
            for way, hold_s in held:
                free_at_s = self._earliest(way, at_s, hold_s)
                if free_at_s > at_s:
                    at_s, late, moved = free_at_s, way, True
        for way, hold_s in held:
            self._take(way, at_s, hold_s)
        return at_s, late

    def _gap(self, way: int, begin_s: float, end_s: float) -> None:
        begins, ends = self._gaps.setdefault(way, ([], []))
        begins.append(begin_s)
        ends.append(end_s)
        _forget(begins, ends)

    def _earliest(self, way: int, at_s: float, hold_s: float) -> float:
        free_s = self._free_s[way]
        if at_s >= free_s:
            return at_s
        begins, ends = self._gaps.get(way, NO_GAPS)
        for i in range(bisect.bisect_left(ends, at_s + hold_s), len(ends)):
            from_s = max(begins[i], at_s)
            if from_s + hold_s <= ends[i]:
                return from_s
        return free_s

    def _take(self, way: int, at_s: float, hold_s: float) -> None:
        free_s = self._free_s[way]
        if at_s >= free_s:
            if at_s > free_s:
                self._gap(way, free_s, at_s)
            self._free_s[way] = at_s + hold_s
            return
        begins, ends = self._gaps[way]
        i = bisect.bisect_right(begins, at_s) - 1
        begin_s, end_s = begins[i], ends[i]
        parts = ((begin_s, at_s), (at_s + hold_s, end_s))
        left = [(a, b) for a, b in parts if b > a]
        begins[i : i + 1] = [a for a, _ in left]
        ends[i : i + 1] = [b for _, b in left]
        _forget(begins, ends)


def _forget(begins: list[float], ends: list[float]) -> None:
    """The first gap, where there are too many."""
    if len(begins) > MOST_GAPS:
        del begins[0], ends[0]


Rest = tuple[
    tuple[int, ...],
    Sequence[tuple[int, float]],
    Sequence[int],
    Held,
    Sequence[int],
]
"""Queues waited for, tasks of the step before and alongside, ways with their times, and
tasks that hold dispatch back."""

Calls = tuple[tuple[int, float], ...]
"""Hosts, and how long they take over a task's calls."""

Compiled = tuple[tuple[int, ...], float, Calls, Sequence[int], Rest | None]
"""Queues, seconds, hosts with the time of their calls, tasks before, and the rest."""


class Queues:
    """Numbers for queues; devices that always work together are one."""

    def __init__(self, uses: Iterable[Use]) -> None:
        self.uses = tuple(uses)
        sets = dict.fromkeys(
            used for use in self.uses for used in (use.devices, use.behind) if used
        )
        self.of_device = together(sets)
        self.of_set = {
            used: tuple(dict.fromkeys(self.of_device[d] for d in used)) for used in sets
        }
        self.of_set[()] = ()
        self.first_way = len(set(self.of_device.values()))
        ways = dict.fromkeys(way for use in self.uses for way in use.load.ways)
        self.of_way = {way: self.first_way + i for i, way in enumerate(ways)}
        self.number = self.first_way + len(ways)
        islands = dict.fromkeys(host for use in self.uses for host, _ in use.hosts)
        self.hosts = {island: i for i, island in enumerate(islands)}

    def numbers(self, use: Use) -> tuple[tuple[int, ...], Calls, tuple[int, ...], Held]:
        """Queues kept, calls, queues waited for, and ways held."""
        ways = (self.of_way[way] for way in use.load.ways)
        return (
            self.of_set[use.devices],
            tuple((self.hosts[host], HOST_CALL_S * count) for host, count in use.hosts),
            self.of_set[use.behind],
            tuple(zip(ways, use.load.holds_s, strict=True)),
        )
