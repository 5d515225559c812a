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
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

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
from hexijax.costs.rates import CALL_S
from hexijax.costs.sums import (
    GRAD_BYTES,
    GROUPS_IN_FLIGHT,
    STATE_BYTES,
    alone_bytes,
    flying_bytes,
    shard_size,
)
from hexijax.layers.chain import ITEM_BYTES, Chain, Group, Remat
from hexijax.program.buckets import ALONE_SIZE, shared_size

At = tuple[int, int] | EllipsisType
"""One run, (first, stop), or all of them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Load:
    """What a stage holds and does beside its layers; made once by its maker."""

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


def of_one_lane(shape: MeshShape) -> MeshShape:
    """What layer times depend on: fewer shapes, so fewer to price."""
    link = shape.link if shape.tensor > 1 else None
    return dataclasses.replace(shape, lanes=1, link=link, usable_memory_bytes=0)


class Sums:
    """A figure of every layer, summed over runs; ``[first, stop]`` or ``[...]``."""

    def __init__(self, values_L: Sequence[float]) -> None:
        self._sums_S = np.concatenate([[0.0], np.cumsum(values_L)])
        self._sums = self._sums_S.tolist()
        self._all_FS: np.ndarray | None = None

    def __getitem__(self, at: At) -> Any:
        if at is not ...:
            return self._sums[at[1]] - self._sums[at[0]]
        if self._all_FS is None:
            self._all_FS = self._sums_S[None, :] - self._sums_S[:-1, None]
        return self._all_FS


class Peaks:
    """The largest value of a figure in runs; 0 where one is empty."""

    def __init__(self, values_L: Sequence[float]) -> None:
        self._values_L = values_L
        self._all_FS: np.ndarray | None = None

    def __getitem__(self, at: At) -> Any:
        if at is not ...:
            return max(self._values_L[at[0] : at[1]], default=0.0)
        if self._all_FS is None:
            count = len(self._values_L)
            inside_FL = np.triu(np.broadcast_to(self._values_L, (count, count)))
            most_FL = np.maximum.accumulate(inside_FL, axis=1)
            self._all_FS = np.concatenate([np.zeros((count, 1)), most_FL], axis=1)
        return self._all_FS


class Parameters:
    """Parameters that train, of every run of layers at one tensor degree."""

    def __init__(self, chain: Chain, tensor: int) -> None:
        trained = [group for group in chain.groups if group.trainable]
        frozen = [group for group in chain.groups if not group.trainable]
        sizes_L = [float(size) for size in layer_params(chain, tensor)]
        self.largest = Peaks(sizes_L)
        self.sums_FS = _sums(trained, sizes_L, tensor)
        names = {group.name: shard_size(group, tensor) for group in frozen}
        frozen_L = [
            float(sum(names.get(name, 0) for name in layer.groups))
            for layer in chain.layers
        ]
        self.frozen_FS = _sums(frozen, frozen_L, tensor)
        """Those that do not train."""


def _sums(
    groups: Sequence[Group], sizes_L: Sequence[float], tensor: int
) -> Float[np.ndarray, "layers stops"]:
    """Of every run of layers."""
    sums_FS = Sums(sizes_L)[...].copy()
    # A tied group counts at each user; where two of them meet it is held once.
    first_F = np.arange(len(sizes_L))[:, None]
    stop_S = np.arange(len(sizes_L) + 1)[None, :]
    for group in groups:
        for a, b in zip(group.layers, group.layers[1:], strict=False):
            both_FS = (first_F <= a) & (b < stop_S)
            sums_FS -= both_FS * shard_size(group, tensor)
    return sums_FS


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
        times = layer_times(chain, of_one_lane(shape), samples)
        self._seconds = Sums([t.forward_s + t.backward_s for t in times])
        self._recompute_s = {
            policy: Sums([t.added_s(policy) for t in times]) for policy in Remat
        }
        unlike = {x.signature: x for x in layers}  # few, and most of their figures too
        of = dtype, tensor, samples
        self._kept: dict[Remat, Sums] = {}
        for policy in Remat:
            kept = {n: kept_bytes(chain, x, policy, *of) for n, x in unlike.items()}
            self._kept[policy] = Sums([kept[x.signature] for x in layers])
        working = {n: float(working_bytes(chain, x, *of)) for n, x in unlike.items()}
        self._working = Peaks([working[x.signature] for x in layers])
        enter_S = [
            float(enter_bytes(chain, i, dtype, samples)) for i in range(len(layers) + 1)
        ]
        self._enter_S = enter_S
        self._enter_max = Peaks(enter_S[:-1])
        self._batch_bytes = samples * sum(a.num_bytes for a in chain.batch.values())
        self._num_layers = len(layers)
        self.table = functools.cache(self._table)
        self.reach = functools.cache(self._reach)
        self.stage = functools.cache(self._stage)

    @functools.cached_property
    def _length_FS(self) -> Int[np.ndarray, "layers stops"]:
        return _lengths(self._num_layers)

    def _edges(self, at: At) -> Any:
        if at is not ...:
            return self._enter_S[at[0]] + self._enter_S[at[1]]
        enter_S = np.array(self._enter_S)
        return enter_S[:-1, None] + enter_S[None, :]

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
            fits_FS = (load.live * self._kept[policy][...] <= room_FS) & (
                self._length_FS > 0
            )
            best_FS = np.where(fits_FS, self._run_s(..., policy, load), best_FS)
        return best_FS

    def _reach(self, load: Load) -> list[int]:
        """By first layer, the furthest stop of a run that starts there or before."""
        stops_S = np.arange(self._num_layers + 1)
        ends_FS = np.where(np.isfinite(self.table(load)), stops_S, 0)
        return np.maximum.accumulate(ends_FS.max(axis=1)).tolist()

    def _run_s(self, at: At, policy: Remat, load: Load) -> Any:
        calls_s = 2 * CALL_S * self._num_segments(at, load)
        return self._seconds[at] + self._recompute_s[policy][at] + calls_s

    def _num_segments(self, at: At, load: Load) -> Any:
        if load.per_segment is None:
            return 1
        if at is not ...:
            return -(-(at[1] - at[0]) // load.per_segment)
        return -(-np.maximum(self._length_FS, 1) // load.per_segment)

    def stateless_bytes(self, span: tuple[int, int], load: Load, policy: Remat) -> int:
        """All that a device holds but the state."""
        bare = dataclasses.replace(load, homes=0)
        return int(self._fixed_bytes(span, bare) + load.live * self._kept[policy][span])

    def _fixed_bytes(self, at: At, load: Load) -> Any:
        """What does not depend on remat; the terms of ``costs.memory``."""
        least, most = (min, max) if at is not ... else (np.minimum, np.maximum)
        item = self._item_bytes
        params = self._parameters.sums_FS[at]
        largest = self._parameters.largest[at]
        segment = params
        if load.per_segment is not None:
            segment = least(params, largest * load.per_segment)
        borders = self._num_segments(at, load) * self._enter_max[at]
        depth = (
            load.live * (borders + self._batch_bytes)
            + BORDERS_IN_FLIGHT * (self._edges(at) + self._batch_bytes)
            + segment * item
            + self._working[at]
        )
        all_params = int(self._whole.sums_FS[0, -1])
        limit = ALONE_SIZE if load.members == 1 else shared_size(all_params)
        bucket = most(largest, least(params, limit))
        if load.members == 1:
            flying = alone_bytes(1, 1, item, self._shape.lanes) * bucket
        else:
            share = 1 / load.homes if load.homes else 0.0
            home = flying_bytes(1, 0, load.members, item) * share
            flying = (flying_bytes(0, 1, load.members, item) + home) * bucket
            if load.per_segment is None:  # its only program has ended by then
                staying = max(item * (1 + share), GRAD_BYTES * load.members * share)
                more = GROUPS_IN_FLIGHT * staying * bucket
                flying = most(flying - depth, more)
        resident = params * (item + GRAD_BYTES) + self._parameters.frozen_FS[at] * item
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
