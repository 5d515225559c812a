"""Under ``layered``, what bounds how many gradients a place holds at once.

    streams, Reduces -> pairs of which the first comes before the second

A segment's accumulators are born in its backward pass and die when its sum has left.
Where links are slower than compute they would pile up: so the first backward of a
pass waits for the Reduces of all passes but the last one before it. What several
segments of a replica use is complete with the earliest of them, and nobody waits for
it.

It asks for no circle: a pass waits for sums of later layers only, and these for passes
over those layers.
"""

import itertools
from collections.abc import Iterator, Sequence

from hexijax.plan.plan import Plan, Schedule
from hexijax.program.passes import runs
from hexijax.program.program import (
    Backward,
    Buffer,
    Instruction,
    Kind,
    Reduce,
    Sum,
)

PASSES = 2
"""Whose gradients a place holds: one computes while the last one's leave."""

Pair = tuple[Instruction, Instruction]


def window(
    plan: Plan,
    streams: Sequence[Sequence[Instruction]],
    others: Sequence[Instruction],
) -> Iterator[Pair]:
    """Each Reduce with the backward that waits for it, stream by stream."""
    if plan.schedule is not Schedule.LAYERED:
        return
    passes = [_passes(stream) for stream in streams]
    made: dict[Buffer, set[tuple[int, int]]] = {}
    for number, found in enumerate(passes):
        for at, (_, grads) in enumerate(found):
            for grad in grads:
                made.setdefault(grad, set()).add((number, at))
    reduces = [instr for instr in others if isinstance(instr, Reduce)]
    sums: dict[str, list[Instruction]] = {}
    for instr in others:
        if isinstance(instr, Sum):
            sums.setdefault(instr.group, []).append(instr)
    for reduce in reduces:
        members = [read.buffer.place.split(".")[0] for read in reduce.reads]
        ends = [made[read.buffer._replace(microbatch=None)] for read in reduce.reads]
        if len(set(members)) < len(members) or any(len(end) > 1 for end in ends):
            continue  # several segments of a replica use it
        ready: list[Instruction] = [reduce]
        if reduce.homes == reduce.members:  # alone: it is the Sum that ends them
            ready += sums[reduce.group] if len(members) == 1 else []
        for number, at in itertools.chain(*ends):
            for first, _ in passes[number][at + PASSES : at + PASSES + 1]:
                yield from ((before, first) for before in ready)


def _passes(stream: Sequence[Instruction]) -> list[tuple[Backward, set[Buffer]]]:
    """The first backward of each pass that makes gradients, and whose they are."""
    found: list[tuple[Backward, set[Buffer]]] = []
    for run in runs(tuple(stream)):
        backwards = [instr for instr in run if isinstance(instr, Backward)]
        grads = {
            buffer._replace(microbatch=None)
            for instr in backwards
            for buffer in instr.writes
            if buffer.kind is Kind.GRAD
        }
        if grads:
            found.append((backwards[0], grads))
    return found
