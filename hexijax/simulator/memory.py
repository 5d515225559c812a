"""What each device holds over a played step, and its peak.

    Program, Steps -> lives -> Life, ... ; lives, bytes -> curves -> MemoryCurve

A buffer lives from the start of what writes it to the end of its last reader; one whose
memory a write of the same kind and size takes over ends as that begins to live. Steps
overlap as they do when played: a life that reaches into the next step counts there.
Copies inside a sum are no buffers. O(n log n) in instructions, and only when asked for.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hexijax.costs.buffers import BufferBytes
from hexijax.costs.instructions import PlanCosts
from hexijax.plan.plan import Place
from hexijax.program.fuse import fused_pairs
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Gather,
    Instruction,
    Kind,
    Load,
    Prefetch,
    Program,
    Send,
)
from hexijax.simulator.steps import Steps

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Bytes of one device over a step in its steady state."""

    times_s: tuple[float, ...]
    """From 0, rising; the times at which the bytes change."""

    num_bytes: tuple[int, ...]
    """From each time until the next, the last until the step's end."""

    @property
    def peak_bytes(self) -> int:
        """The most of the step."""
        return max(self.num_bytes)

    def __add__(self, more: int) -> "MemoryCurve":
        """With ``more`` bytes all step."""
        return dataclasses.replace(
            self, num_bytes=tuple(size + more for size in self.num_bytes)
        )


class Life(NamedTuple):
    """A buffer and its time, or what one segment's backward needs inside."""

    place: Place
    buffer: Buffer | None
    start_s: float
    end_s: float
    """Infinite: it is there all step."""
    num_bytes: int


def lives(
    program: Program,
    steps: Steps,
    step_s: float,
    costs: PlanCosts,
    sizes: BufferBytes,
) -> Iterator[Life]:
    """Of all buffers that a step writes; scalars are left out."""
    spans = _Spans(program, steps, costs)
    born: dict[Buffer, tuple[float, int]] = {}
    """Written last: what comes back from the host has a life each time."""
    ends: dict[Buffer, float] = {}
    for i in program.body:
        dying = {
            (r.buffer.kind, r.buffer.place, r.buffer.subject, sizes(r.buffer)): r
            for r in i.reads
            if r.dies
        }
        for read in i.reads:
            end_s = spans.of(i, read.buffer.place)[1]
            ends[read.buffer] = max(ends.get(read.buffer, end_s), end_s)
        for buffer in i.writes:
            if buffer in born:
                start_s, size = born.pop(buffer)
                end_s = ends.pop(buffer, spans.ready_s[buffer])
                yield Life(buffer.place, buffer, start_s, max(start_s, end_s), size)
            start_s, end_s = spans.of(i, buffer.place)
            size = sizes(buffer)
            if isinstance(i, Send):
                size = sizes.wire(i.reads[0].buffer, i.target)
            if (buffer.kind, buffer.place, buffer.subject, size) in dying:
                start_s = end_s
            spans.ready_s[buffer] = end_s
            if buffer.kind is not Kind.SCALAR:
                born[buffer] = start_s, size
        if isinstance(i, Backward):
            cots = (b for b in (*(r.buffer for r in i.reads), *i.writes))
            own = sum(sizes(b) for b in cots if b.kind is Kind.COT)
            inside = sizes.transient(i.place, i.segment) - own
            yield Life(i.place, None, *spans.of(i, i.place), max(inside, 0))
    brought = {
        (i.buffer.place, i.buffer.subject)
        for i in program.body
        if isinstance(i, Prefetch) and i.buffer.kind is Kind.STATE
    }
    for buffer in ends:  # what steps read and none writes: it does not train
        written = buffer in born or buffer._replace(step=1) in born
        if buffer.kind is Kind.PARAM and not written:
            yield Life(buffer.place, buffer, 0.0, math.inf, sizes(buffer))
    for buffer, (start_s, size) in born.items():
        old = buffer._replace(step=0)
        late = buffer._replace(step=buffer.step - 1)
        if buffer.kind is Kind.STATE:
            comes = (buffer.place, buffer.subject) in brought
            end_s = ends.get(buffer, start_s) if comes else math.inf
        elif buffer.step == 0 and late in ends:  # by the next step
            end_s = max(ends[late] + step_s, start_s)
        elif buffer.step and old in ends:  # the next step's last reader
            end_s = max(ends[old] + step_s, start_s)
        else:
            end_s = max(ends.get(buffer, start_s), spans.ready_s[buffer])
        yield Life(buffer.place, buffer, start_s, end_s, size)


class _Spans:
    """When each instruction is at work at a place."""

    def __init__(self, program: Program, steps: Steps, costs: PlanCosts) -> None:
        self.ready_s: dict[Buffer, float] = {}
        """By the end of what wrote it."""
        self._steps, self._costs = steps, costs
        self._tasks: dict[int, list[int]] = {}
        for number, task in enumerate(steps.work):
            self._tasks.setdefault(id(task.instruction), []).append(number)
        pairs = fused_pairs(program)
        after: dict[str, Instruction] = {}
        for i in reversed(program.body):
            if isinstance(i, Forward):
                pair = pairs.get((i.place, i.segment, i.microbatches))
                if pair is not None:  # its work is done where the Forward stands
                    self._tasks[id(pair)] = self._tasks[id(i)]
            if isinstance(i, Forward | Backward):
                after[i.place.split(".")[0]] = i
            elif isinstance(i, Load) and f"r{i.replica}" in after:
                self._tasks[id(i)] = self._tasks[id(after[f"r{i.replica}"])]

    def of(self, i: Instruction, place: Place) -> Span:
        """What takes no time is done when all that it reads is there."""
        numbers = self._tasks.get(id(i))
        if not numbers:
            made = [self.ready_s.get(r.buffer, 0.0) for r in i.reads]
            return (max(made, default=0.0),) * 2
        if len(numbers) > 1:
            numbers = [n for n in numbers if self._at(n, i, place)] or numbers
        starts, ends = self._steps.starts, self._steps.ends
        return min(starts[n] for n in numbers), max(ends[n] for n in numbers)

    def _at(self, number: int, i: Instruction, place: Place) -> bool:
        use = self._steps.work[number].use
        if not use.devices and not use.behind:  # copies arrive
            return isinstance(i, Gather) and place in i.places
        devices = self._costs.devices(place)
        return use.behind == devices or set(devices) <= set(use.devices)


def curves(
    found: Iterable[Life], steps: Steps, step_s: float, costs: PlanCosts
) -> dict[str, MemoryCurve]:
    """Of all devices that hold something."""
    first_s = min(
        start_s
        for start_s, task in zip(steps.starts, steps.work, strict=True)
        if task.use.seconds
    )
    by_place: dict[Place, list[Life]] = {}
    for life in found:
        by_place.setdefault(life.place, []).append(life)
    places: dict[str, list[Place]] = {}
    for place in by_place:
        for device in costs.devices(place):
            places.setdefault(device, []).append(place)
    made: dict[tuple[Place, ...], MemoryCurve] = {}
    for used in dict.fromkeys(map(tuple, places.values())):
        here = [life for place in used for life in by_place[place]]
        made[used] = _curve(here, first_s, step_s)
    return {device: made[tuple(used)] for device, used in places.items()}


def _curve(found: Sequence[Life], first_s: float, step_s: float) -> MemoryCurve:
    """The lives of one step, laid over those of the steps before and after."""
    change: dict[float, int] = {0.0: 0}
    for life in found:
        if life.end_s == math.inf:
            change[0.0] += life.num_bytes
            continue
        for time_s, more in (
            (life.start_s, life.num_bytes),
            (life.end_s, -life.num_bytes),
        ):
            steps, rest_s = divmod(time_s - first_s, step_s)
            change[rest_s] = change.get(rest_s, 0) + more
            change[0.0] -= math.floor(steps) * more
    times_s = sorted(change)
    now = 0
    sizes: list[int] = []
    for time_s in times_s:
        now += change[time_s]
        sizes.append(now)
    return MemoryCurve(times_s=tuple(times_s), num_bytes=tuple(sizes))


def all_devices(
    played: Mapping[str, MemoryCurve],
    like: Mapping[str, Sequence[str]],
    state_bytes: Mapping[str, int],
) -> dict[str, MemoryCurve]:
    """Of all that was played stands for; rows at home differ a little."""
    return {
        other: curve + (state_bytes[other] - state_bytes[device])
        for device, curve in played.items()
        for other in like.get(device, (device,))
    }
