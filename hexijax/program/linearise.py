"""Pass 5: one total order, the order of dispatch, from what must come before what.

    streams, other instructions, costs -> order of their starts on a clock

Order decides overlap, since a copy waits for all compute dispatched before it on its
card. So a Send stands right after its producer. A Recv, a Sum and a Join stand where
the clock says that their inputs have arrived: earlier, they would hold up compute of
the target that could run meanwhile. Of a place's buckets ``IN_FLIGHT`` are on their way
at once: while one travels the next is made ready, and memory is bounded. A Load stands
one microbatch ahead of its use, so that its copy runs beside the compute of the
microbatch before. A Gather or Prefetch of a stream, for a pass, stands where the pass
before begins and travels beside it. Where times tie, moves go before compute, backwards
before forwards, updates last, and early layers first.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from hexijax.plan.plan import Place, Plan
from hexijax.program.clock import WAKE, by_start
from hexijax.program.program import (
    PIECES,
    Agree,
    Backward,
    Buffer,
    Forward,
    Gather,
    Instruction,
    Join,
    Kind,
    Load,
    Part,
    Prefetch,
    Recv,
    Reduce,
    Send,
    Site,
    Sum,
    Update,
    WriteBack,
)

RANKS: dict[type[Instruction], int] = {
    kind: rank
    for rank, kind in enumerate(
        (
            Send,
            Recv,
            Reduce,
            Sum,
            Agree,
            Gather,
            Join,
            Backward,
            Forward,
            Update,
        )
    )
}

COPIES: dict[type[Instruction], int] = {WriteBack: WAKE - 2, Prefetch: WAKE - 1}
"""They are handed over as soon as may be; what leaves gives its slot to what comes."""

CHUNKS = 3
"""Of state from the host, at one place: one comes, one is updated, one leaves."""

IN_FLIGHT = 2
"""Buckets between Reduce and Sum, and between Gather and Join, at one place."""


@runtime_checkable
class Costs(Protocol):
    """How long instructions take."""

    def duration_s(self, instruction: Instruction) -> float:
        """Seconds from start to end with nothing else running."""
        ...


class UnitCosts:
    """A layer takes 1 forward and 2 backward; all else takes no time."""

    def __init__(self, plan: Plan) -> None:
        self._segments = {place: stage.segments for place, stage in plan.stages()}

    def duration_s(self, instruction: Instruction) -> float:
        """Layers of the segment, times the passes that the instruction makes."""
        if not isinstance(instruction, Forward | Backward):
            return 0.0
        first, stop = instruction.microbatches
        layers = self._segments[instruction.place][instruction.segment]
        passes = 1
        if isinstance(instruction, Backward) and instruction.part is Part.BOTH:
            passes = 2
        return float(layers * passes * (stop - first))


def linearise(
    plan: Plan,
    streams: Sequence[Sequence[Instruction]],
    others: Sequence[Instruction],
    loads: Sequence[Load],
    costs: Costs,
    waits: Sequence[tuple[Instruction, Instruction]] = (),
    late: Sequence[Instruction] = (),
) -> tuple[Instruction, ...]:
    """All instructions, each once, by start; equal input gives equal order.

    ``waits`` are pairs of the streams of which the first comes first. ``late`` is what
    the step before left to do, early layers first: they are needed first.
    """
    ahead = _Ahead(streams, at_once=not late)
    jobs = [instr for stream in ahead.streams for instr in stream]
    jobs += [instr for instr in others if not isinstance(instr, Send)]
    first_late = len(jobs)
    jobs += late
    first_travel = len(jobs)
    jobs += ahead.travel
    writer = {buffer: i for i, instr in enumerate(jobs) for buffer in instr.writes}
    loaded = {buffer: i for i, load in enumerate(loads) for buffer in load.writes}
    leaving: dict[int, list[Send]] = {}
    lags_s: dict[Buffer, float] = {}
    for instr in others:
        if isinstance(instr, Send):
            (sent, _), (wire,) = instr.reads[0], instr.writes
            writer[wire] = writer[sent]
            leaving.setdefault(writer[sent], []).append(instr)
            lags_s[wire] = costs.duration_s(instr)

    followers: list[list[int]] = [[] for _ in jobs]
    loads_of: dict[int, list[int]] = {}
    for i, instr in enumerate(jobs):
        for buffer, _ in instr.reads:
            if buffer in writer:
                followers[writer[buffer]].append(i)
            elif buffer in loaded:
                loads_of.setdefault(i, []).append(loaded[buffer])
    for before, after in (
        *_in_turn(jobs[:first_late]),
        *_late_in_turn(jobs[:first_travel], first_late),
    ):
        followers[before].append(after)
    for before, after in _chunks_in_turn(jobs[:first_travel], first_late):
        followers[before].append(after)
    if waits:
        number = {id(instr): i for i, instr in enumerate(jobs)}
        for before, after in waits:
            followers[number[id(before)]].append(number[id(after)])
    start = 0
    for stream in ahead.streams:
        for i in range(start + 1, start + len(stream)):
            followers[i - 1].append(i)
        start += len(stream)
    for i, before in enumerate(ahead.after, first_travel):
        if before is not None:
            followers[before].append(i)
    for i, follower in enumerate(ahead.before, first_travel) if late else ():
        for buffer, _ in jobs[i].reads:
            if buffer in writer:  # it is dispatched before that one
                followers[writer[buffer]].append(follower)

    devices = {place: stage.devices for place, stage in plan.stages()}
    starts = by_start(
        followers=followers,
        ranks=_ranks(jobs),
        devices=[_devices(instr, devices) for instr in jobs],
        seconds=[costs.duration_s(instr) for instr in jobs],
        lags_s={
            i: lags_s[instr.reads[0].buffer]
            for i, instr in enumerate(jobs)
            if isinstance(instr, Recv)
        },
        behind={
            i: devices.get(instr.buffer.place, (instr.buffer.place,))
            for i, instr in enumerate(jobs)
            if isinstance(instr, Prefetch | WriteBack)
        },
    )
    order: list[Instruction] = [*ahead.first]
    loader = _Loader(loads, loaded)
    for i in starts:
        if i >= first_travel:
            continue
        for load in loads_of.get(i, ()):
            order += loader.due(load)
        order += ahead.due.get(i, ())
        order.append(jobs[i])
        order += leaving.get(i, ())
    total = sum(map(len, streams)) + len(others) + len(loads) + len(late)
    assert len(order) == total, "some instructions wait for each other"
    return tuple(order)


def _ranks(jobs: Sequence[Instruction]) -> list[int]:
    """An update that holds up copies is done at once: it is short beside them."""
    written_back = {
        instr.reads[0].buffer.subject
        for instr in jobs
        if isinstance(instr, WriteBack) and instr.reads[0].buffer.kind is Kind.PARAM
    }

    def rank(instr: Instruction) -> int:
        if isinstance(instr, Update) and (
            instr.site is Site.STREAMED or instr.group in written_back
        ):
            return RANKS[Join]
        return COPIES.get(type(instr)) or RANKS[type(instr)]

    return [rank(instr) for instr in jobs]


def _devices(
    instr: Instruction, devices: Mapping[Place, tuple[str, ...]]
) -> tuple[str, ...]:
    """Devices that an instruction keeps busy; moves run beside compute.

    Buckets that share a place share its ways, which count as one more device of it.
    """
    match instr:
        case Forward(place=place) | Backward(place=place) | Join(place=place):
            return devices[place]
        case Update(home=home, site=Site.HOST):
            return (f"cpu {home}",)
        case Update(home=home) | Sum(home=home):
            return devices.get(home, (home,))
        case Reduce(members=members, homes=homes, path=path):
            ways = [f"way {place}" for place in dict.fromkeys((*members, *homes))]
            return (*ways, *_held(members, path, devices))
        case Gather(places=places, path=path):
            ways = [f"way {place}" for place in places]
            return (*ways, *_held(places, path, devices))
        case Prefetch(buffer=buffer):
            return (f"host in {buffer.place}",)
        case WriteBack(buffer=buffer):
            return (f"host out {buffer.place}",)
        case _:
            return ()


def _held(
    places: Sequence[Place], path: int, devices: Mapping[Place, tuple[str, ...]]
) -> tuple[str, ...]:
    """Devices that a collective runs on; pieces run beside what these do."""
    if path == PIECES:
        return ()
    return tuple(device for place in places for device in devices[place])


def _in_turn(jobs: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """Pairs of which the first comes first, so that few buckets are in flight.

    Late layers first, as backwards end; the jobs have early layers first.
    """
    ends: dict[str, list[int]] = {}
    flying: dict[Place, list[str]] = {}
    joins: dict[tuple[Place, str], int] = {}
    gathered: dict[Place, list[str]] = {}
    for i, instr in enumerate(jobs):
        if isinstance(instr, Sum):
            ends.setdefault(instr.group, []).append(i)
        elif isinstance(instr, Join):
            joins[instr.place, instr.group] = i
    for i in reversed(range(len(jobs))):
        instr = jobs[i]
        if isinstance(instr, Reduce):
            before: dict[str, None] = {}
            for place in dict.fromkeys((*instr.members, *instr.homes)):
                groups = flying.setdefault(place, [])
                if len(groups) >= IN_FLIGHT:
                    before[groups[-IN_FLIGHT]] = None
                groups.append(instr.group)
            yield from ((end, i) for group in before for end in ends[group])
        elif isinstance(instr, Gather):
            for place in instr.places:
                groups = gathered.setdefault(place, [])
                if len(groups) >= IN_FLIGHT:
                    yield joins[place, groups[-IN_FLIGHT]], i
                groups.append(instr.group)


def _late_in_turn(
    jobs: Sequence[Instruction], first_late: int
) -> Iterator[tuple[int, int]]:
    """The same for new parameters of the step before: those of early layers first."""
    joins = {
        (instr.place, instr.group): i
        for i, instr in enumerate(jobs[first_late:], first_late)
        if isinstance(instr, Join)
    }
    gathered: dict[Place, list[str]] = {}
    for i, instr in enumerate(jobs[first_late:], first_late):
        if isinstance(instr, Gather):
            for place in instr.places:
                groups = gathered.setdefault(place, [])
                if len(groups) >= IN_FLIGHT:
                    yield joins[place, groups[-IN_FLIGHT]], i
                groups.append(instr.group)


def _chunks_in_turn(
    jobs: Sequence[Instruction], first_late: int
) -> Iterator[tuple[int, int]]:
    """The same for state that comes from the host, a chunk at a time: it comes when the
    gradient of the chunk before is there, and an update has given a slot back, though
    its copy out may still run. Late chunks come first, early layers' before others'."""
    sums: dict[tuple[Place, str], int] = {}
    done: dict[tuple[Place, str], int] = {}
    reduces: dict[str, int] = {}
    coming: dict[Place, list[tuple[str, int]]] = {}
    for i, instr in enumerate(jobs):
        if isinstance(instr, Sum):
            sums[instr.home, instr.group] = i
        elif isinstance(instr, Reduce):
            reduces[instr.group] = i
        elif isinstance(instr, Prefetch):
            coming.setdefault(instr.buffer.place, []).append((instr.buffer.subject, i))
        elif isinstance(instr, Update) and instr.site is Site.STREAMED:
            done[instr.home, instr.group] = i
    for home, found in coming.items():
        late = [chunk for chunk in found if chunk[1] >= first_late]
        chunks = late + found[: len(found) - len(late)][::-1]
        for n, (group, i) in enumerate(chunks):
            if n >= len(late):
                # The first waits for its own gradient, and so stands before the second.
                first = n == len(late)
                yield reduces[group] if first else sums[home, chunks[n - 1][0]], i
            if n >= CHUNKS:
                yield done[home, chunks[n - CHUNKS][0]], i


class _Ahead:
    """What streams start before they need it, told from what keeps their devices busy.

    It is dispatched right before the job that follows it in its stream, and travels
    from the end of the job before it.
    """

    def __init__(
        self, streams: Sequence[Sequence[Instruction]], *, at_once: bool
    ) -> None:
        """``at_once``: what no job comes before starts the step."""
        self.streams: list[list[Instruction]] = []
        """Without it."""
        self.travel: list[Instruction] = []
        self.after: list[int | None] = []
        """Of each, the job before it; jobs are numbered through all streams."""
        self.before: list[int] = []
        """Of each, the job that follows it."""
        self.first: list[Instruction] = []
        """Those without: they start the step."""
        self.due: dict[int, list[Instruction]] = {}
        """By the job that follows it."""
        start = 0
        for stream in streams:
            jobs = [i for i in stream if not isinstance(i, Gather | Prefetch)]
            self.streams.append(jobs)
            at = start
            for instr in stream:
                if not isinstance(instr, Gather | Prefetch):
                    at += 1
                    continue
                self.travel.append(instr)
                self.after.append(at - 1 if at > start else None)
                self.before.append(at)
                if at > start or not at_once:
                    self.due.setdefault(at, []).append(instr)
                else:
                    self.first.append(instr)
            start += len(jobs)


class _Loader:
    """Puts each Load into the order one microbatch ahead of its first use."""

    def __init__(self, loads: Sequence[Load], writer: Mapping[Buffer, int]) -> None:
        self._loads = loads
        self._writer = writer
        self._done: set[int] = set()

    def due(self, i: int) -> Iterator[Load]:
        """Where what a Load writes is read: itself, and the microbatch after it."""
        yield from self._emit(i)
        ahead = self._loads[i + 1 : i + 2]
        if ahead and ahead[0].replica == self._loads[i].replica:
            yield from self._emit(i + 1)

    def _emit(self, i: int) -> Iterator[Load]:
        if i not in self._done:
            self._done.add(i)
            for buffer, _ in self._loads[i].reads:
                if buffer in self._writer:  # else it comes from the step before
                    yield from self._emit(self._writer[buffer])
            yield self._loads[i]
