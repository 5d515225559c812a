"""What a plan and its chain ask of every Program, looked up once."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan
from hexijax.program.buckets import buckets, segment_buckets
from hexijax.program.compute import batch_places
from hexijax.program.placement import GroupPlaces, group_places, last_places
from hexijax.program.program import SECTIONS, Agree, Forward, Instruction, Program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One segment of a stage."""

    layers: tuple[int, int]
    """First layer and the one past the last."""

    groups: tuple[str, ...]
    """Parameter groups it reads."""

    kept: tuple[str, ...]
    """Those of them that its stage has all step."""

    trained: tuple[str, ...]
    """Those of them that train."""

    has_backward: bool
    """Whether a parameter of it or before it trains."""

    hands_back: bool
    """Whether one before it does, so that cotangents leave its first border."""

    reads_batch: bool
    """Whether its stage has the batch."""

    is_last: bool
    """Whether it ends in the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything the rules compare with."""

    plan: Plan
    segments: Mapping[tuple[Place, int], Segment]
    groups: Mapping[str, GroupPlaces]
    batch_places: Mapping[int, tuple[Place, ...]]
    """Stages that a Load serves, by replica."""

    microbatches: Mapping[Place, int]
    """Microbatches a step of the replica that a stage belongs to."""

    trains: bool
    """Whether the Program keeps residuals; else it evaluates."""

    scaled: bool
    """Whether its body agrees on a loss scale for the next step."""

    grad_passes: Mapping[tuple[Place, str], int]
    """The segment whose pass makes the gradient of a bucket at a stage, where the plan
    has room for those of some passes and each replica makes it in one."""

    last_places: tuple[Place, ...]
    """Where losses are made, in the order of the replicas."""

    @classmethod
    def of(
        cls, program: Program, plan: Plan, chain: Chain, *, whole_leaves: bool
    ) -> "Facts":
        """Facts of a plan; whether it trains, and by a dynamic scale, is read from the
        Program."""
        served = {r: batch_places(plan, chain, r) for r in range(len(plan.replicas))}
        with_batch = {place for places in served.values() for place in places}
        groups = buckets(plan, chain, whole_leaves=whole_leaves)
        first_trained = chain.first_trained
        places = group_places(plan, chain, whole_leaves=whole_leaves)
        keepers = {g.group: g.keepers for g in places}
        segments = {
            (place, g): Segment(
                layers=(layers := stage.segment_layers(g)),
                groups=(used := _names(segment_buckets(groups, layers))),
                kept=tuple(name for name in used if place in keepers[name]),
                trained=tuple(
                    b.name for b in segment_buckets(groups, layers) if b.trainable
                ),
                has_backward=layers[1] > first_trained,
                hands_back=layers[0] > first_trained,
                reads_batch=place in with_batch,
                is_last=layers[1] == len(chain.layers),
            )
            for place, stage in plan.stages()
            for g in range(len(stage.segments))
        }
        counts = [
            replica.microbatches for replica in plan.replicas for _ in replica.stages
        ]
        return cls(
            plan=plan,
            segments=segments,
            groups={g.group: g for g in places},
            batch_places=served,
            microbatches={
                place: count
                for (place, _), count in zip(plan.stages(), counts, strict=True)
            },
            trains=any(isinstance(i, Forward) and i.grad for i in program.body),
            grad_passes=_grad_passes(plan, segments),
            scaled=any(isinstance(i, Agree) and i.name == "scale" for i in program),
            last_places=tuple(last_places(plan)),
        )


def _grad_passes(
    plan: Plan, segments: Mapping[tuple[Place, int], Segment]
) -> dict[tuple[Place, str], int]:
    users: dict[str, list[tuple[Place, int]]] = {}
    for user, segment in segments.items():
        for name in segment.trained:
            users.setdefault(name, []).append(user)
    return {
        (place, name): g
        for name, found in users.items()
        if len({place.split(".")[0] for place, _ in found}) == len(found)
        for place, g in found
        if plan.stage(place).grads
    }


def _names(groups: Iterable[Group]) -> tuple[str, ...]:
    return tuple(group.name for group in groups)


def numbered(
    program: Program, section: str = "body"
) -> Iterator[tuple[int, Instruction]]:
    """The instructions of a section with their positions in the whole Program."""
    start = 0
    for name in SECTIONS:
        instructions = getattr(program, name)
        if name == section:
            yield from enumerate(instructions, start)
        start += len(instructions)
