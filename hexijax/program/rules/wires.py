"""Sends and receives match one to one, and carry a value unchanged."""

from typing import TypeVar

from hexijax.program.program import SECTIONS, Buffer, Kind, Program, Recv, Send
from hexijax.program.rules.facts import numbered
from hexijax.program.rules.fault import Faults

End = TypeVar("End", Send, Recv)


def check_wires(program: Program, faults: Faults) -> None:
    """Pairs by tag, within each section."""
    for section in SECTIONS:
        sends: dict[int, tuple[int, Send]] = {}
        recvs: dict[int, tuple[int, Recv]] = {}
        for position, instr in numbered(program, section):
            if isinstance(instr, Send):
                _end(position, instr, sends, faults)
            elif isinstance(instr, Recv):
                _end(position, instr, recvs, faults)
        for tag, (position, _) in (sends | recvs).items():
            if tag not in sends or tag not in recvs:
                missing = "Send" if tag not in sends else "Recv"
                faults.at(
                    position,
                    f"No {missing} has tag t{tag}. Every message has one Send and one "
                    "Recv in its section; without the other end it is waited for "
                    "forever.",
                )
        for tag, (_, send) in sends.items():
            _match(send, *recvs[tag], faults)


def _end(
    position: int, instr: End, ends: dict[int, tuple[int, End]], faults: Faults
) -> None:
    """Files one end under its tag."""
    if len(instr.reads) != 1 or len(instr.writes) != 1:
        faults.at(position, "One end of a message reads one buffer and writes one.")
    if instr.tag in ends:
        faults.at(
            position, f"Tag t{instr.tag} is used twice; a message has its own tag."
        )
    wire = instr.writes[0] if isinstance(instr, Send) else instr.reads[0].buffer
    if wire.kind is not Kind.WIRE:
        faults.at(position, "A Send writes a Wire and a Recv reads it.", wire)
    ends[instr.tag] = (position, instr)


def _match(send: Send, position: int, recv: Recv, faults: Faults) -> None:
    value, landed = send.reads[0].buffer, recv.writes[0]
    if send.writes[0] != recv.reads[0].buffer:
        faults.at(
            position,
            f"It reads another wire than the Send of t{send.tag} writes, "
            f"{send.writes[0]}.",
            recv.reads[0].buffer,
        )
    if (send.source, send.target) != (recv.source, recv.target):
        faults.at(
            position,
            f"The Send of t{send.tag} goes from {send.source} to {send.target}, its "
            f"Recv from {recv.source} to {recv.target}.",
        )
    if value.place != send.source or landed.place != recv.target:
        faults.at(
            position,
            f"Message t{send.tag} takes {value} to {landed}, but its ends are "
            f"{send.source} and {send.target}.",
            landed,
        )
    if _content(value) != _content(landed):
        faults.at(
            position,
            f"Message t{send.tag} carries {value}, so it cannot arrive as {landed}.",
            landed,
        )


def _content(buffer: Buffer) -> tuple[Kind, str, int | None, int]:
    return buffer.kind, buffer.subject, buffer.microbatch, buffer.step
