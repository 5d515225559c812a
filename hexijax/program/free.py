"""Pass 7: the last reader of every buffer is marked, and what nobody reads is freed.

    order of dispatch -> the same with `!` on last reads, and Frees

State, Param and a loss scale outlive a step unless it writes their next version: then
the last reader of the old one ends it. Parameters of a pass end with it. What reaches
the host is a result of the step and stays; so does what the next step reads as the one
before's.
"""

from collections.abc import Sequence

from hexijax.program import names
from hexijax.program.program import HOST, Buffer, Free, Instruction, Kind, Read


def free(
    order: Sequence[Instruction], *, repeats: bool = True
) -> tuple[Instruction, ...]:
    """Marks and frees for one section, whose instructions nobody else holds yet.

    Where it ``repeats``, parameters that it writes for its own step are written anew
    before anyone reads them.
    """
    written = {buffer for instr in order for buffer in instr.writes}
    anew = {b for b in written if repeats and b.kind is Kind.PARAM and b.step == 0}
    late = {b for instr in order for b, _ in instr.reads if b.step < 0}
    seen: set[Buffer] = set()
    backwards: list[Instruction] = []
    for instr in reversed(order):
        unread = [
            Read(buffer, True)
            for buffer in instr.writes
            if buffer not in seen and not _stays(buffer, written, late, anew)
        ]
        if unread:
            backwards.append(Free(reads=tuple(unread)))
        # What a copy brings back was another value before it.
        seen.difference_update(instr.writes)
        buffers = [buffer for buffer, _ in instr.reads]
        last = [
            b for b in buffers if b not in seen and not _stays(b, written, late, anew)
        ]
        seen.update(buffers)
        if last:
            reads = tuple([Read(b, True) if b in last else Read(b) for b in buffers])
            object.__setattr__(instr, "reads", reads)
        backwards.append(instr)
    backwards.reverse()
    return tuple(backwards)


def _stays(
    buffer: Buffer, written: set[Buffer], late: set[Buffer], anew: set[Buffer]
) -> bool:
    """Whether the next step, or a person, reads the buffer."""
    kind = buffer.kind
    if late and buffer._replace(step=buffer.step - 1) in late:
        return True
    if names.is_freed(buffer) or buffer in anew:
        return False
    if (
        kind is Kind.STATE
        or (kind is Kind.PARAM and not names.is_slice(buffer))
        or names.is_scale(buffer)
    ):
        return buffer._replace(step=buffer.step + 1) not in written
    return buffer.place == HOST and buffer in written and buffer != names.WEIGHT
