"""Pass 1: streams of turns become Forwards and Backwards with their buffers.

    Plan, Chain, schedules -> streams of instructions

A stage's segments go forward in order and backward in reverse, whole or in parts. An
Act or Cot is read where it is needed, whoever wrote it: the next pass adds the moves.
"""

from collections.abc import Iterator, Mapping, Sequence

from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan, stage_place
from hexijax.program import names
from hexijax.program.buckets import buckets, segment_buckets
from hexijax.program.program import Backward, Buffer, Forward, Instruction, Part, Read
from hexijax.program.schedules import Turn, Way, schedule_replica

Streams = tuple[tuple[Instruction, ...], ...]

PARTS = {Way.BACKWARD: Part.BOTH, Way.INPUT: Part.INPUT, Way.WEIGHT: Part.WEIGHT}


def compute(
    plan: Plan,
    chain: Chain,
    groups: Sequence[Group] | None = None,
    *,
    evaluation: bool = False,
) -> Streams:
    """One stream for each stage, or for each set of devices that stages share."""
    groups = buckets(plan, chain) if groups is None else tuple(groups)
    writer = _Writer(plan, chain, groups, evaluation=evaluation)
    return tuple(
        tuple(instr for turn in stream for instr in writer.run(r, turn))
        for r, replica in enumerate(plan.replicas)
        for stream in schedule_replica(replica, plan.schedule, evaluation=evaluation)
    )


def batch_places(plan: Plan, chain: Chain, replica: int) -> tuple[Place, ...]:
    """Stages of a replica that read batch arrays; the last one needs the mask."""
    stages = plan.replicas[replica].stages
    return tuple(
        stage_place(replica, k)
        for k, stage in enumerate(stages)
        if k == len(stages) - 1
        or any(layer.batch for layer in chain.layers[slice(*stage.layers)])
    )


class _Writer:
    """Writes instructions and counts the additions to each gradient."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        groups: tuple[Group, ...],
        *,
        evaluation: bool,
    ) -> None:
        self._stages = dict(plan.stages())
        self._layers = {
            (place, g): stage.segment_layers(g)
            for place, stage in self._stages.items()
            for g in range(len(stage.segments))
        }
        self._evaluation = evaluation
        self._num_layers = len(chain.layers)
        self._batch = {
            place
            for r in range(len(plan.replicas))
            for place in batch_places(plan, chain, r)
        }
        self._groups = {
            (place, g): tuple(group.name for group in segment_buckets(groups, layers))
            for (place, g), layers in self._layers.items()
        }
        self._params: Mapping[tuple[Place, int], tuple[Buffer, ...]] = {
            (place, g): tuple(names.param(place, group) for group in groups)
            for (place, g), groups in self._groups.items()
        }
        self._counts: dict[tuple[Place, str], int] = {}

    def run(self, replica: int, turn: Turn) -> Iterator[Instruction]:
        """One turn, segment by segment."""
        place = stage_place(replica, turn.stage)
        segments = range(len(self._stages[place].segments))
        if turn.way is Way.FORWARD:
            for segment in segments:
                yield self._forward(place, segment, turn.microbatch)
            return
        for segment in reversed(segments):
            yield self._backward(place, segment, turn.microbatch, PARTS[turn.way])

    def _inputs(
        self, place: Place, segment: int, microbatch: int, *, act: bool = True
    ) -> list[Buffer]:
        """What both directions read: parameters, the first border, the batch."""
        first, _ = self._layers[place, segment]
        inputs = list(self._params[place, segment])
        if first > 0 and act:
            inputs.append(names.act(place, first, microbatch))
        if place in self._batch:
            inputs.append(names.batch(place, microbatch))
        return inputs

    def _forward(self, place: Place, segment: int, microbatch: int) -> Forward:
        _, stop = self._layers[place, segment]
        if stop < self._num_layers:
            writes = [names.act(place, stop, microbatch)]
        else:
            writes = [names.loss(place, microbatch)]
        if not self._evaluation:
            writes.append(names.res(place, segment, microbatch))
        return Forward(
            reads=tuple(map(Read, self._inputs(place, segment, microbatch))),
            writes=tuple(writes),
            place=place,
            segment=segment,
            microbatches=(microbatch, microbatch + 1),
            grad=not self._evaluation,
        )

    def _backward(
        self, place: Place, segment: int, microbatch: int, part: Part
    ) -> Backward:
        first, stop = self._layers[place, segment]
        handed = names.weight_res(place, segment, microbatch)
        reads = self._inputs(place, segment, microbatch, act=part is not Part.WEIGHT)
        writes: list[Buffer] = []
        if part is Part.WEIGHT:
            reads.append(handed)
        else:
            reads.append(names.res(place, segment, microbatch))
            if stop < self._num_layers:
                reads.append(names.cot(place, stop, microbatch))
            else:
                reads.append(names.seed(place))
            if first > 0:
                writes.append(names.cot(place, first, microbatch))
        if part is Part.INPUT:
            writes.append(handed)
        for group in self._groups[place, segment] if part is not Part.INPUT else ():
            count = self._counts.get((place, group), 0)
            if count:
                reads.append(names.partial_grad(place, group, count - 1))
            writes.append(names.partial_grad(place, group, count))
            self._counts[place, group] = count + 1
        return Backward(
            reads=tuple(map(Read, reads)),
            writes=tuple(writes),
            place=place,
            segment=segment,
            microbatches=(microbatch, microbatch + 1),
            part=part,
        )
