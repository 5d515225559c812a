"""No place waits for another that waits for it.

The Program is one order, but each island follows its own part of it. Here every place
follows its own: a Recv waits for its Send, and all members of a Gather, Reduce or Agree
wait for each other.
"""

from collections.abc import Mapping, Sequence

from hexijax.plan.plan import Place
from hexijax.program.program import (
    HOST,
    Agree,
    Gather,
    Instruction,
    Program,
    Recv,
    Reduce,
    Send,
)
from hexijax.program.rules.facts import numbered
from hexijax.program.rules.fault import Faults
from hexijax.program.text import line

Streams = Mapping[Place, Sequence[tuple[int, Instruction]]]


def place_streams(program: Program) -> Streams:
    """What each place does in a body, with positions in the whole Program."""
    streams: dict[Place, list[tuple[int, Instruction]]] = {}
    for position, instr in numbered(program):
        for place in members(instr):
            streams.setdefault(place, []).append((position, instr))
    return streams


def members(instr: Instruction) -> tuple[Place, ...]:
    """Places that take part in an instruction."""
    match instr:
        case Send(source=place) | Recv(target=place):
            places = [place]
        case Reduce():
            places = [*instr.members, *instr.homes]
        case Gather():
            places = [*instr.homes, *instr.places]
        case Agree():
            places = [*(read.buffer.place for read in instr.reads), *instr.members]
        case _:
            places = [read.buffer.place for read in instr.reads]
            places += [buffer.place for buffer in instr.writes]
    return tuple(dict.fromkeys(place for place in places if place != HOST))


def check_streams(streams: Streams, faults: Faults) -> None:
    """Plays all streams until each has ended or all wait."""
    at = dict.fromkeys(streams, 0)
    sent: set[int] = set()
    arrived: dict[int, int] = {}
    waiters: dict[int, list[Place]] = {}
    runnable = list(streams)
    while runnable:
        place = runnable.pop()
        while at[place] < len(streams[place]):
            position, instr = streams[place][at[place]]
            if isinstance(instr, Send):
                sent.add(instr.tag)
                runnable += waiters.pop(instr.tag, ())
            elif isinstance(instr, Recv) and instr.tag not in sent:
                waiters.setdefault(instr.tag, []).append(place)
                break
            elif isinstance(instr, Reduce | Gather | Agree):
                arrived[position] = arrived.get(position, 0) + 1
                others = [p for p in members(instr) if p != place]
                if arrived[position] <= len(others):
                    break
                for other in others:  # the last to come lets all go on
                    at[other] += 1
                runnable += others
            at[place] += 1
    stuck = [place for place in streams if at[place] < len(streams[place])]
    if stuck:
        heads = {place: streams[place][at[place]] for place in stuck}
        position, _ = heads[stuck[0]]
        waits = "; ".join(
            f"{place} waits at line {where}, {line(instr).split(' : ')[0]}"
            for place, (where, instr) in heads.items()
        )
        faults.at(position, f"Places wait for each other forever: {waits}.")
