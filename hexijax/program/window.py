"""Under ``layered``, what bounds how many gradients a place holds at once.

    streams, Reduces -> pairs of which the first comes before the second

A segment's accumulators are born in its backward pass and die when its sum has left.
Where links are slower than compute they would pile up: so the first backward of a
pass waits for the Reduces of all passes but the last one before it. What several
segments of a replica use is complete with the earliest of them, and nobody waits for
it. A sum stays until its update, so where a stage has room for the gradients of
``grads`` passes only, the pass after them waits for the updates as well, or for the
sum's copy to the host that updates it.

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
    Site,
    Sum,
    Update,
    WriteBack,
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
    gone = _gone(others)
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
            most = plan.stage(passes[number][at][0].place).grads
            for first, _ in passes[number][at + most : at + most + 1] if most else ():
                yield from ((before, first) for before in gone.get(reduce.group, ()))


def _gone(others: Sequence[Instruction]) -> dict[str, list[Instruction]]:
    """What ends the sums of each bucket; those of late ones end with the next step's
    forward, before any of its gradients is born."""
    found: dict[str, list[Instruction]] = {}
    for instr in others:
        if isinstance(instr, Update) and instr.site is not Site.HOST:
            found.setdefault(instr.group, []).append(instr)
        elif isinstance(instr, WriteBack) and instr.buffer.kind is Kind.GRAD:
            found.setdefault(instr.buffer.subject, []).append(instr)
    return found


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
