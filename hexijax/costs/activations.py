"""How many microbatches a stage holds at once, and the bytes they keep alive."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from hexijax.cluster import DeviceProfile
from hexijax.costs.compute import Same, border_bytes_in
from hexijax.costs.rates import SPLIT_SHARE
from hexijax.costs.temp import TempKey, Temps, temp_factor
from hexijax.costs.working import (
    most_apart,
    most_forward,
    most_joined,
    waiting_layers,
    working,
)
from hexijax.layers.chain import ITEM_BYTES, Chain, Layer, Remat
from hexijax.plan.plan import Replica, Schedule, Stage
from hexijax.program.schedules import Way, schedule_replica

SAMPLE_BYTES = 12
"""Beside each sample's arrays: its weight in float32, and the key it draws from."""

CPU = "cpu"
"""The vendor whose compiler holds what the forward would keep, not what `working` says.
"""

BORDERS_IN_FLIGHT = 2
"""Of each border: one being used and one arriving."""


BORDERS_PASSING = 8
"""Of the largest border that waits in host memory: two slots of activations and two of
cotangents, what was just made or has come, and what is used too soon to travel."""


RESIDUALS_PASSING = 5
"""Of the largest segment whose residuals wait in host memory: two slots, what was just
made, and what is used too soon to travel."""


def live_microbatches(schedule: Schedule, replica: Replica) -> list[int]:
    """For each stage, the most microbatches between their forward and their backward.

    1F1B and zero-bubble: stage k of S holds min(S - k, M), eager 1F1B
    min(2 (S - k) - 1, M), GPipe and layered all M.
    """
    num_stages, num_microbatches = len(replica.stages), replica.microbatches
    if schedule in (Schedule.GPIPE, Schedule.LAYERED):
        return [num_microbatches] * num_stages
    if schedule is Schedule.INTERLEAVED:
        return _play(replica)
    ahead = 2 if schedule is Schedule.EAGER else 1
    return [
        min(ahead * (num_stages - k - 1) + 1, num_microbatches)
        for k in range(num_stages)
    ]


def handed_microbatches(schedule: Schedule, replica: Replica) -> list[int]:
    """For each stage, the most microbatches whose weight part is still due.

    Of a split backward: stage k holds min(k + 1, M), one of them just being handed on.
    """
    stages = range(len(replica.stages))
    if schedule is not Schedule.ZERO_BUBBLE:
        return [0 for _ in stages]
    return [min(k + 1, replica.microbatches) if k else 0 for k in stages]


def _play(replica: Replica) -> list[int]:
    """Counts along the schedule itself; stages of a device set peak at unlike times."""
    now = [0] * len(replica.stages)
    peak = list(now)
    for stream in schedule_replica(replica, Schedule.INTERLEAVED):
        for turn in stream:
            now[turn.stage] += 1 if turn.way is Way.FORWARD else -1
            peak[turn.stage] = max(peak[turn.stage], now[turn.stage])
    return peak


def is_joined(schedule: Schedule, replica: Replica, stage: int, segment: int) -> bool:
    """Whether forward and backward are one program, as `program.fuse` will find:
    the loss's, where each microbatch's backward follows its forward."""
    last = len(replica.stages) - 1
    if stage != last or segment != len(replica.stages[last].segments) - 1:
        return False
    if schedule is Schedule.LAYERED:
        return True
    return live_microbatches(schedule, replica)[last] == 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Within:
    """How programs of a stage's kind use memory."""

    profile: DeviceProfile
    """The kind."""

    layers: Sequence[Layer]
    """The chain's, with the figures of that kind."""

    temps: Temps = dataclasses.field(default_factory=Temps)
    """What was compiled before."""

    joined: bool = False
    """The stage's last segment runs forward and backward in one program, and keeps
    nothing beside it."""

    split: bool = False
    """The backward's weight parts wait, each with what its layer has handed it."""

    layered: bool = False
    """Each segment runs all microbatches before the next: those behind it keep nothing
    of any."""


class Alive(NamedTuple):
    """Activations of a stage on one device, in bytes."""

    kept: int
    """At full depth, with borders on their way."""

    transient: int
    """Inside one segment's backward."""

    drains: tuple[int, ...]
    """Both together while the last microbatch, or under ``layered`` the pass of all,
    goes backward through each segment: what sums of later ones find there."""


def stage_activations(
    chain: Chain,
    within: Within,
    stage: Stage,
    samples: int,
    live: int,
    handed: int = 0,
    *,
    all_live: bool = False,
) -> Alive:
    """What is alive on one device.

    Args:
      chain: the model.
      within: how the kind's programs use memory.
      stage: what is where.
      samples: of a lane's microbatch.
      live: microbatches that wait for their backward.
      handed: microbatches whose weight part waits.
      all_live: ``live`` are all there are: the first backward finds no accumulators of
        segments before it, and later ones find a microbatch less.
    """
    layers, last = within.layers, len(stage.segments) - 1
    start, stop = stage.layers
    edges = enter_bytes(chain, start, stage.dtype, samples) + enter_bytes(
        chain, stop, stage.dtype, samples
    )
    batch = batch_bytes(chain, start, stop, samples)
    flying = BORDERS_IN_FLIGHT * (edges + batch)
    kept = borders = last_border = passing = away = 0
    inside: list[int] = []
    gone_borders: list[int] = []
    for g in reversed(range(len(stage.segments))):
        first, past = stage.segment_layers(g)
        border = enter_bytes(chain, first, stage.dtype, samples)
        # The segment after this one has left its cotangents where its borders were.
        gone_borders.append(borders - last_border)
        last_border = 0 if stage.waits_on_host(g) else border
        if stage.waits_on_host(g):
            passing = max(passing, BORDERS_PASSING * border)
        borders += last_border
        # What later segments kept of this microbatch is gone by then.
        gone = kept * live if within.layered else kept
        inside.append(within_bytes(chain, within, stage, samples, g) - gone)
        if within.joined and g == last:
            continue
        here = segment_kept_bytes(chain, layers, first, past, stage, samples)
        if stage.keeps_on_host(g):
            away = max(away, RESIDUALS_PASSING * here)
        else:
            kept += here
    one = kept + borders + batch
    last_pass = inside
    if all_live and not handed and not within.layered:
        firsts = [stage.segment_layers(g)[0] for g in range(len(stage.segments))]
        of = stage.tensor, stage.dtype
        spans = [(first, stop) for first in reversed(firsts)]
        grads = [held_bytes(chain, span, *of).grads for span in spans]
        at_first = [a - grads[-1] + b for a, b in zip(inside, grads, strict=True)]
        after = [a - one for a in inside] if live > 1 else []
        last_pass = inside if live > 1 else at_first
        inside = [*at_first, *after]
    left = [one + x for x in last_pass]
    if within.layered:
        left = [
            live * (one - gone) + x
            for gone, x in zip(gone_borders, last_pass, strict=True)
        ]
    late = sum(
        handed_bytes(chain, layer, stage.dtype, stage.tensor, samples)
        for layer in layers[slice(*stage.layers)]
    )
    depth = live * one + handed * (late + batch)
    if stage.waits_on_host(0):  # so do cotangents that come to the last border
        passing = max(passing, BORDERS_PASSING * edges)
    beside = flying + passing + away
    drains = tuple(x + beside for x in reversed(left))
    return Alive(depth + beside, max(0, *inside), drains)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """What lies on a stage's device beyond ``BORDERS_IN_FLIGHT``, its turn not come."""

    left: int = 0
    """Borders from the stage before, which may be ahead."""

    right: int = 0
    """Cotangents: they come back for all microbatches that went on."""

    batch: int = 0
    """Batches: a Load brings them to all stages when the first needs them, one
    microbatch ahead."""

    @classmethod
    def of(cls, live: Sequence[int], s: int) -> "Waiting":
        """On stage ``s``, by the microbatches alive in each."""
        promised = live[s] + BORDERS_IN_FLIGHT
        return cls(
            left=max(0, live[s - 1] + 1 - promised) if s else 0,
            right=max(0, live[s] + 1 - BORDERS_IN_FLIGHT),
            batch=max(0, live[0] + 1 - promised),
        )


def waiting_bytes(
    chain: Chain,
    replica: Replica,
    s: int,
    live: Sequence[int],
    room_of: int | None = None,
) -> int:
    """The bytes of it.

    Args:
      chain: the model.
      replica: of the stage.
      s: the stage.
      live: microbatches alive in each.
      room_of: first layer of another stage, whose activations there make room for this
        one's cotangents, one by one.
    """
    stage, waiting = replica.stages[s], Waiting.of(live, s)
    samples = replica.microbatch_size // stage.lanes
    batch = waiting.batch * batch_bytes(chain, *stage.layers, samples)
    if stage.waits_on_host(0):
        return batch
    left, right = (enter_bytes(chain, x, stage.dtype, samples) for x in stage.layers)
    if room_of is not None:
        right = max(0, right - enter_bytes(chain, room_of, stage.dtype, samples))
    return waiting.left * left + waiting.right * right + batch


def makes_room(schedule: Schedule, replica: Replica, s: int) -> int | None:
    """Under ``layered``, the first layer of the next stage on the same devices.

    It goes backward first: a cotangent that comes to stage ``s`` is of a microbatch
    whose activation there is gone.
    """
    if schedule is not Schedule.LAYERED:
        return None
    stage = replica.stages[s]
    later = (x for x in replica.stages[s + 1 :] if x.devices == stage.devices)
    found = next(later, None)
    if found is None or found.waits_on_host(0) or found.lanes != stage.lanes:
        return None
    return found.layers[0]


def within_bytes(
    chain: Chain, within: Within, stage: Stage, samples: int, segment: int
) -> int:
    """Bytes inside one segment's backward: compiled if known, else by the model."""
    joined = within.joined and segment == len(stage.segments) - 1
    if within.temps.compiled and not (joined and within.split):
        key = segment_key(within, stage, samples, segment)
        if key in within.temps.compiled:
            return within.temps.compiled[key]
    return transient_bytes(chain, within, stage, samples, segment)


def segment_key(within: Within, stage: Stage, samples: int, segment: int) -> TempKey:
    """What compiled figures of a segment's program are found by."""
    start, stop = stage.segment_layers(segment)
    return TempKey.of(
        within.profile,
        within.layers[start:stop],
        stage.remat[start - stage.layers[0] : stop - stage.layers[0]],
        dtype=stage.dtype,
        tensor=stage.tensor,
        samples=samples,
        joined=within.joined and segment == len(stage.segments) - 1,
    )


def batch_bytes(chain: Chain, start: int, stop: int, samples: int) -> int:
    """Batch arrays that a run of layers reads, with each sample's weight and key."""
    names = {name for layer in chain.layers[start:stop] for name in layer.batch}
    arrays = sum(chain.batch[name].num_bytes for name in names if name in chain.batch)
    return (arrays + SAMPLE_BYTES) * samples


def segment_kept_bytes(
    chain: Chain,
    layers: Sequence[Layer],
    start: int,
    stop: int,
    stage: Stage,
    samples: int,
) -> int:
    """What one microbatch keeps of a segment, its own input left out."""
    policies = stage.remat[start - stage.layers[0] : stop - stage.layers[0]]
    kept = sum(
        kept_bytes(chain, layer, policy, stage.dtype, stage.tensor, samples)
        for layer, policy in zip(layers[start:stop], policies, strict=True)
    )
    if policies[0] in layers[start].reads_input:
        kept -= enter_bytes(chain, start, stage.dtype, samples)
    return max(0, kept)


def kept_bytes(
    chain: Chain, layer: Layer, policy: Remat, dtype: str, tensor: int, samples: int
) -> int:
    """What one microbatch keeps of a layer on one device."""
    whole = border_bytes_in(chain, layer.activation_bytes[policy] * samples, dtype)
    return int(whole * (1 - SPLIT_SHARE + SPLIT_SHARE / tensor)) + 1


def handed_bytes(
    chain: Chain, layer: Layer, dtype: str, tensor: int, samples: int
) -> int:
    """What one microbatch's weight part of a layer waits with on one device."""
    whole = border_bytes_in(chain, most_handed(chain, layer) * samples, dtype)
    return int(whole * (1 - SPLIT_SHARE + SPLIT_SHARE / tensor)) + 1


def most_handed(chain: Chain, layer: Layer) -> int:
    """As traced, for one sample; where unknown both operands of each weight's product,
    and without products twice what remat none keeps."""
    if layer.handed_bytes is not None:
        return layer.handed_bytes
    operands = sum(
        p.count * p.rows * (p.inner + p.columns) for p in layer.products if p.shared
    )
    if not operands:
        return 2 * layer.activation_bytes[Remat.NONE]
    return int(operands * ITEM_BYTES[chain.dtype])


def joined_bytes(
    chain: Chain, layer: Layer, policy: Remat, dtype: str, tensor: int, samples: int
) -> int:
    """What a program of both directions keeps of a layer on one device."""
    kept = min(layer.joined_bytes, layer.activation_bytes[policy])
    whole = border_bytes_in(chain, kept * samples, dtype)
    return int(whole * (1 - SPLIT_SHARE + SPLIT_SHARE / tensor)) + 1


def enter_bytes(chain: Chain, layer: int, dtype: str, samples: int) -> int:
    """What crosses the border before a layer."""
    if not 0 < layer < len(chain.layers):
        return 0
    return border_bytes_in(chain, chain.layers[layer - 1].border_bytes * samples, dtype)


def forward_bytes(
    chain: Chain, within: Within, stage: Stage, samples: int, segment: int
) -> int:
    """By the model: alive inside a segment's forward."""
    if within.profile.vendor != CPU:
        return most_forward(working(chain, within.layers, stage, samples, segment))
    of = Remat.NONE, stage.dtype, stage.tensor, samples
    layers = within.layers[slice(*stage.segment_layers(segment))]
    in_full = max(kept_bytes(chain, layer, *of) for layer in layers)
    return round(temp_factor(within.profile, stage.dtype) * in_full)


def transient_bytes(
    chain: Chain, within: Within, stage: Stage, samples: int, segment: int
) -> int:
    """By the model: alive inside a segment's backward, or its program of both ways."""
    start, stop = stage.segment_layers(segment)
    joined = within.joined and segment == len(stage.segments) - 1
    if within.profile.vendor != CPU:
        alive = working(chain, within.layers, stage, samples, segment)
        waiting = waiting_layers(within.profile)
        if not joined:
            return most_apart(alive, waiting)
        of = stage.dtype, stage.tensor, samples
        handed = [handed_bytes(chain, x, *of) for x in within.layers[start:stop]]
        return most_joined(alive, waiting, handed if within.split else ())
    of = stage.dtype, stage.tensor, samples
    layers = within.layers
    # One layer in full (recomputed, or its cotangents), and the segment's gradients
    # before they are added to the accumulators.
    grads = held_bytes(chain, (start, stop), stage.tensor, stage.dtype).trained
    full = [working_bytes(chain, layer, *of) for layer in layers[start:stop]]
    kept = [0] * len(full)
    if joined:  # the layer that is in full was kept in part before
        kept = [
            joined_bytes(chain, layers[i], stage.remat[i - stage.layers[0]], *of)
            for i in range(start, stop)
        ]
    more = max(max(0, a - b) for a, b in zip(full, kept, strict=True))
    factor = temp_factor(within.profile, stage.dtype)
    return round(factor * (grads + sum(kept) + more))


def working_bytes(
    chain: Chain, layer: Layer, dtype: str, tensor: int, samples: int
) -> int:
    """What a layer's own backward has alive beside what was kept for it."""
    border = border_bytes_in(chain, layer.border_bytes * samples, dtype)
    if not layer.backward:  # its forward, of which nothing is kept
        return border_bytes_in(chain, layer.joined_bytes * samples, dtype) + border
    return kept_bytes(chain, layer, Remat.NONE, dtype, tensor, samples) + 2 * border


class Held(NamedTuple):
    """Bytes of some layers' parameters on one device."""

    handed: int
    """As the layers are handed them."""

    trained: int
    """Of these, parameters that train."""

    grads: int
    """Their gradients in float32."""


def held_bytes(chain: Chain, layers: tuple[int, int], tensor: int, dtype: str) -> Held:
    """Of some layers' parameters on one device.

    A leaf that one of them is handed uncast is held as it is for all of them.
    """
    return _held_bytes(Same(chain), layers, tensor, dtype)


@functools.lru_cache(maxsize=2**13)
def _held_bytes(of: Same, layers: tuple[int, int], tensor: int, dtype: str) -> Held:
    chain = of.chain
    uses = chain.layers[slice(*layers)]
    names = {name for layer in uses for name in layer.groups}
    uncast = {leaf for layer in uses for leaf in layer.uncast}
    handed = trained = grads = 0
    for group in chain.groups:
        if group.name not in names:
            continue
        for leaf in group.leaves:
            size = leaf.size if leaf.tensor_dim is None else -(-leaf.size // tensor)
            item = ITEM_BYTES[leaf.dtype if leaf.id in uncast else dtype]
            handed += size * item
            if leaf.trainable:
                trained += size * item
                grads += size * ITEM_BYTES["float32"]
    return Held(handed, trained, grads)


def layer_params(chain: Chain, tensor: int) -> Sequence[int]:
    """Parameters of each layer on one device that train: those with a gradient and a
    state. A tied group counts at each user."""
    sizes = {
        group.name: sum(
            leaf.size if leaf.tensor_dim is None else -(-leaf.size // tensor)
            for leaf in group.leaves
            if leaf.trainable
        )
        for group in chain.groups
    }
    return [sum(sizes[name] for name in layer.groups) for layer in chain.layers]
