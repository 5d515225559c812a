"""Pass 5: border activations and cotangents wait in host memory for their next turn.

    streams -> streams with WriteBacks and Prefetches, and the pools they need

Between a segment and the next one of its stage lie, under ``layered``, those of all
microbatches. Where the stage says that a border waits on the host, each leaves the
device behind the instruction that used it last, and comes back one turn before the
next one, so that it travels while that one computes. What is used again soon stays.

What does not change is written once: an activation's copy serves its forward and its
backward.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from hexijax.plan.plan import Memory, Place, Plan
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Instruction,
    Kind,
    Prefetch,
    Read,
    WriteBack,
)

Stream = tuple[Instruction, ...]
Borders = Mapping[Place, frozenset[str]]
Pools = tuple[tuple[str, int], ...]

NEAR = 2
"""Instructions to a next use that is too near to travel there and back."""


def waiting(plan: Plan, streams: Sequence[Stream]) -> tuple[tuple[Stream, ...], Pools]:
    """The streams, and of each pool its name and slots."""
    borders = {
        place: frozenset(
            f"L{stage.segment_layers(g)[0]}"
            for g in range(len(stage.segments))
            if stage.waits_on_host(g)
        )
        for place, stage in plan.stages()
        if stage.waits
    }
    pools: dict[str, int] = {}
    if borders:
        streams = [_with_copies(stream, borders, pools) for stream in streams]
    return tuple(streams), tuple(pools.items())


def _with_copies(stream: Stream, borders: Borders, pools: dict[str, int]) -> Stream:
    work = [at for at, i in enumerate(stream) if isinstance(i, Forward | Backward)]
    away: dict[int, list[Instruction]] = {}
    back: dict[int, list[Instruction]] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for buffer, uses in _uses([stream[at] for at in work], borders).items():
        pool = f"{buffer.place} {buffer.kind}"
        came: int | None = None
        for last, following in pairwise(uses):
            if following - last <= NEAR:
                continue
            if came is None:
                away.setdefault(work[last], []).append(_write_back(buffer, pool))
            else:
                spans[pool].append((came, last))
            came = following - 1
            if _is_pair(stream[work[came - 1]], stream[work[came]]):
                came -= 1  # both run where the first stands
            back.setdefault(work[came], []).append(_prefetch(buffer, pool))
            spans.setdefault(pool, [])
        if came is not None:
            spans[pool].append((came, uses[-1]))
    pools.update({name: _most(held) for name, held in spans.items()})
    made: list[Instruction] = []
    for at, instr in enumerate(stream):
        made += (*back.get(at, ()), instr, *away.get(at, ()))
    return tuple(made)


def _uses(work: Sequence[Instruction], borders: Borders) -> dict[Buffer, list[int]]:
    """Of what may wait, the instructions that write or read it, by number."""
    found: dict[Buffer, list[int]] = {}
    for number, instr in enumerate(work):
        for buffer in (*(r.buffer for r in instr.reads), *instr.writes):
            crossing = buffer.kind is Kind.ACT or buffer.kind is Kind.COT
            if crossing and buffer.subject in borders.get(buffer.place, ()):
                found.setdefault(buffer, []).append(number)
    return found


def _is_pair(first: Instruction, second: Instruction) -> bool:
    """Whether a backward follows its own forward: they may run as one."""
    return (
        isinstance(first, Forward)
        and isinstance(second, Backward)
        and (first.place, first.segment) == (second.place, second.segment)
        and first.microbatches == second.microbatches
    )


def _most(spans: Iterable[tuple[int, int]]) -> int:
    """Of spans from first to last, ends included, the most at once."""
    ends = [(first, 1) for first, _ in spans] + [(last + 1, -1) for _, last in spans]
    now = most = 0
    for _, change in sorted(ends):
        now += change
        most = max(most, now)
    return most


def _write_back(buffer: Buffer, pool: str) -> WriteBack:
    return WriteBack(
        reads=(Read(buffer),), writes=(_on_host(buffer),), buffer=buffer, pool=pool
    )


def _prefetch(buffer: Buffer, pool: str) -> Prefetch:
    return Prefetch(
        reads=(Read(_on_host(buffer)),), writes=(buffer,), buffer=buffer, pool=pool
    )


def _on_host(buffer: Buffer) -> Buffer:
    return buffer._replace(memory=Memory.HOST)
