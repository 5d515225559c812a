"""Pass 5: the last reader of every buffer is marked, and what nobody reads is freed.

    order of dispatch -> the same with `!` on last reads, and Frees

State and Param outlive a step unless it writes their next version: then the last reader
of the old one ends it. What reaches the host is a result of the step and stays.
"""

import dataclasses
from collections.abc import Sequence

from hexijax.program import names
from hexijax.program.program import HOST, Buffer, Free, Instruction, Kind, Read


def free(order: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Marks and frees for one body."""
    written = {buffer for instr in order for buffer in instr.writes}
    seen: set[Buffer] = set()
    backwards: list[Instruction] = []
    for instr in reversed(order):
        reads = []
        for read in instr.reads:
            dies = read.buffer not in seen and not _stays(read.buffer, written)
            reads.append(Read(read.buffer, dies))
        seen.update(read.buffer for read in instr.reads)
        unread = [
            Read(buffer, dies=True)
            for buffer in instr.writes
            if buffer not in seen and not _stays(buffer, written)
        ]
        if unread:
            backwards.append(Free(reads=tuple(unread)))
        backwards.append(dataclasses.replace(instr, reads=tuple(reads)))
    return tuple(reversed(backwards))


def _stays(buffer: Buffer, written: set[Buffer]) -> bool:
    """Whether the next step, or a person, reads the buffer."""
    if buffer.kind in (Kind.STATE, Kind.PARAM) and not names.is_slice(buffer):
        return dataclasses.replace(buffer, step=buffer.step + 1) not in written
    return buffer.place == HOST and buffer in written and buffer != names.WEIGHT
