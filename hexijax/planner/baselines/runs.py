"""What a run of layers costs as one stage, and the remat it fits with.

    chain, mesh shape, samples -> Runs -> seconds and remat of layers[first:stop]

Remat is one policy a stage, the fastest that fits, as the published systems have it.
Memory follows the terms of ``costs.memory``; the judge has the last word on it. Every
figure can be asked for one run, or for all at once for dynamic programming.

Arrays: L layers, F first layer, S the one past the last, P policies.
"""

import dataclasses
import functools
import itertools
import math
from types import EllipsisType

import numpy as np
from jaxtyping import Float, Int

from hexijax.costs.activations import (
    BORDERS_IN_FLIGHT,
    enter_bytes,
    kept_bytes,
    layer_params,
    working_bytes,
)
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.costs.memory import (
    GRAD_BYTES,
    STATE_BYTES,
    alone_bytes,
    flying_bytes,
    shard_size,
)
from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import ITEM_BYTES, Chain, Remat
from hexijax.program.buckets import ALONE_SIZE, SHARED_SIZE

At = tuple[int, int] | EllipsisType
"""One run, (first, stop), or all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a stage holds and does beside its layers."""

    live: int
    """Microbatches between their forward and their backward."""

    members: int
    """Replicas, over which gradients are summed and state is spread."""

    homes: int
    """Devices over which each parameter's state is spread; 0: it lies elsewhere."""

    moments: int
    """fp32 arrays of the optimizer for each parameter."""

    per_segment: int | None
    """Most layers of a segment."""

    policies: tuple[Remat, ...]
    """Remat to choose from, the fastest first."""

    budget_bytes: int
    """What one device has."""


class Parameters:
    """Parameters of every run of layers at one tensor degree."""

    def __init__(self, chain: Chain, tensor: int) -> None:
        sizes_L = np.array(layer_params(chain, tensor), float)
        self.largest_FS = _span_max(sizes_L)
        self.sums_FS = _span_sums(sizes_L)
        # A tied group counts at each user; where two of them meet it is held once.
        first_F = np.arange(len(sizes_L))[:, None]
        stop_S = np.arange(len(sizes_L) + 1)[None, :]
        for group in chain.groups:
            for a, b in zip(group.layers, group.layers[1:], strict=False):
                both_FS = (first_F <= a) & (b < stop_S)
                self.sums_FS -= both_FS * shard_size(group, tensor)


class Runs:
    """Figures of every run of layers on one mesh for one microbatch size."""

    def __init__(
        self,
        chain: Chain,
        shape: MeshShape,
        samples: int,
        parameters: Parameters,
        whole: Parameters,
    ) -> None:
        self._shape, self._parameters, self._whole = shape, parameters, whole
        self._item_bytes = ITEM_BYTES[shape.dtype]
        dtype, tensor = shape.dtype, shape.tensor
        layers = chain.layers_under(fused_attention=shape.fused_attention)
        times = layer_times(chain, shape, samples)
        self._seconds_FS = _span_sums(
            np.array([t.forward_s + t.backward_s for t in times])
        )
        self._recompute_s = {
            policy: _span_sums(np.array([t.added_s(policy) for t in times]))
            for policy in Remat
        }
        self._kept = {
            policy: _span_sums(
                np.array(
                    [
                        kept_bytes(chain, x, policy, dtype, tensor, samples)
                        for x in layers
                    ],
                    float,
                )
            )
            for policy in Remat
        }
        self._working_FS = _span_max(
            np.array(
                [working_bytes(chain, x, dtype, tensor, samples) for x in layers], float
            )
        )
        enter_S = np.array(
            [enter_bytes(chain, i, dtype, samples) for i in range(len(layers) + 1)],
            float,
        )
        self._edges_FS = enter_S[:-1, None] + enter_S[None, :]
        self._enter_max_FS = _span_max(enter_S[:-1])
        self._batch_bytes = samples * sum(a.num_bytes for a in chain.batch.values())
        self._length_FS = _lengths(len(layers))
        self.table = functools.cache(self._table)
        self.stage = functools.cache(self._stage)

    def _stage(self, span: tuple[int, int], load: Load) -> tuple[float, Remat] | None:
        """Forward and backward of one microbatch, and the remat; None: no room."""
        fixed_bytes = float(self._fixed_bytes(span, load))
        for policy in load.policies:
            if fixed_bytes + load.live * self._kept[policy][span] <= load.budget_bytes:
                return float(self._run_s(span, policy, load)), policy
        return None

    def _table(self, load: Load) -> Float[np.ndarray, "layers stops"]:
        """The seconds of ``stage`` for all runs; infinite where there is no room."""
        room_FS = load.budget_bytes - self._fixed_bytes(..., load)
        best_FS = np.full(self._length_FS.shape, np.inf)
        for policy in reversed(load.policies):
            fits_FS = (load.live * self._kept[policy] <= room_FS) & (
                self._length_FS > 0
            )
            best_FS = np.where(fits_FS, self._run_s(..., policy, load), best_FS)
        return best_FS

    def _run_s(self, at: At, policy: Remat, load: Load) -> np.ndarray:
        calls_s = 2 * CALL_S * self._num_segments(at, load)
        return self._seconds_FS[at] + self._recompute_s[policy][at] + calls_s

    def _num_segments(self, at: At, load: Load) -> Int[np.ndarray, "..."]:
        length = np.maximum(self._length_FS[at], 1)
        if load.per_segment is None:
            return np.ones_like(length)
        return -(-length // load.per_segment)

    def stateless_bytes(self, span: tuple[int, int], load: Load, policy: Remat) -> int:
        """All that a device holds but the state."""
        bare = dataclasses.replace(load, homes=0)
        return int(self._fixed_bytes(span, bare) + load.live * self._kept[policy][span])

    def _fixed_bytes(self, at: At, load: Load) -> np.ndarray:
        """What does not depend on remat; the terms of ``costs.memory``."""
        item = self._item_bytes
        params = self._parameters.sums_FS[at]
        largest = self._parameters.largest_FS[at]
        segment = params
        if load.per_segment is not None:
            segment = np.minimum(params, largest * load.per_segment)
        borders = self._num_segments(at, load) * self._enter_max_FS[at]
        depth = (
            load.live * (borders + self._batch_bytes)
            + BORDERS_IN_FLIGHT * (self._edges_FS[at] + self._batch_bytes)
            + segment * item
            + self._working_FS[at]
        )
        limit = ALONE_SIZE if load.members == 1 else SHARED_SIZE
        bucket = np.maximum(largest, np.minimum(params, limit))
        at_home = bucket / load.homes if load.homes else np.zeros_like(bucket)
        if load.members == 1:
            flying = alone_bytes(1, 1, item, self._shape.lanes) * bucket
        else:
            flying = flying_bytes(0, 1, load.members, item) * bucket
            flying = flying + flying_bytes(1, 0, load.members, item) * at_home
        resident = params * (item + GRAD_BYTES)
        if load.homes:
            held = self._whole.sums_FS[at] / load.homes
            resident = resident + held * STATE_BYTES * (1 + load.moments)
        return resident + depth + flying


class RunCosts:
    """Runs of one chain, by mesh shape and samples; equal shapes share a key."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._parameters = functools.cache(lambda tensor: Parameters(chain, tensor))
        self._runs: dict[tuple[int, int], Runs] = {}

    def runs(self, key: int, shape: MeshShape, samples: int) -> Runs:
        """Of a mesh for one lane's microbatch."""
        if (key, samples) not in self._runs:
            self._runs[key, samples] = Runs(
                self._chain,
                shape,
                samples,
                self._parameters(shape.tensor),
                self._parameters(1),
            )
        return self._runs[key, samples]


def even_spans(chain: Chain, num_stages: int) -> tuple[tuple[int, int], ...] | None:
    """Blocks spread evenly; what stands before and after them stays at the ends.

    Blocks are the longest stretch of equal layers. None: fewer layers than stages.
    """
    num_layers = len(chain.layers)
    if num_stages > num_layers:
        return None
    start, stop = _blocks(chain)
    if stop - start < num_stages:
        start, stop = 0, num_layers
    edges = [
        start + math.floor(i * (stop - start) / num_stages)
        for i in range(num_stages + 1)
    ]
    edges[0], edges[-1] = 0, num_layers
    return tuple(itertools.pairwise(edges))


def _blocks(chain: Chain) -> tuple[int, int]:
    best, start = (0, 0), 0
    for i, layer in enumerate(chain.layers):
        if layer.signature != chain.layers[start].signature:
            start = i
        if i + 1 - start > best[1] - best[0]:
            best = (start, i + 1)
    return best


def segment_lengths(num_layers: int, most: int | None) -> tuple[int, ...]:
    """As few segments of at most ``most`` layers as there can be, nearly equal."""
    count = 1 if most is None else -(-num_layers // most)
    edges = [i * num_layers // count for i in range(count + 1)]
    return tuple(b - a for a, b in itertools.pairwise(edges))


def _lengths(num_layers: int) -> Int[np.ndarray, "layers stops"]:
    """Layers of each run; none or negative where the run is empty."""
    return np.arange(num_layers + 1)[None, :] - np.arange(num_layers)[:, None]


def _span_sums(values_L: np.ndarray) -> Float[np.ndarray, "layers stops"]:
    sums_S = np.concatenate([[0.0], np.cumsum(values_L)])
    return sums_S[None, :] - sums_S[:-1, None]


def _span_max(values_L: np.ndarray) -> Float[np.ndarray, "layers stops"]:
    """The largest value of each run; 0 where it is empty."""
    count = len(values_L)
    inside_FL = np.triu(np.broadcast_to(values_L, (count, count)))
    most_FL = np.maximum.accumulate(inside_FL, axis=1)
    return np.concatenate([np.zeros((count, 1)), most_FL], axis=1)
