"""Pass 4: one total order, the order of dispatch, from what must come before what.

    streams, other instructions, costs -> order of their starts on a clock

Order decides overlap, since a copy waits for all compute dispatched before it on its
card. So a Send stands right after its producer. A Recv, and the sums of a Reduce, stand
where the clock says that their inputs have arrived: earlier, they would hold up compute
of the target that could run meanwhile. A Load stands one microbatch ahead of its use,
so that its copy runs beside the compute of the microbatch before. Where times tie,
moves go before compute, backwards before forwards, updates last, and early layers
first.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from hexijax.plan.plan import Place, Plan
from hexijax.program.clock import Clock
from hexijax.program.program import (
    Agree,
    Backward,
    Buffer,
    Forward,
    Gather,
    Instruction,
    Load,
    Part,
    Recv,
    Reduce,
    Send,
    Update,
)

RANKS: dict[type[Instruction], int] = {
    kind: rank
    for rank, kind in enumerate(
        (Send, Recv, Reduce, Agree, Gather, Backward, Forward, Update)
    )
}


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
) -> tuple[Instruction, ...]:
    """All instructions, each once, by start; equal input gives equal order."""
    jobs = [*(instr for stream in streams for instr in stream), *others]
    writer = {buffer: i for i, instr in enumerate(jobs) for buffer in instr.writes}
    waits = [
        [writer[read.buffer] for read in instr.reads if read.buffer in writer]
        for instr in jobs
    ]
    start = 0
    for stream in streams:
        for i in range(start + 1, start + len(stream)):
            waits[i].append(i - 1)
        start += len(stream)

    sends: dict[int, list[int]] = {}
    for i, instr in enumerate(jobs):
        if isinstance(instr, Send):
            sends.setdefault(waits[i][0], []).append(i)
    devices = {place: stage.devices for place, stage in plan.stages()}
    order: list[Instruction] = []
    loader = _Loader(loads, order)
    clock = Clock(
        waits=waits,
        ranks=[RANKS[type(instr)] for instr in jobs],
        devices=[_devices(instr, devices) for instr in jobs],
        duration_s=lambda i: costs.duration_s(jobs[i]),
    )
    for i in clock:
        if not isinstance(jobs[i], Send):
            loader.before(jobs[i])
            order.append(jobs[i])
            order += [jobs[send] for send in sends.get(i, ())]
    assert len(order) == len(jobs) + len(loads), "some instructions wait for each other"
    return tuple(order)


def _devices(
    instr: Instruction, devices: Mapping[Place, tuple[str, ...]]
) -> tuple[str, ...]:
    """Devices that an instruction keeps busy; moves run beside compute."""
    match instr:
        case Forward(place=place) | Backward(place=place):
            return devices[place]
        case Update(home=home):
            return devices.get(home, (home,))
        case _:
            return ()


class _Loader:
    """Puts each Load into the order one microbatch ahead of its first use."""

    def __init__(self, loads: Sequence[Load], order: list[Instruction]) -> None:
        self._loads = loads
        self._order = order
        self._done: set[int] = set()
        self._writer: dict[Buffer, int] = {
            buffer: i for i, load in enumerate(loads) for buffer in load.writes
        }

    def before(self, instr: Instruction) -> None:
        """Emits what the instruction reads, and the microbatch after it."""
        for read in instr.reads:
            if read.buffer in self._writer:
                i = self._writer[read.buffer]
                self._emit(i)
                ahead = self._loads[i + 1 : i + 2]
                if ahead and ahead[0].replica == self._loads[i].replica:
                    self._emit(i + 1)

    def _emit(self, i: int) -> None:
        if i not in self._done:
            self._done.add(i)
            for read in self._loads[i].reads:
                self._emit(self._writer[read.buffer])
            self._order.append(self._loads[i])
