"""What every run of layers costs as one stage: seconds, and the remat it fits with.

    Chain, MeshShape, Load -> LayerArrays -> SpanTable -> seconds[first, stop], remat

Memory is an upper bound of ``costs.memory``'s promise that can be summed layer by
layer. Where remat none does not fit, the first layers of the stage are moved to the
next policy until it does, so a stage has at most two policies. O(L^2 log L) for L
layers.

Arrays: L layers, F first layer, S the one past the last, P policies, K tables.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from hexijax.costs.activations import (
    BORDERS_IN_FLIGHT,
    CPU,
    Waiting,
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
from hexijax.costs.working import SCRATCH_BYTES, waiting_layers, working_of
from hexijax.layers.chain import ITEM_BYTES, Chain, Layer, Remat
from hexijax.program.buckets import ALONE_SIZE, SHARED_SIZE

ALL, LAST = slice(None), slice(-1, None)
"""Stops: every one, the loss."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a stage is asked to hold and do, whatever its layers."""

    samples: int
    """Of a microbatch, on one lane."""

    state_devices: float
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What waits in a stage, by its place in the pipeline."""

    live: int
    """Microbatches between their forward and their backward."""

    handed: int = 0
    """Microbatches between the parts of a split backward."""

    waiting: Waiting = dataclasses.field(default_factory=Waiting)
    """Borders and batches whose turn has not come."""


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
        # The layer a program of both ways works on was kept in part before, and that
        # part counts once.
        self.part_PL = np.maximum(self.working_L - self.joined_PL, 0)
        self.early_L, self.scratch_bytes = np.zeros(len(layers)), 0.0
        self.waiting_layers = len(layers)
        if mesh.profile.vendor != CPU:
            self._use_working(chain, layers, mesh, samples, remat)
        self.handed_L = np.array(
            [handed_bytes(chain, x, dtype, tensor, samples) for x in layers], float
        )
        # One more than layers: nothing enters the first, or leaves the last.
        self.enter_S = np.array(
            [enter_bytes(chain, i, dtype, samples) for i in range(len(layers) + 1)],
            float,
        )
        self.batch_bytes = samples * sum(a.num_bytes for a in chain.batch.values())
        # Of runs of layers, whatever the load: many loads are tried.
        self.length_FS = _lengths(len(layers))
        self.params_FS = _span_sums(self.params_L)
        self.largest_FS = _span_max(self.params_L)
        self.whole_params_FS = _span_sums(self.whole_params_L)
        self.held_FS = _span_sums(self.held_L)
        self.most_held_FS = _span_max(self.held_L)
        self.handed_FS = _span_sums(self.handed_L)
        self.working_FS = _span_max(self.working_L)
        self.most_entering_FS = _span_max(self.enter_S[:-1])
        self.edges_FS = self.enter_S[:-1, None] + self.enter_S[None, :]
        self.seconds_FS = _span_sums(self.seconds_L)
        self.kept_PS = _sums(self.kept_PL)
        self.added_s_PS, self.joined_s_PS = (
            _sums(added_s_PL) for added_s_PL in (self.added_s_PL, self.joined_s_PL)
        )
        self.early_FS = _span_sums(self.early_L)
        self.most_early_FS = _span_max(self.early_L)
        self.joined_PS = _sums(self.joined_PL) * self.temp_factor
        part_PF = np.array([_span_max(part_L)[:, -1] for part_L in self.part_PL])
        self.more_PF = self.temp_factor * (part_PF - self.working_FS[:, -1])

    def _use_working(
        self,
        chain: Chain,
        layers: Sequence[Layer],
        mesh: MeshShape,
        samples: int,
        remat: tuple[Remat, ...],
    ) -> None:
        """What an accelerator's programs have alive, under any of the policies."""
        alive_PL = [
            working_of(
                chain, layers, [policy] * len(layers), mesh.dtype, mesh.tensor, samples
            )
            for policy in remat
        ]
        self.joined_PL = np.array([[x.kept for x in each] for each in alive_PL], float)
        self.part_PL = np.array([[x.joined for x in each] for each in alive_PL], float)
        apart_PL = np.array([[x.apart for x in each] for each in alive_PL], float)
        early_PL = np.array([[x.early for x in each] for each in alive_PL], float)
        self.working_L, self.early_L = apart_PL.max(axis=0), early_PL.max(axis=0)
        self.scratch_bytes = float(SCRATCH_BYTES)
        self.waiting_layers = min(len(layers), waiting_layers(mesh.profile))


def all_fits(arrays: LayerArrays, load: Load, held: Held) -> bool:
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
    depth = held.live * (
        float(arrays.kept_PL[0].sum())
        + entering * len(arrays.params_L)
        + arrays.batch_bytes
    )
    depth += held.handed * (float(arrays.handed_L.sum()) + arrays.batch_bytes)
    depth += BORDERS_IN_FLIGHT * (2 * entering + arrays.batch_bytes)
    waiting = held.waiting
    depth += (waiting.left + waiting.right) * entering
    depth += waiting.batch * arrays.batch_bytes
    within = float(arrays.held_L.sum()) + float(arrays.working_L.max())
    depth += arrays.temp_factor * (within + float(arrays.early_L.sum()))
    depth += arrays.scratch_bytes
    return resident + flying + depth <= load.budget_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpanTable:
    """Seconds and remat of every run of layers on one mesh under one load."""

    seconds_FS: Float[np.ndarray, "layers stops"]
    """Forward and backward of one microbatch; infinite where it does not fit."""

    policy_FS: Int[np.ndarray, "layers stops"]
    """Index of the policy that the first layers take; the rest take the one before."""

    count_FS: Int[np.ndarray, "layers stops"]
    """How many take it."""

    params_FS: Float[np.ndarray, "layers stops"]
    """Parameters on one device."""

    policies: tuple[Remat, ...]
    """Those to choose from."""

    def seconds(self, first: int, stop: int) -> float:
        """Of one run of layers."""
        return float(self.seconds_FS[first, stop])

    def params(self, first: int, stop: int) -> float:
        """Of one run of layers."""
        return float(self.params_FS[first, stop])

    def remat(self, first: int, stop: int) -> tuple[Remat, ...]:
        """One policy a layer."""
        policy = int(self.policy_FS[first, stop])
        count = int(self.count_FS[first, stop])
        later = self.policies[max(policy - 1, 0)]
        return (self.policies[policy],) * count + (later,) * (stop - first - count)


def span_tables(
    arrays: LayerArrays, load: Load, held: Sequence[Held]
) -> list[SpanTable]:
    """Tables of stages on equal meshes, one for each of what may wait in them.

    Together, since numpy's calls cost more than their sums.
    """
    made = _Tables(arrays, load, held)
    return [
        SpanTable(
            seconds_FS=made.seconds_KFS[k],
            policy_FS=made.policy_KFS[k],
            count_FS=made.count_KFS[k],
            params_FS=arrays.params_FS,
            policies=load.remat,
        )
        for k in range(len(held))
    ]


class _Tables:
    """The arrays of K tables."""

    def __init__(self, arrays: LayerArrays, load: Load, held: Sequence[Held]) -> None:
        self._arrays, self._remat = arrays, load.remat
        length_FS = np.maximum(arrays.length_FS, 1)
        segments_FS = -(-length_FS // (load.per_segment or len(arrays.params_L)))
        self._live_K = np.array([h.live for h in held])[:, None, None]
        handed_K = np.array([h.handed for h in held])[:, None, None]
        waiting = [(h.waiting.left, h.waiting.right, h.waiting.batch) for h in held]
        left_K, right_K, batches_K = np.array(waiting).reshape(-1, 3).T[..., None, None]
        self._room_KFS = load.budget_bytes - (
            _fixed_bytes(arrays, load)
            + self._live_K
            * (segments_FS * arrays.most_entering_FS + arrays.batch_bytes)
            + handed_K * (arrays.handed_FS + arrays.batch_bytes)
            + left_K * arrays.enter_S[:-1, None]
            + right_K * arrays.enter_S[None, :]
            + batches_K * arrays.batch_bytes
        )
        # Runs up to the loss that are one segment: both ways in one program.
        self._one_KF = (segments_FS[:, -1] == 1) & (self._live_K[:, 0] == 1)
        fits_KFS = self._choose()
        seconds_KFS = self._seconds() + 2 * CALL_S * segments_FS
        self.seconds_KFS = np.where(fits_KFS, seconds_KFS, np.inf)

    def _choose(self) -> Bool[np.ndarray, "tables layers stops"]:
        """Sets policy, and how many of the first layers take it; where that fits."""
        length_FS = np.maximum(self._arrays.length_FS, 0)
        shape = self._room_KFS.shape
        self.policy_KFS = np.zeros(shape, int)
        self.count_KFS = np.broadcast_to(length_FS, shape)
        fits_KFS = self.count_KFS == 0
        for policy in range(len(self._remat)):
            least_KFS = self._least_count(policy)
            new_KFS = (least_KFS <= length_FS) & ~fits_KFS
            if policy:
                self.policy_KFS = np.where(new_KFS, policy, self.policy_KFS)
                self.count_KFS = np.where(new_KFS, least_KFS, self.count_KFS)
            fits_KFS |= new_KFS
            if fits_KFS.all():
                break
        return fits_KFS & (length_FS > 0)

    def _least_count(self, policy: int) -> Int[np.ndarray, "tables layers stops"]:
        """How many of a run's first layers must take a policy, the rest the one before;
        more than the run has where even all do not fit."""
        arrays, earlier = self._arrays, max(policy - 1, 0)
        kept = (arrays.kept_PS[policy], arrays.kept_PS[earlier])
        least_KFS = _least(*kept, self._room_KFS / self._live_K)
        if self._one_KF.any():
            joined = (arrays.joined_PS[policy], arrays.joined_PS[earlier])
            more_F = arrays.more_PF[earlier : policy + 1].max(axis=0)
            least_KF = _least(
                *joined, self._room_KFS[..., LAST] - more_F[:, None], LAST
            )
            least_KFS[..., -1] = np.where(
                self._one_KF, least_KF[..., 0], least_KFS[..., -1]
            )
        return least_KFS

    def _seconds(self) -> Float[np.ndarray, "tables layers stops"]:
        arrays = self._arrays
        seconds_KFS = np.broadcast_to(arrays.seconds_FS, self._room_KFS.shape).copy()
        for policy in range(len(self._remat)):
            chosen_KFS = self.policy_KFS == policy
            if policy and not chosen_KFS.any():
                continue
            added_KFS = _two_policies(arrays.added_s_PS, policy, self.count_KFS)
            if self._one_KF.any():
                count_KF = self.count_KFS[..., LAST]
                joined_KF = _two_policies(arrays.joined_s_PS, policy, count_KF, LAST)
                added_KFS[..., -1] = np.where(
                    self._one_KF, joined_KF[..., 0], added_KFS[..., -1]
                )
            seconds_KFS += np.where(chosen_KFS, added_KFS, 0.0)
        return seconds_KFS


def _fixed_bytes(arrays: LayerArrays, load: Load) -> Float[np.ndarray, "layers stops"]:
    """Bytes of neither remat nor what waits; the terms of ``costs.memory``."""
    item = arrays.item_bytes
    most = load.per_segment or len(arrays.params_L)
    waiting = min(most, arrays.waiting_layers)
    segment_FS = np.minimum(arrays.held_FS, arrays.most_held_FS * waiting)
    early_FS = np.minimum(arrays.early_FS, arrays.most_early_FS * most)
    depth_FS = BORDERS_IN_FLIGHT * (
        arrays.edges_FS + arrays.batch_bytes
    ) + arrays.temp_factor * (segment_FS + early_FS + arrays.working_FS)
    depth_FS += arrays.scratch_bytes
    # A bucket's boxes at home, of which no device has more than its whole gradient.
    limit = ALONE_SIZE if load.members == 1 else SHARED_SIZE
    bucket_FS = np.maximum(arrays.largest_FS, np.minimum(arrays.params_FS, limit))
    if load.members == 1:
        flying_FS = bucket_FS * alone_bytes(1, 1, item, arrays.lanes)
    else:
        home_FS = bucket_FS / load.state_devices
        home, shard = (flying_bytes(*x, load.members, item) for x in ((1, 0), (0, 1)))
        flying_FS = home_FS * home + bucket_FS * shard
    state_bytes = STATE_BYTES * (1 + load.moments) / load.state_devices
    resident_FS = arrays.held_FS + arrays.params_FS * GRAD_BYTES
    resident_FS += arrays.whole_params_FS * state_bytes
    return resident_FS + depth_FS + flying_FS


def _lengths(num_layers: int) -> Int[np.ndarray, "layers stops"]:
    """Layers of each run; none or negative where the run is empty."""
    return np.arange(num_layers + 1)[None, :] - np.arange(num_layers)[:, None]


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
    sums_PS: np.ndarray,
    policy: int,
    count_FX: Int[np.ndarray, "*tables layers stops"],
    stops: slice = ALL,
) -> Float[np.ndarray, "*tables layers stops"]:
    """Sums of runs: ``count`` layers take a policy, the rest the one before."""
    here_S, later_S = sums_PS[policy], sums_PS[max(policy - 1, 0)]
    num_layers = len(here_S) - 1
    first_F = np.arange(num_layers)[:, None]
    middle_FX = np.minimum(first_F + count_FX, num_layers)
    change_S = here_S - later_S
    return change_S[middle_FX] - here_S[:-1, None] + later_S[None, stops]


def _least(
    here_S: np.ndarray,
    later_S: np.ndarray,
    room_FX: Float[np.ndarray, "*tables layers stops"],
    stops: slice = ALL,
) -> Int[np.ndarray, "*tables layers stops"]:
    """The least count with which the sums of ``_two_policies`` are within a room.

    More layers under a smaller policy keep less, so one search in what the change of
    policy saves answers all runs.
    """
    saved_S = later_S - here_S
    asked_FX = later_S[None, stops] - here_S[:-1, None] - room_FX
    middle_FX = np.searchsorted(saved_S, asked_FX)
    return np.maximum(middle_FX - np.arange(len(here_S) - 1)[:, None], 0)
