"""Pass 4: freed parameters come before each pass over their segment and go after it.

    streams, buckets -> streams with Gathers and Joins of what their stage frees, and
    Prefetches of what it streams

A pass is a run of a stream's instructions of one segment with nothing between: the
forwards of all microbatches under ``layered``, one microbatch's under the others. Its
parameters are a value of their own, counted by the place's passes.

Freed ones are read where their state lives, streamed ones where they rest in the host's
memory. A Gather or Prefetch stands before the first computation of the run before, a
Join right before its own: while one pass computes the next one's parameters travel, and
no third one's are there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hexijax.plan.plan import Place
from hexijax.program import names
from hexijax.program.placement import GroupPlaces
from hexijax.program.program import (
    Backward,
    Forward,
    Gather,
    Instruction,
    Join,
    Kind,
    Read,
)
from hexijax.program.waiting import prefetch

Stream = tuple[Instruction, ...]


def passes(
    groups: Iterable[GroupPlaces], streams: Sequence[Stream]
) -> tuple[Stream, ...]:
    """The streams, with what their freed segments need."""
    freed = {
        (user, g.group): g for g in groups for user in g.users if user not in g.keepers
    }
    if not freed:
        return tuple(streams)
    counts: dict[Place, int] = {}
    return tuple(tuple(_stream(stream, freed, counts)) for stream in streams)


def _stream(
    stream: Stream,
    freed: Mapping[tuple[Place, str], GroupPlaces],
    counts: dict[Place, int],
) -> Iterator[Instruction]:
    made = [_made(run, freed, counts) for run in runs(stream)]
    if made:
        yield from made[0][0]
    for at, (_, joins, work) in enumerate(made):
        yield from joins
        for gathers, _, _ in made[at + 1 : at + 2]:
            yield from gathers
        yield from work


def runs(stream: Stream) -> Iterator[list[Forward | Backward]]:
    """Instructions of one segment with nothing between."""
    run: list[Forward | Backward] = []
    for instr in stream:
        assert isinstance(instr, Forward | Backward)
        if run and (run[0].place, run[0].segment) != (instr.place, instr.segment):
            yield run
            run = []
        run.append(instr)
    if run:
        yield run


def _made(
    run: list[Forward | Backward],
    freed: Mapping[tuple[Place, str], GroupPlaces],
    counts: dict[Place, int],
) -> tuple[list[Instruction], list[Instruction], list[Instruction]]:
    """Gathers, Joins, and the run reading what they make."""
    place = run[0].place
    params = [r.buffer for r in run[0].reads if r.buffer.kind is Kind.PARAM]
    needed = [freed[place, b.subject] for b in params if (place, b.subject) in freed]
    if not needed:
        return [], [], [*run]
    number = counts[place] = counts.get(place, -1) + 1
    mine = {names.param(place, g.group): param(place, g, number) for g in needed}
    for instr in run:
        reads = [Read(mine.get(r.buffer, r.buffer), r.dies) for r in instr.reads]
        object.__setattr__(instr, "reads", tuple(reads))  # nobody else holds it yet
    streamed = [g for g in needed if place in g.streamers]
    freed_ones = [g for g in needed if place not in g.streamers]
    return (
        [
            *(prefetch(param(place, g, number)) for g in streamed),
            *(_gather(place, g, number) for g in freed_ones),
        ],
        [_join(place, g, number) for g in freed_ones],
        [*run],
    )


def param(place: Place, g: GroupPlaces, number: int) -> names.Buffer:
    """A bucket's parameters for one of a place's passes."""
    return names.param(place, g.group, count=number)


def _gather(place: Place, g: GroupPlaces, number: int) -> Gather:
    return Gather(
        reads=tuple(
            Read(names.state(home, g.group, memory=g.memory)) for home in g.homes
        ),
        writes=(names.param_pieces(place, g.group, number),),
        group=g.group,
        homes=g.homes,
        places=(place,),
    )


def _join(place: Place, g: GroupPlaces, number: int) -> Join:
    return Join(
        reads=(Read(names.param_pieces(place, g.group, number), True),),
        writes=(param(place, g, number),),
        group=g.group,
        place=place,
    )
