"""Pass 6: activations, cotangents and residuals wait in host memory for their turn.

    order of dispatch -> the same with WriteBacks and Prefetches, and their pools

Between a segment and the next one of its stage lie, under ``layered``, those of all
microbatches; so do those that a stage gets from one that is faster or runs before it.
Where the stage says that they wait on the host, each leaves the device behind the
instruction that brought or used it, and comes back one turn of its devices before the
next one, so that it travels while that one computes. What is used soon stays. What a
forward keeps for its backward goes the same way.

What does not change is written once: an activation's copy serves its forward and its
backward.

Where the host's link is slower than compute, what leaves would pile up: so a forward
whose residuals travel waits until those of all but the last one before it have left.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hexijax.plan.plan import Place, Plan, Stage
from hexijax.program import names
from hexijax.program.fuse import fused_pairs
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Instruction,
    Kind,
    Prefetch,
    Program,
    Read,
    Recv,
    WriteBack,
)

Order = tuple[Instruction, ...]
Pools = tuple[tuple[str, int], ...]

NEAR = 2
"""Turns to a next use that is too near to travel there and back."""

LEAVING = {Kind.RES: 1, Kind.STATE: 2, Kind.PARAM: 4, Kind.GRAD: 4}
"""Copies of one kind under way to the host, of one place, when more are made. Few of
what is large; each one less makes dispatch wait more often (one chunk of state and of
parameters: 5 to 10% of a step that the link fills, H200)."""


def most_leaving(kind: Kind, chunks: int) -> int:
    """The same of a place that has room for so many chunks of state."""
    fewest = LEAVING[kind]
    each = 0 if kind is Kind.RES else fewest // LEAVING[Kind.STATE]
    return max(fewest, each * chunks)


def waiting(plan: Plan, order: Order) -> tuple[Order, Pools]:
    """The order with its copies, and of each pool its name and slots."""
    stages = {
        place: stage for place, stage in plan.stages() if stage.waits or stage.residuals
    }
    if not stages:
        return order, pools(order)
    turns, uses = _uses(plan, order, stages)
    away: dict[int, list[Instruction]] = {}
    back: dict[int, list[Instruction]] = {}
    for buffer, used in uses.items():
        is_away = False
        at = turns[plan.stage(buffer.place).devices]
        for last, following in pairwise(used):
            if following.turn - last.turn <= NEAR:
                continue
            start = at[following.turn - 1]
            if start <= last.position:
                continue
            if not is_away:
                away.setdefault(last.position, []).append(rest(buffer, dies=False))
                is_away = True
            back.setdefault(start, []).append(prefetch(buffer))
    made: list[Instruction] = []
    for position, instr in enumerate(order):
        made += (*back.get(position, ()), instr, *away.get(position, ()))
    return tuple(made), pools(made)


class _Use(NamedTuple):
    """Of a buffer: it is brought, written or read."""

    turn: int
    """Of its devices, counted from 0; of what is brought, the one before."""

    position: int
    """In the order."""


Turns = Mapping[tuple[str, ...], Sequence[int]]
"""Of each set of devices, the positions at which it computes."""


def _uses(
    plan: Plan, order: Order, stages: Mapping[Place, Stage]
) -> tuple[Turns, Mapping[Buffer, Sequence[_Use]]]:
    """Of what may wait, and the turns they are counted in.

    A backward that runs as one with its forward is no turn of its own.
    """
    pairs = fused_pairs(Program(body=order))
    turns: dict[tuple[str, ...], list[int]] = {}
    pair_turns: dict[int, int] = {}
    found: dict[Buffer, list[_Use]] = {}
    for position, instr in enumerate(order):
        if isinstance(instr, Recv):
            stage = stages.get(instr.target)
            if stage is not None and stage.waits_on_host(0):
                before = len(turns.get(stage.devices, ())) - 1
                found[instr.writes[0]] = [_Use(before, position)]
        elif isinstance(instr, Forward | Backward):
            at = turns.setdefault(plan.stage(instr.place).devices, [])
            turn = pair_turns.get(id(instr))
            if turn is None:
                turn = len(at)
                at.append(position)
            pair = pairs.get((instr.place, instr.segment, instr.microbatches))
            if pair is not None:
                pair_turns[id(pair)] = turn
            if instr.place not in stages:
                continue
            for buffer in (*(r.buffer for r in instr.reads), *instr.writes):
                if buffer in found or _waits(buffer, stages[instr.place]):
                    found.setdefault(buffer, []).append(_Use(turn, position))
    return turns, found


def _waits(buffer: Buffer, stage: Stage) -> bool:
    """Whether a stage lets a border's activations, or a segment's residuals, wait."""
    if buffer.kind is Kind.RES and not names.is_handed(buffer):
        return stage.keeps_on_host(int(buffer.subject.removeprefix("g")))
    if buffer.kind is not Kind.ACT and buffer.kind is not Kind.COT:
        return False
    layer = int(buffer.subject.removeprefix("L"))
    return any(
        stage.waits_on_host(g) and stage.segment_layers(g)[0] == layer
        for g in range(len(stage.segments))
    )


def held_back(
    order: Sequence[Instruction], leaving: Mapping[Place, int]
) -> Mapping[int, Buffer]:
    """By the position of an instruction, the copy in host memory that is to be whole
    before it is dispatched: until then what was copied takes its room.

    Dispatch runs ahead of the device. So a forward whose residuals leave, a chunk of
    state that comes, and parameters and gradients that leave wait for all copies of
    their kind but the last ones; ``leaving`` says where more may be under way.
    """
    leave = [i for i in order if isinstance(i, WriteBack)]
    travels = {
        (i.buffer.place, i.buffer.subject) for i in leave if i.buffer.kind is Kind.RES
    }
    left: dict[tuple[Place, Kind], list[Buffer]] = {}
    found: dict[int, Buffer] = {}

    def hold(position: int, place: Place, kind: Kind) -> None:
        before = left.get((place, kind), ())
        most = most_leaving(kind, leaving.get(place, 0))
        if len(before) > most:
            found[position] = before[-1 - most]

    for position, instr in enumerate(order if leave else ()):
        match instr:
            case Forward(place=place):
                if any((b.place, b.subject) in travels for b in instr.writes):
                    hold(position, place, Kind.RES)
            case Prefetch(buffer=buffer) if buffer.kind is Kind.STATE:
                hold(position, buffer.place, Kind.STATE)
            case WriteBack(buffer=buffer):
                if buffer.kind in (Kind.PARAM, Kind.GRAD):
                    hold(position, buffer.place, buffer.kind)
                key = (buffer.place, buffer.kind)
                left.setdefault(key, []).append(instr.writes[0])
            case _:
                pass
    return found


def pools(order: Sequence[Instruction]) -> Pools:
    """Of what a Prefetch brings until its last reader, the most at once, by pool."""
    if not any(isinstance(instr, Prefetch | WriteBack) for instr in order):
        return ()
    spans: dict[str, list[tuple[int, int]]] = {}
    last: dict[Buffer, int] = {}
    for position in reversed(range(len(order))):
        instr = order[position]
        if isinstance(instr, WriteBack):
            spans.setdefault(instr.pool, [])  # of what does not come back
        elif isinstance(instr, Prefetch):
            held = instr.buffer
            if held.kind is Kind.STATE:  # the updated one has taken its slot
                held = held._replace(step=held.step + 1)
            spans.setdefault(instr.pool, []).append((position, last.pop(held)))
        for buffer, _ in instr.reads:
            last.setdefault(buffer, position)
    return tuple((pool, _most(held)) for pool, held in sorted(spans.items()))


def _most(spans: Iterable[tuple[int, int]]) -> int:
    """Of spans from first to last, the most at once."""
    ends = [(first, 1) for first, _ in spans] + [(last, -1) for _, last in spans]
    now = most = 0
    for _, change in sorted(ends):
        now += change
        most = max(most, now)
    return most


def rest(buffer: Buffer, dies: bool = True) -> WriteBack:
    """A buffer to its copy on the host."""
    return WriteBack(
        reads=(Read(buffer, dies),),
        writes=(names.on_host(buffer),),
        buffer=buffer,
        pool=names.pool(buffer),
    )


def prefetch(buffer: Buffer) -> Prefetch:
    """A buffer from its copy on the host."""
    return Prefetch(
        reads=(Read(names.on_host(buffer)),),
        writes=(buffer,),
        buffer=buffer,
        pool=names.pool(buffer),
    )
