"""What any run of layers costs as one stage: seconds, and the remat that makes it fit.

    Chain, MeshShape, Load -> SpanTable -> seconds(first, stop), remat(first, stop)

Memory is an upper bound of ``costs.memory``'s promise that can be summed layer by
layer. Where remat none does not fit, the first layers of the stage are moved to the
next policy until it does, so a stage has at most two policies. O(L^2 log L) for L
layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from itertools import accumulate

from hexijax.costs.activations import (
    BORDERS_IN_FLIGHT,
    enter_bytes,
    kept_bytes,
    layer_params,
    working_bytes,
)
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.costs.memory import GRAD_BYTES, STATE_BYTES
from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import ITEM_BYTES, Chain, Remat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a stage is asked to hold and do, whatever its layers."""

    samples: int
    """Of a microbatch, on one lane."""

    live: int
    """Microbatches between their forward and their backward."""

    state_devices: int
    """Devices over which each parameter's state is spread."""

    moments: int
    """fp32 arrays of the optimizer for each parameter."""

    per_segment: int | None
    """Most layers of a segment."""

    remat: tuple[Remat, ...]
    """Policies to choose from, from the fastest to the smallest."""

    budget_bytes: int
    """What one device has for this stage."""


class SpanTable:
    """Seconds and remat of every run of layers on one mesh under one load."""

    def __init__(self, chain: Chain, mesh: MeshShape, load: Load) -> None:
        self._num_layers = len(chain.layers)
        self._load = load
        self._mesh = mesh
        self._item = ITEM_BYTES[mesh.dtype]
        self._params = layer_params(chain, mesh.tensor)
        self._params_sum = _sums(self._params)
        self._whole_sum = _sums(layer_params(chain, 1))
        self._working = [
            working_bytes(chain, layer, mesh.dtype, mesh.tensor, load.samples)
            for layer in chain.layers
        ]
        self._enter = [
            enter_bytes(chain, i, mesh.dtype, load.samples)
            for i in range(self._num_layers + 1)
        ]
        self._batch = load.samples * sum(a.num_bytes for a in chain.batch.values())
        times = layer_times(chain, mesh, load.samples)
        self._base_s = _sums(t.forward_s + t.backward_s for t in times)
        self._recompute_s = [
            _sums(t.recompute_s[policy] for t in times) for policy in load.remat
        ]
        self._kept = [
            _sums(
                kept_bytes(chain, layer, p, mesh.dtype, mesh.tensor, load.samples)
                for layer in chain.layers
            )
            for p in load.remat
        ]
        # seconds[first][stop - first - 1], and how far the remat goes
        self._seconds: list[list[float]] = []
        self._choice: list[list[tuple[int, int]]] = []
        for first in range(self._num_layers):
            self._row(first)

    def seconds(self, first: int, stop: int) -> float:
        """Forward and backward of one microbatch; infinite where it does not fit."""
        return self._seconds[first][stop - first - 1]

    def remat(self, first: int, stop: int) -> tuple[Remat, ...]:
        """One policy a layer."""
        policy, count = self._choice[first][stop - first - 1]
        later = self._load.remat[max(policy - 1, 0)]
        return (self._load.remat[policy],) * count + (later,) * (stop - first - count)

    def least_bytes(self, first: int, stop: int) -> int:
        """What one device needs for these layers under the smallest policy."""
        kept = self._kept[-1][stop] - self._kept[-1][first]
        return self._fixed(first, stop) + int(self._load.live * kept)

    def _row(self, first: int) -> None:
        """All runs that start at ``first``."""
        seconds: list[float] = []
        choice: list[tuple[int, int]] = []
        for stop in range(first + 1, self._num_layers + 1):
            found = self._choose(first, stop, self._fixed(first, stop))
            choice.append(found or (0, 0))
            seconds.append(self._time_s(first, stop, *found) if found else math.inf)
        self._seconds.append(seconds)
        self._choice.append(choice)

    def _fixed(self, first: int, stop: int) -> int:
        """Bytes that do not depend on remat."""
        load, item = self._load, self._item
        params = int(self._params_sum[stop] - self._params_sum[first])
        whole = self._whole_sum[stop] - self._whole_sum[first]
        calls = self._num_segments(first, stop)
        largest = max(self._params[first:stop])
        segment = min(params, largest * (load.per_segment or params))
        home = -(-whole // load.state_devices)
        resident = params * (item + GRAD_BYTES) + home * STATE_BYTES * (
            1 + load.moments
        )
        borders = calls * max(self._enter[first:stop]) + self._batch
        edges = self._enter[first] + self._enter[stop] + self._batch
        depth = (
            load.live * borders
            + BORDERS_IN_FLIGHT * edges
            + segment * item
            + max(self._working[first:stop])
        )
        sync = home * (GRAD_BYTES + item) + largest * GRAD_BYTES
        return int(resident + max(depth, sync))

    def _choose(self, first: int, stop: int, fixed: int) -> tuple[int, int] | None:
        """Index of a policy, and how many of the first layers take it; the rest take
        the policy before. None where even the smallest is too much."""
        room = self._load.budget_bytes - fixed
        kept = self._kept

        def need(policy: int, count: int) -> float:
            middle, before = first + count, kept[max(policy - 1, 0)]
            here = kept[policy][middle] - kept[policy][first]
            return self._load.live * (here + before[stop] - before[middle])

        for policy in range(len(kept)):
            if need(policy, stop - first) <= room:
                if policy == 0:
                    return 0, stop - first
                enough = functools.partial(_fits, need, policy, room)
                return policy, _least(stop - first, enough)
        return None

    def _time_s(self, first: int, stop: int, policy: int, count: int) -> float:
        middle = first + count
        here, later = self._recompute_s[policy], self._recompute_s[max(policy - 1, 0)]
        recompute_s = here[middle] - here[first] + later[stop] - later[middle]
        calls_s = 2 * CALL_S * self._num_segments(first, stop)
        return self._base_s[stop] - self._base_s[first] + recompute_s + calls_s

    def _num_segments(self, first: int, stop: int) -> int:
        most = self._load.per_segment
        return 1 if most is None else -(-(stop - first) // most)


def _sums(values: Iterable[float]) -> list[float]:
    """Sums of the first 0, 1, 2, ... values."""
    return list(accumulate(values, initial=0.0))


def _fits(
    need: Callable[[int, int], float], policy: int, room: float, count: int
) -> bool:
    return need(policy, count) <= room


def _least(most: int, holds: Callable[[int], bool]) -> int:
    """The least count up to ``most`` that holds, where more always holds too."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
