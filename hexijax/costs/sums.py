"""State, and sums of gradients: what every device of a place holds of them.

    Plan, Chain -> state_and_sums -> Place -> Sums

State and all that is there throughout are summed up. What a bucket takes while its
gradients are summed stands beside them: it may find room that activations have left.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hexijax.costs.layered import LayeredGrads
from hexijax.costs.parts import MemoryParts
from hexijax.layers.chain import ITEM_BYTES, Chain, Group, Leaf, LeafPart
from hexijax.plan.plan import (
    Params,
    Place,
    Plan,
    Schedule,
    Stage,
    UpdateOrder,
)
from hexijax.program.boxes import Box, state_boxes, state_share, users
from hexijax.program.buckets import (
    buckets,
    layer_segments,
    segment_buckets,
    streams_state,
    update_site,
    user_segments,
)
from hexijax.program.linearise import CHUNKS
from hexijax.program.program import Kind, Site
from hexijax.program.waiting import most_leaving

STATE_BYTES = 4
"""Of the master and of each moment, for each parameter."""

GRAD_BYTES = 4
"""Of a gradient accumulator, for each parameter."""

GROUPS_IN_FLIGHT = 2
"""Groups of several members being summed at once: one arrives while one is added."""

PASSES = 2
"""Whose parameters are there at once: one computes while the next one's travel."""


def chunks_on_device(leaving: int) -> int:
    """Of state from the host: those of the Program's slots, and those whose copies back
    to the host have not ended when the next ones' memory is taken."""
    return CHUNKS + most_leaving(Kind.STATE, leaving)


CHUNKS_ON_DEVICE = chunks_on_device(0)
"""The fewest."""

MADE = 2
"""Buckets of new parameters, or of gradients, on a device before they leave it: as they
are made, and as they are joined."""

SCALARS_BYTES = 256
"""Of a bucket's state at a home: counts of steps and the like."""

MOMENTS = 2
"""Adam's; ``moments`` overrules it."""


class Landing(NamedTuple):
    """A bucket whose gradients are summed at a place."""

    first: int
    """Its first layer in the stage: summed when the backward has passed it."""

    flying: int
    """What that takes, in bytes."""

    staying: int
    """Of it, what may be there beside all activations: what others have sent early, new
    parameters on their way when the next step begins, and all of what is home here
    alone, or used here alone."""

    alone: bool
    """Nothing arrives."""


class Sums(NamedTuple):
    """State and sums at a place, on every device of it."""

    parts: MemoryParts

    landing: Sequence[Landing]

    grows: Sequence[int]
    """Bytes of gradients that each segment's pass leaves, part of ``grads_bytes``."""

    @property
    def flying_bytes(self) -> int:
        """What buckets on their way take at most."""
        return max((each.flying for each in self.landing), default=0)


def state_and_sums(
    plan: Plan, chain: Chain, moments: int, whole_leaves: bool
) -> Mapping[Place, Sums]:
    """For each place, what every device of it holds of state and of sums."""
    stages = dict(plan.stages())
    groups = buckets(plan, chain, whole_leaves=whole_leaves)
    held: dict[Place, int] = {}
    passing: dict[Place, int] = {}
    landing: dict[Place, list[Landing]] = {}
    resting: dict[Place, int] = {}
    chunks: dict[Place, list[int]] = {}
    going: dict[tuple[Place, Kind], list[int]] = {}
    together = _assembled(plan, groups)
    segments_L = layer_segments(plan, len(chain.layers))
    fetched: dict[Place, dict[tuple[Place, int], int]] = {}
    late = plan.order is UpdateOrder.PRIORITY  # sums wait for the next step
    grads = LayeredGrads(plan, chain) if plan.schedule is Schedule.LAYERED else None
    alike_parts: dict[object, list[_Part]] = {}
    for group in groups:
        if not group.trainable:  # parameters, which lie where they are computed with
            continue
        members = dict.fromkeys(users(plan, group))
        rests_on_host = streams_state(plan, group)
        site = update_site(plan, group)
        shapes = tuple((leaf.shape, leaf.tensor_dim) for leaf in group.leaves)
        key = (tuple(members), shapes, id(state_share(plan, group)))
        if key not in alike_parts:
            sizes = _sizes(plan, chain, group, stages, whole_leaves)
            alike_parts[key] = _parts(group, stages, members, sizes)
        for part in alike_parts[key]:
            place, stage, size, item, shard, alone, flying = part
            own_lanes = 1 if stage is None else stage.lanes
            start = stage.layers[0] if stage else 0
            first = min((x for x in group.layers if x >= start), default=0)
            staying = flying
            if place in members and not alone:
                early = GRAD_BYTES * len(members) * size
                staying = GROUPS_IN_FLIGHT * max(item * (size + shard), early)
            landing.setdefault(place, []).append(Landing(first, flying, staying, alone))
            ends = grads is not None and place in members and grads.ends(group, place)
            if late and not ends and not (alone and own_lanes == 1):
                passing[place] = passing.get(place, 0) + GRAD_BYTES * size
            state = size * STATE_BYTES * (1 + moments)
            if rests_on_host:
                rests = state + SCALARS_BYTES
                if site is Site.HOST:
                    rests += size * (GRAD_BYTES + item)
                else:
                    chunks.setdefault(place, []).append(state)
                resting[place] = resting.get(place, 0) + rests
                for user in user_segments(segments_L, group):
                    if stages[user[0]].frees(user[1]):
                        masters = fetched.setdefault(place, {})
                        masters[user] = masters.get(user, 0) + STATE_BYTES * size
                state = 0
            held[place] = held.get(place, 0) + state
            if stage and place in members and _streams(stage, group):
                going.setdefault((place, Kind.PARAM), []).append(item * shard)
            if stage and stage.grads and site is Site.HOST:
                going.setdefault((place, Kind.GRAD), []).append(GRAD_BYTES * size)
            if place not in members:
                passing[place] = passing.get(place, 0) + size * (GRAD_BYTES + item)
            elif grads:
                own = alone and size > 0 and own_lanes == 1
                grads.add(group, place, shard, size, alone=own)

    def on_their_way(place: Place) -> int:
        """Chunks from the host and back, and what leaves for it, at most at once."""
        stage = stages.get(place)
        leaving = stage.leaving if stage else 0
        most = chunks_on_device(leaving)
        return sum(sorted(chunks.get(place, ()))[-most:]) + sum(
            sum(
                sorted(going.get((place, kind), ()))[
                    -MADE - most_leaving(kind, leaving) :
                ]
            )
            for kind in (Kind.PARAM, Kind.GRAD)
        )

    found = {
        place: MemoryParts(
            state_bytes=held[place],
            sync_bytes=passing.get(place, 0)
            + together.get(place, 0)
            + PASSES * max(fetched.get(place, {}).values(), default=0)
            + on_their_way(place),
            host_bytes=resting.get(place, 0),
        )
        for place in held
    }
    grows: dict[Place, tuple[int, ...]] = {}
    for place, of in (grads.sizes() if grads else {}).items():
        grows[place] = tuple(GRAD_BYTES * x for x in of.grows)
        found[place] += MemoryParts(
            grads_bytes=GRAD_BYTES * of.stays + sum(grows[place]),
            leaving_bytes=GRAD_BYTES * of.leaving,
        )
    return {
        place: Sums(parts, landing[place], grows.get(place, ()))
        for place, parts in found.items()
    }


def landing_bytes(
    landing: Sequence[Landing], stage: Stage, drains: Sequence[int]
) -> int:
    """The most of sums and of the activations that are left beside them: while the last
    microbatch goes backward through a segment, later segments' sums are on their way.
    """
    most = 0
    for g in range(len(stage.segments)):
        _, past = stage.segment_layers(g)
        sums = [x for x in landing if x.first >= past]
        if sums:
            most = max(most, drains[g] + _together(sums))
    return max(most, _together(landing))


def grown_bytes(grows: Sequence[int], drains: Sequence[int]) -> int:
    """Under ``layered``, the most of activations and of gradients: as the backward goes
    on there are fewer of the ones, and more of the others; as the next forward goes on,
    fewer of the others, each before its layer's update."""
    later = itertools.accumulate(reversed(grows))
    return max(a + b for a, b in zip(reversed(drains), later, strict=True))


def _together(sums: Sequence[Landing]) -> int:
    """The most of so many sums that are on their way at once."""
    shared = sorted(x.flying // GROUPS_IN_FLIGHT for x in sums if not x.alone)
    alone = max((x.flying for x in sums if x.alone), default=0)
    return max(alone, sum(shared[-GROUPS_IN_FLIGHT:]))


class _Part(NamedTuple):
    """Of a bucket, at one of its users or homes; in elements and bytes on a device."""

    place: Place
    stage: Stage | None
    size: int
    """At home there."""
    item: int
    """Bytes of a parameter."""
    shard: int
    """That it computes with."""
    alone: bool
    """The only user, and there is one home."""
    flying: int
    """What summing and updating takes."""


def _parts(
    group: Group,
    stages: Mapping[Place, Stage],
    members: Collection[Place],
    sizes: Mapping[Place, int],
) -> list[_Part]:
    """Of one bucket; of those that are alike the same."""
    found: list[_Part] = []
    shards = functools.cache(functools.partial(shard_size, group))
    grids = {(stages[m].lanes, stages[m].tensor) for m in members}
    for place in dict.fromkeys([*sizes, *members]):
        stage, size = stages.get(place), sizes.get(place, 0)
        item = ITEM_BYTES[stage.dtype] if stage else STATE_BYTES
        lanes, tensor = (stage.lanes, stage.tensor) if stage else (1, 1)
        shard = shards(tensor) if place in members else 0
        alone = len(members) == len(sizes) == 1 and place in members
        if alone and place in sizes:
            flying = alone_bytes(size, shard, item, lanes)
        else:
            in_pieces = grids != {(lanes, tensor)}
            flying = flying_bytes(size, shard, len(members), item, in_pieces=in_pieces)
        found.append(_Part(place, stage, size, item, shard, alone, flying))
    return found


def _sizes(
    plan: Plan,
    chain: Chain,
    group: Group,
    stages: Mapping[Place, Stage],
    whole_leaves: bool,
) -> dict[Place, int]:
    """Elements of a group's state on each device of its homes."""
    leaves = alike(group.leaves, whole_leaves)
    found: dict[Place, int] = {}
    boxes = state_boxes(plan, chain, group, whole_leaves=whole_leaves)
    for place, held in boxes.items():
        stage = stages.get(place)
        lanes = 1 if stage is None or whole_leaves else stage.lanes
        tensor = 1 if stage is None else stage.tensor
        found[place] = sum(
            count * box_size(leaf, held[leaf.id], lanes=lanes, tensor=tensor)
            for leaf, count in leaves
            if leaf.id in held
        )
    return found


def _streams(stage: Stage, group: Group) -> bool:
    """Whether some of a bucket's parameters come from the host for each pass."""
    return Params.STREAMED in stage.params and any(
        stage.streams(g) and any(start <= x < stop for x in group.layers)
        for g in range(len(stage.segments))
        for start, stop in [stage.segment_layers(g)]
    )


def _assembled(plan: Plan, groups: Sequence[Group]) -> dict[Place, int]:
    """By stage, the most that a segment puts together of parts of leaves."""
    cut = [
        dataclasses.replace(group, leaves=parts)
        for group in groups
        if (parts := tuple(x for x in group.leaves if isinstance(x, LeafPart)))
    ]
    if not cut:
        return {}
    return {
        place: ITEM_BYTES[stage.dtype]
        * max(
            sum(
                shard_size(group, stage.tensor)
                for group in segment_buckets(tuple(cut), stage.segment_layers(g))
            )
            for g in range(len(stage.segments))
        )
        for place, stage in plan.stages()
    }


def alike(leaves: Sequence[Leaf], whole_leaves: bool) -> list[tuple[Leaf, int]]:
    """Leaves that are cut differently, and how many there are of each."""
    if whole_leaves:
        return [(leaf, 1) for leaf in leaves]
    found: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        found.setdefault((leaf.shape, leaf.tensor_dim), []).append(leaf)
    return [(same[0], len(same)) for same in found.values()]


def alone_bytes(size: int, shard: int, item: int, lanes: int) -> int:
    """What updating a group takes on its only user, which is its only home too.

    A single lane's accumulator is the sum itself, and the updated slice the parameter.
    """
    if lanes == 1:
        return size * item
    return size * (GRAD_BYTES + item) + shard * item


def flying_bytes(
    size: int, shard: int, members: int, item: int, *, in_pieces: bool = True
) -> int:
    """What summing, updating and gathering takes on one device, for one group.

    A stage cuts its sum before the accumulators die; later its lanes gather parameters
    from their parts, which takes no more than those sums did.

    Args:
      size: parameters of the group at home here.
      shard: those a stage here computes with.
      members: stages that add to the gradient.
      item: bytes of a parameter in the compute dtype.
      in_pieces: lanes or shards of some member divide a gradient otherwise than here,
        so that its pieces are put together first, one member's at a time.
    """
    boxes = size * (GRAD_BYTES * (members + 1 + in_pieces) + item)
    return GROUPS_IN_FLIGHT * (boxes + shard * (GRAD_BYTES + item))


def box_size(leaf: Leaf, box: Box, *, lanes: int, tensor: int) -> int:
    """Elements of a box on one device of its home, split by tensor shards, then lanes.

    As the runtime lays it out: evenly or not at all.
    """
    shape = [stop - start for start, stop in box]
    free = list(range(len(shape)))
    size, cut = math.prod(shape), leaf.tensor_dim
    if tensor > 1 and cut is not None and shape[cut] % tensor == 0:
        size //= tensor
        free.remove(cut)
    if lanes > 1 and any(shape[dim] % lanes == 0 for dim in free):
        size //= lanes
    return size


def shard_size(group: Group, tensor: int) -> int:
    """Parameters of a group on one device at a tensor degree."""
    return sum(leaf_shard(leaf, tensor) for leaf in group.leaves)


def leaf_shard(leaf: Leaf, tensor: int) -> int:
    """The same of a leaf."""
    return leaf.size if leaf.tensor_dim is None else -(-leaf.size // tensor)
