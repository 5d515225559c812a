"""Pass 5: the last reader of every buffer is marked, and what nobody reads is freed.

    order of dispatch -> the same with `!` on last reads, and Frees

State and Param outlive a step unless it writes their next version: then the last reader
of the old one ends it. What reaches the host is a result of the step and stays.
"""

import dataclasses
import functools
from collections.abc import Sequence

from hexijax.program import names
from hexijax.program.program import HOST, Buffer, Free, Instruction, Kind, Read


def free(order: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Marks and frees for one body."""
    written = {buffer for instr in order for buffer in instr.writes}
    seen: set[Buffer] = set()
    backwards: list[Instruction] = []
    for instr in reversed(order):
        last = {
            read.buffer
            for read in instr.reads
            if read.buffer not in seen and not _stays(read.buffer, written)
        }
        unread = [
            Read(buffer, dies=True)
            for buffer in instr.writes
            if buffer not in seen and not _stays(buffer, written)
        ]
        seen.update([read.buffer for read in instr.reads])
        if unread:
            backwards.append(Free(reads=tuple(unread)))
        backwards.append(_marked(instr, last) if last else instr)
    backwards.reverse()
    return tuple(backwards)


def _marked(instr: Instruction, last: set[Buffer]) -> Instruction:
    """The instruction with its last reads marked.

    As ``dataclasses.replace``, which takes five times as long.
    """
    reads = tuple(
        [Read(r.buffer, True) if r.buffer in last else r for r in instr.reads]
    )
    marked = object.__new__(type(instr))
    for name in _names(type(instr)):
        object.__setattr__(marked, name, getattr(instr, name))
    object.__setattr__(marked, "reads", reads)
    return marked


@functools.cache
def _names(kind: type[Instruction]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _stays(buffer: Buffer, written: set[Buffer]) -> bool:
    """Whether the next step, or a person, reads the buffer."""
    kind = buffer.kind
    if kind is Kind.STATE or (kind is Kind.PARAM and not names.is_slice(buffer)):
        return dataclasses.replace(buffer, step=buffer.step + 1) not in written
    return buffer.place == HOST and buffer in written and buffer != names.WEIGHT
