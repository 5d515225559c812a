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

from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import Remat
from hexijax.planner.terms import Asked, Fixed, Load

ALL, LAST = slice(None), slice(-1, None)
"""Stops: every one, the loss."""


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

    @property
    def num_bytes(self) -> int:
        """That it takes in memory, beside what its mesh's arrays do."""
        return self.seconds_FS.nbytes + self.policy_FS.nbytes + self.count_FS.nbytes

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
        self._stacks: dict[tuple[str, int], np.ndarray] = {}
        self._length_FS = asked[0].arrays.length_FS
        fixed = [Fixed.of(arrays, load) for arrays in self._arrays]
        rooms = [
            a.budget_bytes - f.bytes_FS(a) for a, f in zip(asked, fixed, strict=True)
        ]
        self._room_KFS = np.stack(rooms)
        self._live_K = np.array([a.held.live for a in asked])[:, None, None]
        # Runs up to the loss that are one segment: both ways in one program.
        segments_KFS = np.stack([f.segments_FS for f in fixed])
        layered = load.regime.layered
        joined_K1 = (self._live_K[:, 0] == 1) | layered
        self._one_KF = (segments_KFS[..., -1] == 1) & joined_K1
        self._any_one = bool(self._one_KF.any())
        # Of longer ones the last segment is.
        self._ends_K1 = joined_K1
        self._kept = "apart_PS" if layered and load.per_segment == 1 else "kept_PS"
        self._any_ends = bool(self._ends_K1.any())
        length_F, count_F = self._length_FS[:, -1], fixed[0].segments_FS[:, -1]
        self._last_F = np.arange(len(length_F)) + (count_F - 1) * length_F // count_F
        fits_KFS = self._choose()
        seconds_KFS = self._quickened(self._seconds(self.policy_KFS, self.count_KFS))
        seconds_KFS += 2 * CALL_S * segments_KFS
        self.seconds_KFS = np.where(fits_KFS, seconds_KFS, np.inf)

    def _stacked(self, name: str, policy: int) -> Float[np.ndarray, "tables stops"]:
        if (name, policy) not in self._stacks:
            rows = [getattr(arrays, name)[policy] for arrays in self._arrays]
            self._stacks[name, policy] = np.stack(rows)
        return self._stacks[name, policy]

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
        kept = (self._stacked(self._kept, policy), self._stacked(self._kept, earlier))
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
