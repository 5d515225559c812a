"""The order in which queues do their tasks, settled once and repeated every step.

    Work at nominal rates, Rule -> draw -> Order; Work, Order -> play -> seconds a step

An order is drawn by letting each queue take what is needed first among what is ready,
under nominal rates of the links. It is then kept: played with the true rates it is a
recurrence of sums and maxima, in which nothing that becomes faster makes anything
later. That an order holds its pools and its gradients within bounds is written into it
as edges, and so holds at any rate.
"""

import bisect
import dataclasses
import enum
import heapq
import math
from collections.abc import Sequence

from hexijax.planner.offload.tasks import Queue, Task, Work

DRAWN_STEPS = 4
"""Steps after which an order is read off, the one before the last."""

SETTLED = 1e-9
"""Relative change of a step that counts as none."""

PLAYED_STEPS = 48
"""Most steps played; what has not settled by then is an average."""


class Rule(enum.StrEnum):
    """What a queue takes next of what is ready."""

    PRIORITY = "priority"
    """What is needed first."""
    FIFO = "fifo"
    """What was ready first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Tasks of a step in the order of their starts, with how many steps late each is,
    and edges that keep pools and gradients within bounds."""

    body: tuple[tuple[int, int], ...]
    """(task, steps it belongs back)."""

    edges: tuple[tuple[int, int, int], ...]
    """(task, task that ends before, steps earlier)."""

    alive: tuple[tuple[int, tuple[int, ...]], ...]
    """At each forward or backward, by its position, layers whose gradients are alive.
    """


def draw(
    work: Work,
    rule: Rule,
    grads_bytes: Sequence[int],
    limit_bytes: float = math.inf,
) -> Order | None:
    """An order of one step's tasks.

    Args:
      work: at nominal rates.
      rule: what goes first.
      grads_bytes: of each layer's gradient.
      limit_bytes: most bytes of gradients at once.

    Returns:
      None where the steps do not come to repeat.
    """
    drawn = _Drawing(work, rule, grads_bytes, limit_bytes)
    if not drawn.run():
        return None
    return drawn.order()


class _Drawing:
    def __init__(
        self,
        work: Work,
        rule: Rule,
        grads_bytes: Sequence[int],
        limit_bytes: float,
    ) -> None:
        self._work, self._tasks = work, work.tasks
        self._rule, self._grads_bytes = rule, grads_bytes
        self._limit = limit_bytes
        self._slots: dict[str, int] = {}
        self._live = 0.0
        self._number = len(work.tasks)
        count = self._number * DRAWN_STEPS
        self._starts, self._ends = [math.nan] * count, [math.nan] * count
        self._followers: list[list[tuple[int, int]]] = [[] for _ in self._tasks]
        self._beside: list[list[int]] = [[] for _ in self._tasks]
        self._releases: list[list[str]] = [[] for _ in self._tasks]
        for i, task in enumerate(self._tasks):
            for before, lag in task.after:
                self._followers[before].append((i, lag))
            if task.along >= 0:
                self._beside[task.along].append(i)
            if task.takes:
                self._releases[task.until].append(task.takes)

    def run(self) -> bool:
        """Plays some steps; whether all of them ended."""
        number, tasks = self._number, self._tasks
        queue_of = [int(task.queue) for task in tasks]
        seconds = [task.seconds for task in tasks]
        keys = [self._key(task) for task in tasks]
        followers, beside, releases = self._followers, self._beside, self._releases
        waits = [
            sum(lag <= step for _, lag in task.after) + (task.along >= 0)
            for step in range(DRAWN_STEPS)
            for task in tasks
        ]
        ready: list[list[tuple[float, int]]] = [[] for _ in Queue]
        busy = [False] * len(Queue)
        self._slots, self._live = dict(self._work.slots), 0.0
        events: list[tuple[float, int]] = []
        done, now_s, length = 0, 0.0, self._work.length

        def release(at: int) -> None:
            waits[at] -= 1
            if not waits[at]:
                step, index = divmod(at, number)
                entry = (step * length + keys[index], at)
                heapq.heappush(ready[queue_of[index]], entry)
                touched.add(queue_of[index])

        touched = set(range(len(Queue)))
        for at, count in enumerate(waits):
            if not count:
                waits[at] = 1
                release(at)
        while True:
            while touched:
                queue = touched.pop()
                if busy[queue] or not ready[queue]:
                    continue
                at = self._next(ready[queue])
                if at < 0:
                    continue
                self._starts[at] = now_s
                busy[queue] = True
                index = at % number
                heapq.heappush(events, (now_s + seconds[index], at))
                for other in beside[index]:
                    release(at - index + other)
            if not events:
                break
            now_s, at = heapq.heappop(events)
            step, index = divmod(at, number)
            self._ends[at] = now_s
            done += 1
            touched.add(queue_of[index])
            busy[queue_of[index]] = False
            for pool in releases[index]:
                self._slots[pool] += 1
                touched |= {int(Queue.IN), int(Queue.COMPUTE)}
            if tasks[index].frees:
                self._live -= self._grads_bytes[tasks[index].layer]
                touched.add(int(Queue.COMPUTE))
            for other, lag in followers[index]:
                if step + lag < DRAWN_STEPS:
                    release((step + lag) * number + other)
        return done == number * DRAWN_STEPS

    def _key(self, task: Task) -> float:
        """The less, the sooner; of one step."""
        key = task.due if self._rule is Rule.PRIORITY else task.ready
        if task.queue is Queue.COMPUTE and task.compute < 0:
            # Updates are short, and others wait for them.
            return key - 3 * self._work.length * DRAWN_STEPS
        return key

    def _next(self, ready: list[tuple[float, int]]) -> int:
        """Takes the first that may start off a heap; -1: none may."""
        skipped: list[tuple[float, int]] = []
        found, tasks, number = -1, self._tasks, self._number
        while ready:
            entry = heapq.heappop(ready)
            task = tasks[entry[1] % number]
            if not (task.takes or task.takes_grads):
                found = entry[1]
                break
            more = sum(self._grads_bytes[j] for j in task.takes_grads)
            fits = self._live + more <= self._limit or not (more and self._live)
            if fits and (not task.takes or self._slots[task.takes]):
                found = entry[1]
                self._live += more
                if task.takes:
                    self._slots[task.takes] -= 1
                break
            skipped.append(entry)
        for entry in skipped:
            heapq.heappush(ready, entry)
        return found

    # Reading off the order.

    def order(self) -> Order | None:
        """The step before the last."""
        number, step = self._number, DRAWN_STEPS - 2
        first = next(i for i, t in enumerate(self._tasks) if t.compute == 0)
        begin_s = self._starts[step * number + first]
        length_s = self._starts[(step + 1) * number + first] - begin_s
        if not length_s > 0:
            return None

        def phase(at_s: float) -> tuple[float, int]:
            back = math.floor((at_s - begin_s) / length_s + 1e-12)
            return at_s - back * length_s, back

        starts = [phase(self._starts[step * number + i]) for i in range(number)]
        ends = [phase(self._ends[step * number + i]) for i in range(number)]
        ranked = sorted(range(number), key=lambda i: (starts[i][0], -starts[i][1], i))
        body = tuple((i, starts[i][1]) for i in ranked)
        edges = [*self._pool_edges(ranked, starts, ends)]
        edges += self._freed_edges(step)
        order = Order(body, tuple(edges), self._alive(step))
        return order if _is_sound(self._work, order) else None

    def _pool_edges(
        self,
        ranked: Sequence[int],
        starts: Sequence[tuple[float, int]],
        ends: Sequence[tuple[float, int]],
    ) -> list[tuple[int, int, int]]:
        """The n-th that takes a slot waits for the one that gave it back."""
        edges: list[tuple[int, int, int]] = []
        for pool, size in self._work.slots.items():
            takers = [i for i in ranked if self._tasks[i].takes == pool]
            count = len(takers)
            givers = sorted(
                (self._tasks[i].until for i in takers),
                key=lambda i: (ends[i][0], -ends[i][1], i),
            )
            for rank, taker in enumerate(takers):
                rounds, place = divmod(rank - size, count)
                giver = givers[place]
                lag = ends[giver][1] - starts[taker][1] - rounds
                edges.append((taker, giver, lag))
        return edges

    def _freed_edges(self, step: int) -> list[tuple[int, int, int]]:
        """What frees gradients on other queues than compute frees them in time."""
        if self._limit == math.inf:
            return []
        number = self._number
        frees = sorted(
            (self._ends[s * number + i], s, i)
            for i, task in enumerate(self._tasks)
            if task.frees and task.queue is not Queue.COMPUTE
            for s in range(step + 1)
        )
        edges: list[tuple[int, int, int]] = []
        for i, task in enumerate(self._tasks):
            if task.takes_grads and frees:
                start_s = self._starts[step * number + i]
                at = bisect.bisect_right(frees, (start_s, DRAWN_STEPS, 0)) - 1
                if at >= 0:
                    edges.append((i, frees[at][2], step - frees[at][1]))
        return edges

    def _alive(self, step: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """At each pass of a step, whose gradients are there."""
        number = self._number
        lives: list[tuple[float, float, int]] = []
        freed = {t.layer: i for i, t in enumerate(self._tasks) if t.frees}
        for i, task in enumerate(self._tasks):
            for j in task.takes_grads:
                for s in range(step + 1):
                    end_s = self._ends[s * number + freed[j]]
                    lives.append((self._starts[s * number + i], end_s, j))
        found: list[tuple[int, tuple[int, ...]]] = []
        for i, task in enumerate(self._tasks):
            if task.compute >= 0:
                start_s = self._starts[step * number + i]
                there = [j for a, b, j in lives if a <= start_s < b]
                found.append((task.compute, tuple(there)))
        return tuple(found)


def _is_sound(work: Work, order: Order) -> bool:
    """Whether everything stands behind what it waits for, steps counted."""
    place = {i: (rank, back) for rank, (i, back) in enumerate(order.body)}
    edges = [
        (i, before, lag)
        for i, task in enumerate(work.tasks)
        for before, lag in (
            *task.after,
            *([(task.along, 0)] if task.along >= 0 else []),
        )
    ]
    for i, before, lag in (*edges, *order.edges):
        (rank, back), (rank_before, back_before) = place[i], place[before]
        ago = back + lag - back_before
        if ago < 0 or (ago == 0 and rank_before >= rank):
            return False
    return True


def play(work: Work, order: Order) -> float:
    """Seconds of a step once steps repeat, each queue in the order's turn."""
    return Played(work, order).step_s


class Played:
    """An order played at true rates."""

    def __init__(self, work: Work, order: Order) -> None:
        tasks, back_of = work.tasks, dict(order.body)
        more: dict[int, list[tuple[int, int]]] = {}
        for i, before, lag in order.edges:
            more.setdefault(i, []).append((before, lag))
        compiled: list[tuple[int, int, float, list[tuple[int, int]], int]] = []
        deepest = 0
        for i, back in order.body:
            task = tasks[i]
            after = [
                (before, back + lag - back_of[before])
                for before, lag in (*task.after, *more.get(i, ()))
            ]
            deepest = max([deepest, *(ago for _, ago in after)])
            compiled.append((i, int(task.queue), task.seconds, after, task.along))
        self.step_s = 0.0
        self.starts: list[float] = []
        self.ends: list[float] = []
        free = [0.0] * len(Queue)
        rings = [[0.0] * len(tasks) for _ in range(deepest + 1)]
        begun = [[0.0] * len(tasks) for _ in range(deepest + 2)]
        tops: list[float] = []
        for step in range(PLAYED_STEPS):
            rings = [[0.0] * len(tasks), *rings[:deepest]]
            begun = [[0.0] * len(tasks), *begun[: deepest + 1]]
            now = rings[0]
            for i, queue, seconds, after, along in compiled:
                start = free[queue]
                for before, ago in after:
                    end = rings[ago][before]
                    if end > start:
                        start = end
                if along >= 0:
                    other = begun[back_of[i] - back_of[along]][along]
                    if other > start:
                        start = other
                begun[0][i] = start
                free[queue] = now[i] = start + seconds
            tops.append(free[Queue.COMPUTE])
            if step > deepest + 2 and _settled(tops):
                break
        self.starts, self.ends = begun[0], rings[0]
        half = len(tops) // 2
        self.step_s = (
            tops[-1] - tops[-2]
            if _settled(tops)
            else (tops[-1] - tops[half]) / (len(tops) - 1 - half)
        )


def _settled(tops: Sequence[float]) -> bool:
    if len(tops) < 5:
        return False
    last, before, first = (
        tops[-1] - tops[-2],
        tops[-2] - tops[-3],
        tops[-3] - tops[-4],
    )
    return (
        abs(last - before) <= SETTLED * last and abs(first - before) <= SETTLED * last
    )
