"""How many microbatches a stage holds at once, and the bytes they keep alive."""

from collections.abc import Sequence

from hexijax.costs.compute import border_bytes_in
from hexijax.costs.rates import SPLIT_SHARE
from hexijax.layers.chain import ITEM_BYTES, Chain, Layer, Remat
from hexijax.plan.plan import Replica, Schedule, Stage
from hexijax.program.schedules import Way, schedule_replica

BORDERS_IN_FLIGHT = 2
"""Of each border: one being used and one arriving."""


def live_microbatches(schedule: Schedule, replica: Replica) -> list[int]:
    """For each stage, the most microbatches between their forward and their backward.

    1F1B and zero-bubble: stage k of S holds min(S - k, M); GPipe all M.
    """
    num_stages, num_microbatches = len(replica.stages), replica.microbatches
    if schedule is Schedule.GPIPE:
        return [num_microbatches] * num_stages
    if schedule is Schedule.INTERLEAVED:
        return _play(replica)
    return [min(num_stages - k, num_microbatches) for k in range(num_stages)]


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


def stage_activations(
    chain: Chain,
    layers: Sequence[Layer],
    stage: Stage,
    samples: int,
    live: int,
    handed: int = 0,
) -> tuple[int, int]:
    """Bytes on one device: kept at full depth, and inside one segment's backward.

    ``layers`` are the chain's, with the figures of the stage's kind. ``live``
    microbatches wait for their backward, ``handed`` for its weight part.
    """
    kept = sum(
        kept_bytes(chain, layer, policy, stage.dtype, stage.tensor, samples)
        for layer, policy in zip(layers[slice(*stage.layers)], stage.remat, strict=True)
    )
    borders, transient = 0, 0
    for g in range(len(stage.segments)):
        start, stop = stage.segment_layers(g)
        borders += enter_bytes(chain, start, stage.dtype, samples)
        transient = max(
            transient,
            segment_transient_bytes(chain, layers, start, stop, stage, samples),
        )
    edges = enter_bytes(chain, stage.layers[0], stage.dtype, samples) + enter_bytes(
        chain, stage.layers[1], stage.dtype, samples
    )
    batch = sum(array.num_bytes for array in chain.batch.values()) * samples
    flying = BORDERS_IN_FLIGHT * (edges + batch)
    late = sum(
        handed_bytes(chain, layer, stage.dtype, stage.tensor, samples)
        for layer in layers[slice(*stage.layers)]
    )
    depth = live * (kept + borders + batch) + handed * (late + batch)
    return depth + flying, transient


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


def enter_bytes(chain: Chain, layer: int, dtype: str, samples: int) -> int:
    """What crosses the border before a layer."""
    if not 0 < layer < len(chain.layers):
        return 0
    return border_bytes_in(chain, chain.layers[layer - 1].border_bytes * samples, dtype)


def segment_transient_bytes(
    chain: Chain,
    layers: Sequence[Layer],
    start: int,
    stop: int,
    stage: Stage,
    samples: int,
) -> int:
    """One layer in full (recomputed, or its cotangents), and the segment's gradients
    before they are added to the accumulators."""
    grads = sum(layer_params(chain, stage.tensor)[start:stop]) * ITEM_BYTES[stage.dtype]
    return grads + max(
        working_bytes(chain, layers[i], stage.dtype, stage.tensor, samples)
        for i in range(start, stop)
    )


def working_bytes(
    chain: Chain, layer: Layer, dtype: str, tensor: int, samples: int
) -> int:
    """What a layer's own backward has alive beside what was kept for it."""
    border = border_bytes_in(chain, layer.border_bytes * samples, dtype)
    return kept_bytes(chain, layer, Remat.NONE, dtype, tensor, samples) + 2 * border


def layer_params(chain: Chain, tensor: int) -> Sequence[int]:
    """Parameters of each layer on one device; a tied group counts at each user."""
    sizes = {
        group.name: sum(
            leaf.size if leaf.tensor_dim is None else -(-leaf.size // tensor)
            for leaf in group.leaves
        )
        for group in chain.groups
    }
    return [sum(sizes[name] for name in layer.groups) for layer in chain.layers]
