"""What every run of layers costs as one stage: seconds, and the remat it fits with.

    Chain, MeshShape, Load -> LayerArrays -> SpanTable -> seconds[first, stop], remat

Memory is an upper bound of ``costs.memory``'s promise that can be summed layer by
layer. Where remat none does not fit, the first layers of the stage are moved to the
next policy until it does, so a stage has at most two policies. O(L^2 log L) for L
layers.

Arrays: L layers, F first layer, S the one past the last, P policies.
"""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from hexijax.costs.activations import (
    BORDERS_IN_FLIGHT,
    enter_bytes,
    handed_bytes,
    held_bytes,
    joined_bytes,
    kept_bytes,
    layer_params,
    working_bytes,
)
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.costs.memory import GRAD_BYTES, STATE_BYTES, alone_bytes, flying_bytes
from hexijax.costs.rates import CALL_S
from hexijax.costs.temp import temp_factor
from hexijax.layers.chain import ITEM_BYTES, Chain, Remat
from hexijax.program.buckets import ALONE_SIZE, SHARED_SIZE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a stage is asked to hold and do, whatever its layers."""

    samples: int
    """Of a microbatch, on one lane."""

    live: int
    """Microbatches between their forward and their backward."""

    state_devices: int
    """Devices over which each parameter's state is spread."""

    members: int
    """Stages over which each gradient is summed, one a replica."""

    moments: int
    """fp32 arrays of the optimizer for each parameter."""

    per_segment: int | None
    """Most layers of a segment."""

    remat: tuple[Remat, ...]
    """Policies to choose from, from the fastest to the smallest."""

    budget_bytes: int
    """What one device has for this stage."""

    handed: int = 0
    """Microbatches between the parts of a split backward."""


class LayerArrays:
    """Figures of each layer on one mesh for one microbatch size."""

    def __init__(
        self, chain: Chain, mesh: MeshShape, samples: int, remat: tuple[Remat, ...]
    ) -> None:
        dtype, tensor = mesh.dtype, mesh.tensor
        layers = chain.layers_under(fused_attention=mesh.fused_attention)
        times = layer_times(chain, mesh, samples)
        self.item_bytes, self.lanes = ITEM_BYTES[dtype], mesh.lanes
        self.temp_factor = temp_factor(mesh.profile, dtype)
        held = [
            held_bytes(chain, (i, i + 1), tensor, dtype)[0] for i in range(len(layers))
        ]
        self.held_L = np.array(held, float)
        self.params_L = np.array(layer_params(chain, tensor), float)
        self.whole_params_L = np.array(layer_params(chain, 1), float)
        self.seconds_L = np.array([t.forward_s + t.backward_s for t in times])
        # The loss's own segment runs both ways in one program, the others apart.
        self.added_s_PL, self.joined_s_PL = (
            np.array([[t.added_s(p, joined=joined) for t in times] for p in remat])
            for joined in (False, True)
        )
        self.kept_PL = np.array(
            [
                [kept_bytes(chain, x, p, dtype, tensor, samples) for x in layers]
                for p in remat
            ],
            float,
        )
        # In the loss's own segment it is alive in one program, and once.
        joined = [
            [joined_bytes(chain, x, p, dtype, tensor, samples) for x in layers]
            for p in remat
        ]
        self.joined_PL = np.array(joined, float)
        self.working_L = np.array(
            [working_bytes(chain, x, dtype, tensor, samples) for x in layers], float
        )
        self.handed_L = np.array(
            [handed_bytes(chain, x, dtype, tensor, samples) for x in layers], float
        )
        # One more than layers: nothing enters the first, or leaves the last.
        self.enter_S = np.array(
            [enter_bytes(chain, i, dtype, samples) for i in range(len(layers) + 1)],
            float,
        )
        self.batch_bytes = samples * sum(a.num_bytes for a in chain.batch.values())


def all_fits(arrays: LayerArrays, load: Load) -> bool:
    """Whether every run of layers fits under the first policy, the whole chain too."""
    item, lanes = arrays.item_bytes, arrays.lanes
    params = float(arrays.params_L.sum())
    resident = float(arrays.held_L.sum()) + params * GRAD_BYTES
    resident += (
        float(arrays.whole_params_L.sum())
        / load.state_devices
        * STATE_BYTES
        * (1 + load.moments)
    )
    if load.members == 1:
        flying = alone_bytes(1, 1, item, lanes) * min(
            params, max(ALONE_SIZE, float(arrays.params_L.max()))
        )
    else:
        bucket = min(params, max(SHARED_SIZE, float(arrays.params_L.max())))
        home, shard = (flying_bytes(*x, load.members, item) for x in ((1, 0), (0, 1)))
        flying = bucket / load.state_devices * home + bucket * shard
    entering = float(arrays.enter_S.max())
    depth = load.live * (
        float(arrays.kept_PL[0].sum())
        + entering * len(arrays.params_L)
        + arrays.batch_bytes
    )
    depth += load.handed * (float(arrays.handed_L.sum()) + arrays.batch_bytes)
    depth += BORDERS_IN_FLIGHT * (2 * entering + arrays.batch_bytes)
    within = float(arrays.held_L.sum()) + float(arrays.working_L.max())
    depth += arrays.temp_factor * within
    return resident + flying + depth <= load.budget_bytes


class SpanTable:
    """Seconds and remat of every run of layers on one mesh under one load."""

    def __init__(self, arrays: LayerArrays, load: Load) -> None:
        self._load = load
        self._params_S = _sums(arrays.params_L)
        self.fixed_FS = _fixed_bytes(arrays, load)
        self._kept_PS = _sums(arrays.kept_PL)
        # Runs up to the loss that are one segment: both ways in one program.
        one_F = _num_segments(len(arrays.params_L), load)[:, -1] == 1
        self._one_F = one_F & (load.live == 1)
        self._joined_PS, self._more_PF = None, np.zeros((0, 0))
        if self._one_F.any():
            factor = arrays.temp_factor
            self._joined_PS = _sums(arrays.joined_PL) * factor
            # Its layer in full was kept in part before: that part counts once.
            part_PL = np.maximum(arrays.working_L - arrays.joined_PL, 0)
            part_PF = np.array([_span_max(part_L)[:, -1] for part_L in part_PL])
            full_F = _span_max(arrays.working_L)[:, -1]
            self._more_PF = factor * (part_PF - full_F)
        self._policy_FS, self._count_FS, fits_FS = self._choose()
        seconds_FS = self._seconds(arrays)
        self.seconds_FS: Float[np.ndarray, "layers stops"] = np.where(
            fits_FS, seconds_FS, np.inf
        )
        """Forward and backward of one microbatch; infinite where it does not fit."""

    def seconds(self, first: int, stop: int) -> float:
        """The same of one run of layers."""
        return float(self.seconds_FS[first, stop])

    def params(self, first: int, stop: int) -> float:
        """Parameters of one run of layers on one device."""
        return float(self._params_S[stop] - self._params_S[first])

    def remat(self, first: int, stop: int) -> tuple[Remat, ...]:
        """One policy a layer."""
        policy = int(self._policy_FS[first, stop])
        count = int(self._count_FS[first, stop])
        later = self._load.remat[max(policy - 1, 0)]
        return (self._load.remat[policy],) * count + (later,) * (stop - first - count)

    def least_bytes(self, first: int, stop: int) -> int:
        """What one device needs for these layers under the smallest policy."""
        to_the_loss = stop == len(self._one_F)
        if self._joined_PS is not None and to_the_loss and self._one_F[first]:
            joined = self._joined_PS[-1, stop] - self._joined_PS[-1, first]
            more = self._more_PF[-1, first]
            return int(self.fixed_FS[first, stop] + joined + more)
        kept = self._kept_PS[-1, stop] - self._kept_PS[-1, first]
        return int(self.fixed_FS[first, stop] + self._load.live * kept)

    def _choose(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Policy, how many of the first layers take it, and whether that fits."""
        length_FS = _lengths(self.fixed_FS.shape[0])
        room_FS = self._load.budget_bytes - self.fixed_FS
        policy_FS = np.zeros(length_FS.shape, int)
        count_FS = np.maximum(length_FS, 0)
        fits_FS = np.zeros(length_FS.shape, bool)
        for policy in range(len(self._load.remat)):
            whole_FS = self._need(policy, np.maximum(length_FS, 0)) <= room_FS
            new_FS = whole_FS & ~fits_FS & (length_FS > 0)
            if policy and new_FS.any():
                least_FS = self._least_count(policy, room_FS, length_FS)
                policy_FS = np.where(new_FS, policy, policy_FS)
                count_FS = np.where(new_FS, least_FS, count_FS)
            fits_FS |= new_FS
        return policy_FS, count_FS, fits_FS

    def _least_count(
        self, policy: int, room_FS: np.ndarray, length_FS: np.ndarray
    ) -> np.ndarray:
        """Bisects every run at once: more layers under a smaller policy need less."""
        low_FS = np.zeros_like(length_FS)
        high_FS = np.maximum(length_FS, 0)
        while (low_FS < high_FS).any():
            middle_FS = (low_FS + high_FS) // 2
            fits_FS = self._need(policy, middle_FS) <= room_FS
            high_FS = np.where(fits_FS, middle_FS, high_FS)
            low_FS = np.where(fits_FS, low_FS, np.minimum(middle_FS + 1, high_FS))
        return low_FS

    def _need(
        self, policy: int, count_FS: Int[np.ndarray, "layers stops"]
    ) -> Float[np.ndarray, "layers stops"]:
        """Bytes kept by live microbatches if ``count`` layers take the policy."""
        need_FS = self._load.live * _two_policies(self._kept_PS, policy, count_FS)
        if self._joined_PS is not None:
            joined_FS = _two_policies(self._joined_PS, policy, count_FS)
            more_F = self._more_PF[max(policy - 1, 0) : policy + 1].max(axis=0)
            need_F = joined_FS[:, -1] + more_F
            need_FS[:, -1] = np.where(self._one_F, need_F, need_FS[:, -1])
        return need_FS

    def _seconds(self, arrays: LayerArrays) -> Float[np.ndarray, "layers stops"]:
        added_s_PS, joined_s_PS = map(_sums, (arrays.added_s_PL, arrays.joined_s_PL))
        seconds_FS = _span_sums(arrays.seconds_L)
        seconds_FS += 2 * CALL_S * _num_segments(len(arrays.seconds_L), self._load)
        for policy in range(len(self._load.remat)):
            added_FS = _two_policies(added_s_PS, policy, self._count_FS)
            if self._joined_PS is not None:
                joined_FS = _two_policies(joined_s_PS, policy, self._count_FS)
                added_F = added_FS[:, -1]
                added_FS[:, -1] = np.where(self._one_F, joined_FS[:, -1], added_F)
            seconds_FS += np.where(self._policy_FS == policy, added_FS, 0.0)
        return seconds_FS


def _fixed_bytes(arrays: LayerArrays, load: Load) -> Float[np.ndarray, "layers stops"]:
    """Bytes that do not depend on remat; the terms of ``costs.memory``."""
    item = arrays.item_bytes
    params_FS = _span_sums(arrays.params_L)
    largest_FS = _span_max(arrays.params_L)
    state_FS = _span_sums(arrays.whole_params_L) / load.state_devices
    held_FS = _span_sums(arrays.held_L)
    segment_FS = held_FS
    if load.per_segment is not None:
        most_FS = _span_max(arrays.held_L) * load.per_segment
        segment_FS = np.minimum(held_FS, most_FS)
    enter_L = arrays.enter_S[:-1]
    borders_FS = _num_segments(len(enter_L), load) * _span_max(enter_L)
    edges_FS = arrays.enter_S[:-1, None] + arrays.enter_S[None, :]
    depth_FS = (
        load.live * (borders_FS + arrays.batch_bytes)
        + load.handed * (_span_sums(arrays.handed_L) + arrays.batch_bytes)
        + BORDERS_IN_FLIGHT * (edges_FS + arrays.batch_bytes)
        + arrays.temp_factor * (segment_FS + _span_max(arrays.working_L))
    )
    # A bucket's boxes at home, of which no device has more than its whole gradient.
    limit = ALONE_SIZE if load.members == 1 else SHARED_SIZE
    bucket_FS = np.maximum(largest_FS, np.minimum(params_FS, limit))
    if load.members == 1:
        flying_FS = bucket_FS * alone_bytes(1, 1, item, arrays.lanes)
    else:
        home_FS = bucket_FS / load.state_devices
        home, shard = (flying_bytes(*x, load.members, item) for x in ((1, 0), (0, 1)))
        flying_FS = home_FS * home + bucket_FS * shard
    resident_FS = held_FS + params_FS * GRAD_BYTES
    resident_FS += state_FS * STATE_BYTES * (1 + load.moments)
    return resident_FS + depth_FS + flying_FS


def _lengths(num_layers: int) -> Int[np.ndarray, "layers stops"]:
    """Layers of each run; none or negative where the run is empty."""
    return np.arange(num_layers + 1)[None, :] - np.arange(num_layers)[:, None]


def _num_segments(num_layers: int, load: Load) -> Int[np.ndarray, "layers stops"]:
    length_FS = np.maximum(_lengths(num_layers), 1)
    return -(-length_FS // (load.per_segment or num_layers))


def _sums(values_PL: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, 2, ... values along the last dim."""
    none = np.zeros((*values_PL.shape[:-1], 1))
    return np.concatenate([none, np.cumsum(values_PL, axis=-1)], axis=-1)


def _span_sums(values_L: np.ndarray) -> Float[np.ndarray, "layers stops"]:
    sums_S = _sums(values_L)
    return sums_S[None, :] - sums_S[:-1, None]


def _span_max(values_L: np.ndarray) -> Float[np.ndarray, "layers stops"]:
    """The largest value of each run; 0 where it is empty."""
    inside_FL = np.triu(np.broadcast_to(values_L, (len(values_L), len(values_L))))
    most_FL = np.maximum.accumulate(inside_FL, axis=1)
    return np.concatenate([np.zeros((len(values_L), 1)), most_FL], axis=1)


def _two_policies(
    sums_PS: np.ndarray, policy: int, count_FS: np.ndarray
) -> Float[np.ndarray, "layers stops"]:
    """Sums of runs: ``count`` layers take a policy, the rest the one before."""
    num_layers = count_FS.shape[0]
    first_F = np.arange(num_layers)[:, None]
    middle_FS = np.minimum(first_F + count_FS, num_layers)
    here_S, later_S = sums_PS[policy], sums_PS[max(policy - 1, 0)]
    return here_S[middle_FS] - here_S[first_F] + later_S[None, :] - later_S[middle_FS]
