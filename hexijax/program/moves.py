"""Pass 2: an Act or Cot that is read on another stage than it was written on travels.

    streams -> Sends and Recvs, one pair and one tag a message

Stages on the same devices send too: it costs no copy there, and mesh and dtype may
differ all the same.
"""

from collections.abc import Iterable

from hexijax.plan.plan import Place, Plan, stage_place
from hexijax.program import names
from hexijax.program.program import Buffer, Instruction, Kind, Read, Recv, Send


def moves(plan: Plan, streams: Iterable[Iterable[Instruction]]) -> list[Instruction]:
    """Each Send followed by its Recv, in the order in which the streams need them."""
    instructions = [instr for stream in streams for instr in stream]
    crossing = (Kind.ACT, Kind.COT)
    written = {
        buffer: buffer
        for instr in instructions
        for buffer in instr.writes
        if buffer.kind in crossing
    }
    needed = dict.fromkeys(
        buffer
        for instr in instructions
        for buffer, _ in instr.reads
        if buffer.kind in crossing and buffer not in written
    )
    pairs: list[Instruction] = []
    sources: dict[tuple[Place, Kind], Place] = {}
    for tag, here in enumerate(needed):
        kind, target, subject, microbatch, *_ = here
        source = sources.get((target, kind))
        if source is None:
            source = sources[target, kind] = _neighbour(here)
        there = written[Buffer(kind, source, subject, microbatch)]
        assert microbatch is not None
        wire = names.wire(target, tag, microbatch)
        pairs += (
            Send(
                reads=(Read(there),),
                writes=(wire,),
                tag=tag,
                source=source,
                target=target,
            ),
            Recv(
                reads=(Read(wire),),
                writes=(here,),
                tag=tag,
                source=source,
                target=target,
            ),
        )
    return pairs


def _neighbour(needed: Buffer) -> Place:
    """The stage before for an Act, the stage after for a Cot."""
    replica, stage = map(int, needed.place[1:].split(".s"))
    step = -1 if needed.kind is Kind.ACT else 1
    return stage_place(replica, stage + step)
