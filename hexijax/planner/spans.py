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
    """What all stages of a layout have in common."""

    members: int
    """Stages over which each gradient is summed, one a replica."""

    moments: int
    """fp32 arrays of the optimizer for each parameter."""

    per_segment: int | None
    """Most layers of a segment."""

    remat: tuple[Remat, ...]
    """Policies to choose from, from the fastest to the smallest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What waits in a stage, by its place in the pipeline."""

    live: int
    """Microbatches between their forward and their backward."""

    handed: int = 0
    """Microbatches between the parts of a split backward."""

    waiting: Waiting = dataclasses.field(default_factory=Waiting)
    """Borders and batches whose turn has not come."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One table: what a stage of any layers costs on a mesh."""

    arrays: "LayerArrays"
    """Of the mesh, for a size of microbatch."""

    state_devices: float
    """Devices over which each parameter's state is spread."""

    budget_bytes: int
    """What one device has for this stage."""

    held: Held
    """What waits there."""


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
            held_bytes(chain, (i, i + 1), tensor, dtype) for i in range(len(layers))
        ]
        self.held_L = np.array([x.handed for x in held], float)
        self.trained_L = np.array([x.trained for x in held], float)
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
        self.trained_FS = _span_sums(self.trained_L)
        self.most_trained_FS = _span_max(self.trained_L)
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
        self.second_is_quicker = len(remat) > 1 and bool(
            (self.added_s_PL[1] < self.added_s_PL[0]).any()
        )
        self._set_most()
        self._fixed: dict[Load, _Fixed] = {}

    def fixed(self, load: Load) -> "_Fixed":
        """What depends on neither the place in the pipeline nor the state's homes."""
        if load not in self._fixed:
            self._fixed[load] = _Fixed.of(self, load)
        return self._fixed[load]

    def _set_most(self) -> None:
        """Of the whole chain, for ``all_fits``."""
        self.all_params = float(self.params_L.sum())
        self.all_whole_params = float(self.whole_params_L.sum())
        self.all_held = float(self.held_L.sum())
        self.all_kept = float(self.kept_PL[0].sum())
        self.all_handed = float(self.handed_L.sum())
        self.most_params = float(self.params_L.max())
        self.most_entering = float(self.enter_S.max())
        within = float(self.trained_L.sum()) + float(self.working_L.max())
        within += float(self.early_L.sum())
        self.all_within = self.temp_factor * within + self.scratch_bytes

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


def all_fits(asked: Asked, load: Load) -> bool:
    """Whether every run of layers fits under the first policy, the whole chain too."""
    arrays, held = asked.arrays, asked.held
    params, state_devices = arrays.all_params, asked.state_devices
    resident = arrays.all_held + params * GRAD_BYTES
    resident += arrays.all_whole_params * _state_bytes(load) / state_devices
    home, shard = _flying_bytes(arrays, load)
    bucket = min(params, max(_bucket_limit(load), arrays.most_params))
    flying = bucket * (home / state_devices + shard)
    entering, batch = arrays.most_entering, arrays.batch_bytes
    depth = held.live * (arrays.all_kept + entering * len(arrays.params_L) + batch)
    depth += held.handed * (arrays.all_handed + batch)
    depth += BORDERS_IN_FLIGHT * (2 * entering + batch)
    waiting = held.waiting
    depth += (waiting.left + waiting.right) * entering + waiting.batch * batch
    return resident + flying + depth + arrays.all_within <= asked.budget_bytes


def _state_bytes(load: Load) -> int:
    """Of a parameter: its fp32 value and the optimizer's."""
    return STATE_BYTES * (1 + load.moments)


def _bucket_limit(load: Load) -> int:
    """Parameters of a bucket that several arrays share."""
    return ALONE_SIZE if load.members == 1 else SHARED_SIZE


def _flying_bytes(arrays: LayerArrays, load: Load) -> tuple[float, float]:
    """Of a bucket's parameter on its way: at its home, and on every device."""
    item = arrays.item_bytes
    if load.members == 1:
        return 0.0, alone_bytes(1, 1, item, arrays.lanes)
    home, shard = (flying_bytes(*x, load.members, item) for x in ((1, 0), (0, 1)))
    return home, shard


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Fixed:
    """Parts of the terms of ``costs.memory``, for every run of layers.

    Bytes are ``fixed_FS + homed_FS / state_devices + live * live_FS + handed *
    handed_FS``, kept activations and what waits left out.
    """

    segments_FS: Int[np.ndarray, "layers stops"]
    fixed_FS: Float[np.ndarray, "layers stops"]
    homed_FS: Float[np.ndarray, "layers stops"]
    live_FS: Float[np.ndarray, "layers stops"]
    handed_FS: Float[np.ndarray, "layers stops"]

    @classmethod
    def of(cls, arrays: LayerArrays, load: Load) -> "_Fixed":
        most = load.per_segment or len(arrays.params_L)
        segments_FS = -(-np.maximum(arrays.length_FS, 1) // most)
        waiting = min(most, arrays.waiting_layers)
        segment_FS = np.minimum(arrays.trained_FS, arrays.most_trained_FS * waiting)
        early_FS = np.minimum(arrays.early_FS, arrays.most_early_FS * most)
        temp_FS = segment_FS + early_FS + arrays.working_FS
        # A bucket's boxes at home, of which no device has more than its whole gradient.
        shared_FS = np.minimum(arrays.params_FS, _bucket_limit(load))
        bucket_FS = np.maximum(arrays.largest_FS, shared_FS)
        home, shard = _flying_bytes(arrays, load)
        return cls(
            segments_FS=segments_FS,
            fixed_FS=arrays.held_FS
            + arrays.params_FS * GRAD_BYTES
            + BORDERS_IN_FLIGHT * (arrays.edges_FS + arrays.batch_bytes)
            + arrays.temp_factor * temp_FS
            + arrays.scratch_bytes
            + bucket_FS * shard,
            homed_FS=arrays.whole_params_FS * _state_bytes(load) + bucket_FS * home,
            live_FS=segments_FS * arrays.most_entering_FS + arrays.batch_bytes,
            handed_FS=arrays.handed_FS + arrays.batch_bytes,
        )

    def bytes_FS(self, asked: Asked) -> Float[np.ndarray, "layers stops"]:
        """Of a stage, beside what its layers keep."""
        arrays, held = asked.arrays, asked.held
        sum_FS = self.fixed_FS + self.homed_FS / asked.state_devices
        sum_FS += held.live * self.live_FS
        if held.handed:
            sum_FS += held.handed * self.handed_FS
        waiting = held.waiting
        if waiting.left:
            sum_FS += waiting.left * arrays.enter_S[:-1, None]
        if waiting.right:
            sum_FS += waiting.right * arrays.enter_S[None, :]
        sum_FS += waiting.batch * arrays.batch_bytes
        return sum_FS


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
    """Parameters on one device that train."""

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


def span_tables(load: Load, asked: Sequence[Asked]) -> list[SpanTable]:
    """Tables of a chain's stages, together: numpy's calls cost more than their sums."""
    if not asked:
        return []
    made = _Tables(load, asked)
    return [
        SpanTable(
            seconds_FS=made.seconds_KFS[k],
            policy_FS=made.policy_KFS[k],
            count_FS=made.count_KFS[k],
            params_FS=asked[k].arrays.params_FS,
            policies=load.remat,
        )
        for k in range(len(asked))
    ]


class _Tables:
    """The arrays of K tables."""

    def __init__(self, load: Load, asked: Sequence[Asked]) -> None:
        self._arrays, self._remat = [a.arrays for a in asked], load.remat
        self._length_FS = asked[0].arrays.length_FS
        fixed = [arrays.fixed(load) for arrays in self._arrays]
        rooms = [
            a.budget_bytes - f.bytes_FS(a) for a, f in zip(asked, fixed, strict=True)
        ]
        self._room_KFS = np.stack(rooms)
        self._live_K = np.array([a.held.live for a in asked])[:, None, None]
        # Runs up to the loss that are one segment: both ways in one program.
        segments_KFS = np.stack([f.segments_FS for f in fixed])
        self._one_KF = (segments_KFS[..., -1] == 1) & (self._live_K[:, 0] == 1)
        self._any_one = bool(self._one_KF.any())
        # Of longer ones the last segment is.
        self._ends_K1 = self._live_K[:, 0] == 1
        self._any_ends = bool(self._ends_K1.any())
        length_F, count_F = self._length_FS[:, -1], fixed[0].segments_FS[:, -1]
        self._last_F = np.arange(len(length_F)) + (count_F - 1) * length_F // count_F
        fits_KFS = self._choose()
        seconds_KFS = self._quickened(self._seconds(self.policy_KFS, self.count_KFS))
        seconds_KFS += 2 * CALL_S * segments_KFS
        self.seconds_KFS = np.where(fits_KFS, seconds_KFS, np.inf)

    def _stacked(self, name: str, policy: int) -> Float[np.ndarray, "tables stops"]:
        return np.stack([getattr(arrays, name)[policy] for arrays in self._arrays])

    def _choose(self) -> Bool[np.ndarray, "tables layers stops"]:
        """Sets policy, and how many of the first layers take it; where that fits."""
        length_FS = np.maximum(self._length_FS, 0)
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
        earlier = max(policy - 1, 0)
        kept = (self._stacked("kept_PS", policy), self._stacked("kept_PS", earlier))
        least_KFS = _least(*kept, self._room_KFS / self._live_K)
        if self._any_one:
            joined = (
                self._stacked("joined_PS", policy),
                self._stacked("joined_PS", earlier),
            )
            more_KF = self._stacked("more_PF", policy)
            if policy:
                more_KF = np.maximum(more_KF, self._stacked("more_PF", earlier))
            room_KF1 = self._room_KFS[..., LAST] - more_KF[..., None]
            least_KF = _least(*joined, room_KF1, LAST)[..., 0]
            least_KFS[..., -1] = np.where(self._one_KF, least_KF, least_KFS[..., -1])
        return least_KFS

    def _seconds(
        self,
        policy_KFS: Int[np.ndarray, "tables layers stops"],
        count_KFS: Int[np.ndarray, "tables layers stops"],
    ) -> Float[np.ndarray, "tables layers stops"]:
        seconds_KFS = np.stack([arrays.seconds_FS for arrays in self._arrays])
        for policy in range(len(self._remat)):
            chosen_KFS = policy_KFS == policy
            if policy and not chosen_KFS.any():
                continue
            added_KFS = self._two_policies("added_s_PS", policy, count_KFS)
            if self._any_ends:
                saved_KF = self._joined_s(policy, count_KFS[..., -1])
                added_KFS[..., -1] += np.where(self._ends_K1, saved_KF, 0.0)
            seconds_KFS += np.where(chosen_KFS, added_KFS, 0.0)
        return seconds_KFS

    def _two_policies(
        self,
        name: str,
        policy: int,
        count_KFS: Int[np.ndarray, "tables layers stops"],
    ) -> Float[np.ndarray, "tables layers stops"]:
        """Sums of runs: ``count`` layers take a policy, the rest the one before."""
        here_KS = self._stacked(name, policy)
        later_KS = self._stacked(name, policy - 1) if policy else here_KS
        num_tables, num_stops = here_KS.shape
        first_F = np.arange(num_stops - 1)[:, None]
        middle_KFS = np.minimum(first_F + count_KFS, num_stops - 1)
        middle_KFS += (np.arange(num_tables) * num_stops)[:, None, None]
        change_KFS = (here_KS - later_KS).ravel()[middle_KFS]
        return change_KFS - here_KS[:, :-1, None] + later_KS[:, None, :]

    def _quickened(
        self, seconds_KFS: Float[np.ndarray, "tables layers stops"]
    ) -> Float[np.ndarray, "tables layers stops"]:
        """Seconds where more layers than must be take the second policy.

        What the first keeps it writes and reads again if forward and backward are
        programs of their own, which may take longer than to recompute it.
        """
        if not any(arrays.second_is_quicker for arrays in self._arrays):
            return seconds_KFS
        length_FS = np.maximum(self._length_FS, 0)
        count_KFS = np.broadcast_to(length_FS, seconds_KFS.shape).copy()
        num_layers = len(self._last_F)
        last_KF = np.where(self._ends_K1, self._last_F, num_layers)
        must_KF = np.where(self.policy_KFS[..., -1] == 1, self.count_KFS[..., -1], 0)
        count_KFS[..., -1] = np.maximum(last_KF - np.arange(num_layers), must_KF)
        second_KFS = np.ones_like(self.policy_KFS)
        quick_KFS = self._seconds(second_KFS, count_KFS)
        gained_KFS = (self.policy_KFS <= 1) & (quick_KFS < seconds_KFS)
        self.policy_KFS = np.where(gained_KFS, 1, self.policy_KFS)
        self.count_KFS = np.where(gained_KFS, count_KFS, self.count_KFS)
        return np.where(gained_KFS, quick_KFS, seconds_KFS)

    def _joined_s(
        self, policy: int, count_KF: Int[np.ndarray, "tables layers"]
    ) -> Float[np.ndarray, "tables layers"]:
        """What one program of both ways adds to the last segment of runs up to the
        loss, beyond what two would."""
        earlier = max(policy - 1, 0)
        here_KS, later_KS = (
            self._stacked("joined_s_PS", p) - self._stacked("added_s_PS", p)
            for p in (policy, earlier)
        )
        num_layers = len(self._last_F)
        middle_KF = np.maximum(np.arange(num_layers) + count_KF, self._last_F)
        middle_KF = np.minimum(middle_KF, num_layers)
        change_KF = np.take_along_axis(here_KS - later_KS, middle_KF, axis=1)
        return change_KF - here_KS[:, self._last_F] + later_KS[:, -1:]


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


def _least(
    here_KS: Float[np.ndarray, "tables stops"],
    later_KS: Float[np.ndarray, "tables stops"],
    room_KFX: Float[np.ndarray, "tables layers stops"],
    stops: slice = ALL,
) -> Int[np.ndarray, "tables layers stops"]:
    """The least count with which a run of two policies is within a room.

    More layers under a smaller policy keep less, so one search in what the change of
    policy saves answers all runs.
    """
    saved_KS = later_KS - here_KS
    asked_KFX = later_KS[:, None, stops] - here_KS[:, :-1, None] - room_KFX
    middle_KFX = np.stack(
        [s.searchsorted(a) for s, a in zip(saved_KS, asked_KFX, strict=True)]
    )
    return np.maximum(middle_KFX - np.arange(here_KS.shape[1] - 1)[:, None], 0)
