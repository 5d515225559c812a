"""Pass 1: streams of turns become Forwards and Backwards with their buffers.

    Plan, Chain, schedules -> streams of instructions

A stage's segments go forward in order and backward in reverse, whole or in parts.
Before the first layer whose parameters train nothing goes backward: such a segment
keeps nothing, and its stage's turns to go backward only hold its forwards back. A
segment goes backward in parts where each has work: weights that train, and a border to
hand cotangents to. An Act or Cot is read where it is needed, whoever wrote it: the next
pass adds the moves.
"""

from collections.abc import Sequence

from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan, stage_place
from hexijax.program import names
from hexijax.program.buckets import buckets, segment_buckets
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Instruction,
    Kind,
    Part,
    Read,
)
from hexijax.program.schedules import Turn, Way, schedule_replica

Streams = tuple[tuple[Instruction, ...], ...]

Waits = tuple[tuple[Instruction, Instruction], ...]
"""Pairs of which the first comes before the second, though that reads nothing of it."""

PARTS = {Way.BACKWARD: Part.BOTH, Way.INPUT: Part.INPUT, Way.WEIGHT: Part.WEIGHT}


def compute(
    plan: Plan,
    chain: Chain,
    groups: Sequence[Group] | None = None,
    *,
    evaluation: bool = False,
) -> tuple[Streams, Waits]:
    """One stream for each stage, or for each set of devices that stages share.

    With them what a forward waits for that has no backward of its stage before it: the
    backward of that turn on the first stage that has one. Without it the stage would
    run ahead, and what it sends would fill the next one's memory.
    """
    groups = buckets(plan, chain) if groups is None else tuple(groups)
    streams: list[tuple[Instruction, ...]] = []
    held_back: list[tuple[int, int, Instruction]] = []
    backwards: dict[tuple[int, int], Instruction] = {}
    trained = chain.first_trained
    for r, replica in enumerate(plan.replicas):
        batch = batch_places(plan, chain, r)
        stages: list[list[_Segment]] = []
        for s, stage in enumerate(replica.stages):
            place, sums = stage_place(r, s), dict[str, Read]()
            segments: list[_Segment] = []
            for g in range(len(stage.segments)):
                first, stop = stage.segment_layers(g)
                segment = _Segment(
                    place,
                    g,
                    first=first,
                    stop=stop if stop < len(chain.layers) else None,
                    groups=segment_buckets(groups, (first, stop)),
                    sums=sums,
                    batch=place in batch,
                    grad=not evaluation and stop > trained,
                    hands_back=first > trained,
                )
                segments.append(segment)
            stages.append(segments)
        for stream in schedule_replica(replica, plan.schedule, evaluation=evaluation):
            made: list[Instruction] = []
            due: list[int] = []
            for turn in stream:
                run = _run(stages[turn.stage], turn)
                if not run:
                    due += [turn.microbatch] * (turn.way is not Way.WEIGHT)
                    continue
                held_back += [(r, m, run[0]) for m in due]
                due = []
                if isinstance(run[-1], Backward):
                    first = backwards.get((r, turn.microbatch))
                    if first is None or _stage(run[-1]) < _stage(first):
                        backwards[r, turn.microbatch] = run[-1]
                made += run
            streams.append(tuple(made))
    return tuple(streams), tuple((backwards[r, m], i) for r, m, i in held_back)


def _stage(instruction: Instruction) -> int:
    assert isinstance(instruction, Backward)
    return int(instruction.place.split(".s")[1])


def batch_places(plan: Plan, chain: Chain, replica: int) -> tuple[Place, ...]:
    """Stages of a replica that read batch arrays; the last one needs the mask."""
    stages = plan.replicas[replica].stages
    return tuple(
        stage_place(replica, k)
        for k, stage in enumerate(stages)
        if k == len(stages) - 1
        or any(layer.batch for layer in chain.layers[slice(*stage.layers)])
    )


def _run(segments: Sequence["_Segment"], turn: Turn) -> Sequence[Instruction]:
    """One turn of a stage, segment by segment."""
    way, _, microbatch, only = turn
    if only is not None:
        segments = segments[only : only + 1]
    if way is Way.FORWARD:
        return [segment.forward(microbatch) for segment in segments]
    part = PARTS[way]
    made = (segment.backward(microbatch, part) for segment in reversed(segments))
    return [instruction for instruction in made if instruction is not None]


class _Segment:
    """Writes a segment's instructions and counts the additions to each gradient."""

    def __init__(
        self,
        place: Place,
        segment: int,
        *,
        first: int,
        stop: int | None,
        groups: Sequence[Group],
        sums: dict[str, Read],
        batch: bool,
        grad: bool,
        hands_back: bool,
    ) -> None:
        """A segment of layers ``first`` up to ``stop``; None: up to the loss.

        ``sums`` are the stage's gradients so far: segments may share a group. ``grad``:
        it has a backward, which ``hands_back`` cotangents.
        """
        self._place, self._segment = place, segment
        self._first, self._stop = first, stop
        self._groups = [group.name for group in groups]
        self._trained = [group.name for group in groups if group.trainable]
        self._params = [Read(names.param(place, group)) for group in self._groups]
        self._inputs: dict[int, list[Read]] = {}
        self._sums = sums
        self._batch, self._grad, self._hands_back = batch, grad, hands_back

    def _reads(self, microbatch: int) -> list[Read]:
        """What both directions read: parameters, the first border, the batch."""
        if microbatch not in self._inputs:
            inputs = self._inputs[microbatch] = self._params.copy()
            if self._first > 0:
                inputs.append(Read(names.act(self._place, self._first, microbatch)))
            if self._batch:
                inputs.append(Read(names.batch(self._place, microbatch)))
        return self._inputs[microbatch]

    def forward(self, microbatch: int) -> Forward:
        """One microbatch forward."""
        place, stop = self._place, self._stop
        if stop is None:
            writes = [names.loss(place, microbatch)]
        else:
            writes = [names.act(place, stop, microbatch)]
        if self._grad:
            writes.append(names.res(place, self._segment, microbatch))
        return Forward(
            reads=tuple(self._reads(microbatch)),
            writes=tuple(writes),
            place=place,
            segment=self._segment,
            microbatches=(microbatch, microbatch + 1),
            grad=self._grad,
        )

    def backward(self, microbatch: int, part: Part) -> Backward | None:
        """One microbatch backward, or a part of that; None: there is nothing to do."""
        if not self._grad:
            return None
        if part is not Part.BOTH and not (self._trained and self._hands_back):
            if part is Part.WEIGHT:
                return None
            part = Part.BOTH
        place, stop = self._place, self._stop
        reads = self._reads(microbatch).copy()
        writes: list[Buffer] = []
        if part is not Part.WEIGHT:
            reads.append(Read(names.res(place, self._segment, microbatch)))
            if stop is None:
                reads.append(Read(names.seed(place)))
            else:
                reads.append(Read(names.cot(place, stop, microbatch)))
            if self._hands_back:
                writes.append(names.cot(place, self._first, microbatch))
        if part is not Part.BOTH:
            handed = names.weight_res(place, self._segment, microbatch)
            if part is Part.INPUT:
                writes.append(handed)
            else:
                reads = [r for r in reads if r.buffer.kind is not Kind.ACT]
                reads.append(Read(handed))
        if part is not Part.INPUT:
            for group in self._trained:
                count = 0
                if group in self._sums:
                    reads.append(self._sums[group])
                    count = (self._sums[group].buffer.microbatch or 0) + 1
                total = names.partial_grad(place, group, count)
                writes.append(total)
                self._sums[group] = Read(total)
        return Backward(
            reads=tuple(reads),
            writes=tuple(writes),
            place=place,
            segment=self._segment,
            microbatches=(microbatch, microbatch + 1),
            part=part,
        )
