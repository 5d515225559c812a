"""The peak a plan promises on each device: what must fit before anything is compiled.

    plan, chain, cluster -> plan_memory -> device -> MemoryParts

Resident all step: parameters, gradient accumulators, state. On top come live
activations, one segment's transients, and groups whose gradients are being summed: that
runs beside the backward, an accumulator dying as its sum is made. *Usable* memory
leaves the framework's context out already, so it is not counted here. Every term rounds
up: a promise is kept when the measured peak stays below it.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hexijax.cluster import Cluster, Device
from hexijax.costs.activations import (
    CPU,
    Within,
    enter_bytes,
    handed_microbatches,
    held_bytes,
    is_joined,
    live_microbatches,
    makes_room,
    segment_kept_bytes,
    stage_activations,
    waiting_bytes,
)
from hexijax.costs.compute import fused_attention
from hexijax.costs.layered import LayeredGrads
from hexijax.costs.temp import Temps
from hexijax.layers.chain import ITEM_BYTES, Chain, Group, Leaf, LeafPart
from hexijax.plan.plan import (
    Params,
    Place,
    Plan,
    Replica,
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

GAPS_BYTES, GAPS_SHARE = 320 * 2**20, 1 / 40
"""What an accelerator's allocator gives more than was asked for, the lesser of both.
XLA's cuts a free piece only where 128 MiB or half of it would be left; over 24 peaks of
two H200s that came to 272 MiB and 1.6% at most (docs/performance.md)."""

SCALARS_BYTES = 256
"""Of a bucket's state at a home: counts of steps and the like."""

MOMENTS = 2
"""Adam's; ``moments`` overrules it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts:
    """What a device holds, in bytes."""

    params_bytes: int = 0
    """Parameters in the compute dtype."""

    passes_bytes: int = 0
    """Parameters that are there for a pass: of one pass and the next."""

    grads_bytes: int = 0
    """Gradient accumulators of this device's lane."""

    leaving_bytes: int = 0
    """Under ``layered``, accumulators of one pass and of the last, which leave: of two
    segments, not of all."""

    state_bytes: int = 0
    """Masters and moments of the slices at home here."""

    activations_bytes: int = 0
    """Kept from forwards to backwards, and borders on their way, at full depth."""

    transient_bytes: int = 0
    """Alive inside one segment's backward only."""

    sync_bytes: int = 0
    """Sums and new parameters of the groups in flight, and of groups whose state is at
    home here though no stage of this device uses them; chunks of state that rests in
    host memory, here for their update."""

    gaps_bytes: int = 0
    """Between what was asked for and what the allocator gave."""

    host_bytes: int = 0
    """Of the host, pinned: what waits and rests there. No part of the device's peak."""

    @classmethod
    def _on_device(cls) -> list[str]:
        names = (field.name for field in dataclasses.fields(cls))
        return [name for name in names if name != "host_bytes"]

    @property
    def total_bytes(self) -> int:
        """The peak: all parts of the device at once."""
        return sum(getattr(self, name) for name in self._on_device())

    @property
    def largest(self) -> str:
        """Name of the largest part, for people."""
        parts = {
            name.removesuffix("_bytes"): getattr(self, name)
            for name in self._on_device()
        }
        return max(parts, key=lambda name: parts[name])

    def __add__(self, other: "MemoryParts") -> "MemoryParts":
        """Of two stages on one device; only one of them is inside a backward, and
        passes follow each other whichever stage's they are."""
        summed = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(self)
        }
        for shared in ("transient_bytes", "passes_bytes", "leaving_bytes"):
            summed[shared] = max(getattr(self, shared), getattr(other, shared))
        return MemoryParts(**summed)


def plan_memory(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    moments: int = MOMENTS,
    whole_leaves: bool = False,
    temps: Temps | None = None,
) -> dict[str, MemoryParts]:
    """The parts of every device the plan names, homes of state included.

    Args:
      plan: what is where.
      chain: the model.
      cluster: kinds of the stages' devices: what attention they run.
      moments: fp32 arrays of the optimizer for each parameter, the master left out.
      whole_leaves: no leaf's state is cut, for optimizers that look inside a leaf.
      temps: what compiled segments were seen to need; it overrules the model.
    """
    found: dict[str, MemoryParts] = {}

    def add(devices: Sequence[str], parts: MemoryParts) -> None:
        for device in devices:
            found[device] = _sum(found[device], parts) if device in found else parts

    alike: dict[object, MemoryParts] = {}
    for replica in plan.replicas:
        live = live_microbatches(plan.schedule, replica)
        handed = handed_microbatches(plan.schedule, replica)
        for s, stage in enumerate(replica.stages):
            profile = cluster.device(stage.devices[0]).profile
            room_of = makes_room(plan.schedule, replica, s)
            key = (
                dataclasses.replace(stage, devices=()),
                profile.kind,
                replica.microbatch_size,
                (live[0], live[max(s - 1, 0)], live[s]),
                handed[s],
                replica.microbatches <= live[s],
                room_of,
                is_joined(plan.schedule, replica, s, len(stage.segments) - 1),
            )
            if key not in alike:
                within = stage_within(plan, chain, cluster, replica, s, temps)
                parts = stage_parts(chain, within, replica, stage, live[s], handed[s])
                waiting = waiting_bytes(chain, replica, s, live, room_of)
                if plan.schedule is Schedule.LAYERED:  # counted by bucket and pass
                    parts = dataclasses.replace(parts, grads_bytes=0)
                alike[key] = parts + MemoryParts(activations_bytes=waiting)
            add(stage.devices, alike[key])
    devices = {place: stage.devices for place, stage in plan.stages()}
    for place, parts in _state(plan, chain, moments, whole_leaves).items():
        add(devices.get(place, (place,)), parts)
    return {
        name: parts if cluster.device(name).profile.vendor == CPU else _gapped(parts)
        for name, parts in found.items()
    }


@functools.lru_cache(maxsize=2**12)
def _gapped(parts: MemoryParts) -> MemoryParts:
    """The same on an accelerator."""
    gaps_bytes = math.ceil(min(GAPS_BYTES, parts.total_bytes * GAPS_SHARE))
    return dataclasses.replace(parts, gaps_bytes=gaps_bytes)


def room_bytes(device: Device) -> int:
    """Of a device's usable memory, what arrays can have: all but the gaps."""
    usable_bytes = device.usable_memory_bytes
    if device.profile.vendor == CPU:
        return usable_bytes
    gaps_bytes = min(GAPS_BYTES, usable_bytes * GAPS_SHARE / (1 + GAPS_SHARE))
    return usable_bytes - math.ceil(gaps_bytes)


@functools.lru_cache(maxsize=2**12)
def _sum(a: MemoryParts, b: MemoryParts) -> MemoryParts:
    """Devices of equal replicas hold the same."""
    return a + b


def stage_within(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    replica: Replica,
    s: int,
    temps: Temps | None = None,
) -> Within:
    """How programs of a replica's stage use memory."""
    stage = replica.stages[s]
    profile = cluster.device(stage.devices[0]).profile
    fused = fused_attention(profile, stage.dtype)
    return Within(
        profile=profile,
        layers=chain.layers_under(fused_attention=fused),
        temps=temps or Temps(),
        joined=is_joined(plan.schedule, replica, s, len(stage.segments) - 1),
        layered=plan.schedule is Schedule.LAYERED,
    )


def stage_parts(
    chain: Chain,
    within: Within,
    replica: Replica,
    stage: Stage,
    live: int,
    handed: int = 0,
) -> MemoryParts:
    """A device of a stage without the state it is home of."""
    held = held_bytes(chain, stage.layers, stage.tensor, stage.dtype)
    params, passing = params_bytes(chain, stage, held.handed)
    samples = replica.microbatch_size // stage.lanes
    kept, transient = stage_activations(
        chain,
        within,
        stage,
        samples,
        live,
        handed,
        all_live=replica.microbatches <= live,
    )
    return MemoryParts(
        params_bytes=params,
        passes_bytes=passing,
        grads_bytes=held.grads,
        activations_bytes=kept,
        transient_bytes=transient,
        host_bytes=replica.microbatches * waiting_on_host(chain, stage, samples)
        + live * residuals_on_host(chain, within, stage, samples)
        + resting_bytes(chain, stage),
    )


def waiting_on_host(chain: Chain, stage: Stage, samples: int) -> int:
    """Of one microbatch: at each border its activation, or later its cotangent."""
    layers = [
        stage.segment_layers(g)[0]
        for g in range(len(stage.segments))
        if stage.waits_on_host(g)
    ]
    if stage.waits_on_host(0):
        layers.append(stage.layers[1])
    return sum(enter_bytes(chain, x, stage.dtype, samples) for x in layers)


def residuals_on_host(chain: Chain, within: Within, stage: Stage, samples: int) -> int:
    """Of one microbatch."""
    return sum(
        segment_kept_bytes(
            chain, within.layers, *stage.segment_layers(g), stage, samples
        )
        for g in range(len(stage.segments))
        if stage.keeps_on_host(g)
    )


def resting_bytes(chain: Chain, stage: Stage) -> int:
    """Streamed parameters: those that are there, and their next version."""
    held = [
        held_bytes(chain, stage.segment_layers(g), stage.tensor, stage.dtype)
        for g in range(len(stage.segments))
        if stage.streams(g)
    ]
    return sum(each.trained for each in held)


def params_bytes(chain: Chain, stage: Stage, every: int) -> tuple[int, int]:
    """What a stage has all step, of ``every`` byte of its parameters, and for passes:
    of each as much as its pieces are before they are joined, or the next pass's.

    What a kept segment shares with a freed or streamed one is counted as that, too.
    """
    if not stage.params:
        return every, 0
    of = stage.tensor, stage.dtype
    spans = [stage.segment_layers(g) for g in range(len(stage.segments))]
    held = [held_bytes(chain, span, *of) for span in spans]
    passing = [stage.frees(g) or stage.streams(g) for g in range(len(held))]
    kept = sum(
        each.handed - each.trained * passes
        for each, passes in zip(held, passing, strict=True)
    )
    largest = max(
        each.trained for each, passes in zip(held, passing, strict=True) if passes
    )
    return min(kept, every), PASSES * largest


def stage_groups(chain: Chain, layers: tuple[int, int]) -> list[Group]:
    """Groups that a run of layers uses, each once."""
    names = dict.fromkeys(
        name for layer in chain.layers[slice(*layers)] for name in layer.groups
    )
    return [group for group in chain.groups if group.name in names]


def trained_groups(chain: Chain, layers: tuple[int, int]) -> list[Group]:
    """Of them, those that train: what is summed and updated."""
    return [group for group in stage_groups(chain, layers) if group.trainable]


def shard_size(group: Group, tensor: int) -> int:
    """Parameters of a group on one device at a tensor degree."""
    return sum(leaf_shard(leaf, tensor) for leaf in group.leaves)


def leaf_shard(leaf: Leaf, tensor: int) -> int:
    """The same of a leaf."""
    return leaf.size if leaf.tensor_dim is None else -(-leaf.size // tensor)


def _state(
    plan: Plan, chain: Chain, moments: int, whole_leaves: bool
) -> Mapping[Place, MemoryParts]:
    """For each place, what every device of it holds of state and of sums."""
    stages = dict(plan.stages())
    groups = buckets(plan, chain, whole_leaves=whole_leaves)
    held: dict[Place, int] = {}
    passing: dict[Place, int] = {}
    in_flight: dict[Place, int] = {}
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
            in_flight[place] = max(in_flight.get(place, 0), flying)
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
            + in_flight[place]
            + together.get(place, 0)
            + PASSES * max(fetched.get(place, {}).values(), default=0)
            + on_their_way(place),
            host_bytes=resting.get(place, 0),
        )
        for place in held
    }
    for place, (stays, leaving) in (grads.sizes() if grads else {}).items():
        found[place] += MemoryParts(
            grads_bytes=GRAD_BYTES * stays, leaving_bytes=GRAD_BYTES * leaving
        )
    return found


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
