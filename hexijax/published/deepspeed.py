"""Puts a Program into the order in which DeepSpeed's pipeline engine runs a step.

    Program of a 1f1b plan -> pipeline_order -> Program

The engine's schedule goes in pairs of turns. Before a forward a stage sends the last
backward's gradient, then receives; before a backward it receives the gradient, then
sends the last forward's activations, which therefore leave late: in the steady state
not before the gradient has come. Receives stand right before what reads them. Sums and
updates come when a stage has run all its microbatches, and hide behind nothing of it.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from hexijax.plan.plan import Place
from hexijax.program.clock import by_start
from hexijax.program.linearise import Costs
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Instruction,
    Load,
    Program,
    Recv,
    Reduce,
    Send,
    Sum,
)

Moves = dict[Buffer, Instruction]


def pipeline_order(program: Program, costs: Costs) -> Program:
    """The same instructions, in the order of their starts by ``costs``.

    ``Load`` comes first, what is neither compute nor move last.
    """
    loads = [i for i in program.body if isinstance(i, Load)]
    sends: Moves = {i.reads[0].buffer: i for i in program.body if isinstance(i, Send)}
    recvs: Moves = {i.writes[0]: i for i in program.body if isinstance(i, Recv)}
    turns: dict[Place, list[Forward | Backward]] = collections.defaultdict(list)
    for instruction in program.body:
        if isinstance(instruction, Forward | Backward):
            turns[instruction.place].append(instruction)
    streams = [list(_exchanges(stage, sends, recvs)) for stage in turns.values()]
    ordered = [*loads, *_by_start(streams, costs)]
    placed = {id(instruction) for instruction in ordered}
    ordered += _ended([i for i in program.body if id(i) not in placed])
    assert len(ordered) == len(program.body), "an instruction was lost or doubled"
    return dataclasses.replace(program, body=tuple(ordered))


def _ended(left: Sequence[Instruction]) -> Iterator[Instruction]:
    """A sum ends before the next begins: its Sums stand right behind the Reduce."""
    sums: dict[str, list[Sum]] = collections.defaultdict(list)
    for i in left:
        if isinstance(i, Sum):
            sums[i.group].append(i)
    for i in left:
        if not isinstance(i, Sum):
            yield i
        if isinstance(i, Reduce):
            yield from sums[i.group]


def _exchanges(
    turns: Sequence[Forward | Backward], sends: Moves, recvs: Moves
) -> Iterator[Instruction]:
    """A stage's turns with its moves between them.

    What a turn makes leaves at once where the next turn goes the same way (the fill and
    the drain of the pipeline have empty turns between), else after the next turn's own
    receive if that is a gradient, or before it.
    """
    leaving: list[Instruction] = []
    last: Forward | Backward | None = None
    for turn in turns:
        coming = [recvs.pop(r.buffer) for r in turn.reads if r.buffer in recvs]
        late = isinstance(turn, Backward) and isinstance(last, Forward)
        yield from (*coming, *leaving) if late else (*leaving, *coming)
        yield turn
        leaving, last = [sends[b] for b in turn.writes if b in sends], turn
    yield from leaving


def _by_start(
    streams: Sequence[Sequence[Instruction]], costs: Costs
) -> Iterator[Instruction]:
    """One order of all streams; a stage goes on while what it sent is on its way."""
    jobs = [instruction for stream in streams for instruction in stream]
    maker = {buffer: i for i, job in enumerate(jobs) for buffer in job.writes}
    followers: list[list[int]] = [[] for _ in jobs]
    for i, job in enumerate(jobs):
        for buffer, _ in job.reads:
            if buffer in maker:
                followers[maker[buffer]].append(i)
    at = 0
    for stream in streams:
        last: int | None = None
        for i in range(at, at + len(stream)):
            if last is not None:
                followers[last].append(i)
            if not isinstance(jobs[i], Send):
                last = i
        at += len(stream)
    order = by_start(
        followers=followers,
        ranks=[0] * len(jobs),
        devices=[()] * len(jobs),
        seconds=[costs.duration_s(job) for job in jobs],
    )
    return (jobs[i] for i in order)
