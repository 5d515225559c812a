"""The peak a plan promises on each device: what must fit before anything is compiled.

    plan, chain, cluster -> plan_memory -> device -> MemoryParts

Resident all step: parameters, gradient accumulators, state. On top come live
activations, one segment's transients, and groups whose gradients are being summed:
these begin when the last microbatch has left their segments, in the room of what it had
there. *Usable* memory leaves the framework's context out already, so it is not counted
here. Every term rounds up: a promise is kept when the measured peak stays below it.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
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
from hexijax.costs.parts import MemoryParts
from hexijax.costs.sums import (
    MOMENTS,
    PASSES,
    Sums,
    grown_bytes,
    landing_bytes,
    state_and_sums,
)
from hexijax.costs.temp import Temps
from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import (
    Place,
    Plan,
    Replica,
    Schedule,
    Stage,
    UpdateOrder,
    stage_place,
)

GAPS_BYTES, GAPS_SHARE = 448 * 2**20, 1 / 40
"""What an accelerator's allocator gives more than was asked for, the lesser of both.
XLA's cuts a free piece only where 128 MiB or half of it would be left; over 28 peaks of
two H200s that came to 407 MiB and 1.7% at most (docs/performance.md)."""


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
    found, drains = _of_stages(plan, chain, cluster, temps)
    stages = dict(plan.stages())
    on_set = collections.Counter(stage.devices for stage in stages.values())
    for place, sums in state_and_sums(plan, chain, moments, whole_leaves).items():
        stage = stages.get(place)
        devices = stage.devices if stage else (place,)
        made: dict[MemoryParts, MemoryParts] = {}  # most devices of a mesh are alike
        for device in devices:
            held = found.get(device, MemoryParts())
            if held not in made and stage and on_set[devices] == 1:
                made[held] = _beside_sums(held, sums, stage, drains[place], plan)
            elif held not in made:
                flying = MemoryParts(sync_bytes=sums.flying_bytes)
                made[held] = _sum(held, sums.parts + flying)
            found[device] = made[held]
    return {
        name: parts if cluster.device(name).profile.vendor == CPU else _gapped(parts)
        for name, parts in found.items()
    }


def _of_stages(
    plan: Plan, chain: Chain, cluster: Cluster, temps: Temps | None
) -> tuple[dict[str, MemoryParts], dict[Place, Sequence[int]]]:
    """What devices hold of the stages that they compute, and ``StageParts.drains``."""
    found: dict[str, MemoryParts] = {}
    alike: dict[object, StageParts] = {}
    drains: dict[Place, Sequence[int]] = {}
    for r, replica in enumerate(plan.replicas):
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
                parts, drained = stage_parts(
                    chain, within, replica, stage, live[s], handed[s]
                )
                waiting = waiting_bytes(chain, replica, s, live, room_of)
                if plan.schedule is Schedule.LAYERED:  # counted by bucket and pass
                    parts = dataclasses.replace(parts, grads_bytes=0)
                    drained = [x + waiting for x in drained]
                parts += MemoryParts(activations_bytes=waiting)
                alike[key] = StageParts(parts, drained)
            parts, drains[stage_place(r, s)] = alike[key]
            for device in stage.devices:
                found[device] = _sum(found.get(device, MemoryParts()), parts)
    return found, drains


def _beside_sums(
    held: MemoryParts, sums: Sums, stage: Stage, drains: Sequence[int], plan: Plan
) -> MemoryParts:
    """A device of the only stage on its mesh, sums and activations not at their most
    at once."""
    alive = held.activations_bytes + held.transient_bytes
    more = sums.flying_bytes
    if sums.grows:
        both = grown_bytes(sums.grows, drains)
        held = _fewer(held, alive + sum(sums.grows) - both)
    elif plan.order is UpdateOrder.FIFO and drains:
        staying = max((each.staying for each in sums.landing), default=0)
        more = max(staying, landing_bytes(sums.landing, stage, drains) - alive)
    return _sum(held, sums.parts + MemoryParts(sync_bytes=more))


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


def _fewer(parts: MemoryParts, num_bytes: int) -> MemoryParts:
    """With so many bytes of activations less: those kept first."""
    kept = min(num_bytes, parts.activations_bytes)
    within = min(num_bytes - kept, parts.transient_bytes)
    return dataclasses.replace(
        parts,
        activations_bytes=parts.activations_bytes - kept,
        transient_bytes=parts.transient_bytes - within,
    )


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
        split=plan.schedule is Schedule.ZERO_BUBBLE,
        layered=plan.schedule is Schedule.LAYERED,
    )


class StageParts(NamedTuple):
    """A device of a stage."""

    parts: MemoryParts
    """Without the state it is home of."""

    drains: Sequence[int]
    """``Alive.drains``; none where weight parts wait beside the last microbatch."""


def stage_parts(
    chain: Chain,
    within: Within,
    replica: Replica,
    stage: Stage,
    live: int,
    handed: int = 0,
) -> StageParts:
    """What a device of a stage holds, and what is left while the step ends."""
    held = held_bytes(chain, stage.layers, stage.tensor, stage.dtype)
    params, passing = params_bytes(chain, stage, held.handed)
    samples = replica.microbatch_size // stage.lanes
    kept, transient, drains = stage_activations(
        chain,
        within,
        stage,
        samples,
        live,
        handed,
        all_live=replica.microbatches <= live,
    )
    parts = MemoryParts(
        params_bytes=params,
        passes_bytes=passing,
        grads_bytes=held.grads,
        activations_bytes=kept,
        transient_bytes=transient,
        host_bytes=replica.microbatches * waiting_on_host(chain, stage, samples)
        + live * residuals_on_host(chain, within, stage, samples)
        + resting_bytes(chain, stage),
    )
    return StageParts(parts, () if handed else drains)


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
