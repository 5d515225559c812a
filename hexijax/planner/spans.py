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
from jaxtyping import Float, Int

from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import Remat
from hexijax.planner.arrays import LayerArrays
from hexijax.planner.terms import (
    Asked,
    Chosen,
    Fixed,
    Load,
    is_joined,
    kept_name,
    segments_FS,
)

ALL, LAST, FIRST = slice(None), slice(-1, None), slice(1)
"""Stops, or first layers: every one, the loss, the chain's first."""


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

    def chosen(self, first: int, stop: int) -> Chosen:
        """Of one run of layers."""
        return int(self.policy_FS[first, stop]), int(self.count_FS[first, stop])

    def remat(self, first: int, stop: int) -> tuple[Remat, ...]:
        """One policy a layer."""
        return remat_of(self.policies, self.chosen(first, stop), stop - first)


def remat_of(
    policies: tuple[Remat, ...], chosen: Chosen, num_layers: int
) -> tuple[Remat, ...]:
    """One policy a layer of a run of some."""
    policy, count = chosen
    later = policies[max(policy - 1, 0)]
    return (policies[policy],) * count + (later,) * (num_layers - count)


def span_tables(load: Load, asked: Sequence[Asked]) -> list[SpanTable]:
    """Tables of a chain's stages, together: numpy's calls cost more than their sums."""
    if not asked:
        return []
    arrays = [a.arrays for a in asked]
    joined = [is_joined(a.held, load.regime) for a in asked]
    rows = FIRST if all(a.whole for a in asked) else ALL
    made = _Tables(arrays, joined, load.per_segment, load.remat, rows)
    made.limit(load, asked)
    return made.tables()


def unlimited_tables(
    arrays: Sequence[LayerArrays],
    joined: Sequence[bool],
    per_segment: int | None,
    remat: tuple[Remat, ...],
) -> list[SpanTable]:
    """The same where memory is no limit.

    Args:
      arrays: of each table's mesh and size.
      joined: of each, whether the loss's segment runs both ways at once.
      per_segment: most layers of a segment.
      remat: policies to choose from.
    """
    return _Tables(arrays, joined, per_segment, remat).tables()


class _Tables:
    """The arrays of K tables."""

    def __init__(
        self,
        arrays: Sequence[LayerArrays],
        joined: Sequence[bool],
        per_segment: int | None,
        remat: tuple[Remat, ...],
        rows: slice = ALL,
    ) -> None:
        self._arrays, self._remat, self._rows = arrays, remat, rows
        self._stacks: dict[tuple[str, int], np.ndarray] = {}
        self._first_F = np.arange(len(arrays[0].params_L))[rows]
        self._length_FS = np.maximum(arrays[0].length_FS[rows], 0)
        self._segments_FS = segments_FS(arrays[0], per_segment)[rows]
        # Runs up to the loss that are one segment: both ways in one program; of longer
        # ones the last segment is.
        self._ends_K1 = np.array(joined)[:, None]
        self._one_KF = (self._segments_FS[:, -1] == 1) & self._ends_K1
        length_F, count_F = self._length_FS[:, -1], self._segments_FS[:, -1]
        self._last_F = self._first_F + (count_F - 1) * length_F // count_F
        shape = (len(arrays), *self._length_FS.shape)
        self._policy_KFS = np.zeros(shape, int)
        self._count_KFS = np.broadcast_to(self._length_FS, shape)
        self._fits_KFS = self._count_KFS > 0

    def tables(self) -> list[SpanTable]:
        """Each with its seconds."""
        chosen_s = self._seconds(self._policy_KFS, self._count_KFS)
        seconds_KFS = self._quickened(chosen_s) + 2 * CALL_S * self._segments_FS
        seconds_KFS[~self._fits_KFS] = np.inf
        return [
            SpanTable(
                seconds_FS=seconds_KFS[k],
                policy_FS=self._policy_KFS[k],
                count_FS=self._count_KFS[k],
                params_FS=arrays.params_FS,
                policies=self._remat,
            )
            for k, arrays in enumerate(self._arrays)
        ]

    def _stacked(self, name: str, policy: int) -> Float[np.ndarray, "tables stops"]:
        if (name, policy) not in self._stacks:
            rows = [getattr(arrays, name)[policy] for arrays in self._arrays]
            self._stacks[name, policy] = np.stack(rows)
        return self._stacks[name, policy]

    def limit(self, load: Load, asked: Sequence[Asked]) -> None:
        """Sets policy, and how many of the first layers take it; where that fits."""
        rooms = [
            a.budget_bytes - Fixed.of(a.arrays, load).bytes_FS(a, self._rows)
            for a in asked
        ]
        room_KFS = np.stack(rooms)
        live_K = np.array([a.held.live for a in asked])[:, None, None]
        length_FS = self._length_FS
        fits_KFS = self._count_KFS == 0
        for policy in range(len(self._remat)):
            least_KFS = self._least_count(policy, kept_name(load), room_KFS, live_K)
            new_KFS = (least_KFS <= length_FS) & ~fits_KFS
            if policy:
                self._policy_KFS = np.where(new_KFS, policy, self._policy_KFS)
                self._count_KFS = np.where(new_KFS, least_KFS, self._count_KFS)
            fits_KFS |= new_KFS
            if fits_KFS.all():
                break
        self._fits_KFS &= fits_KFS

    def _least_count(
        self,
        policy: int,
        kept: str,
        room_KFS: Float[np.ndarray, "tables layers stops"],
        live_K: Int[np.ndarray, "tables 1 1"],
    ) -> Int[np.ndarray, "tables layers stops"]:
        """How many of a run's first layers must take a policy, the rest the one before;
        more than the run has where even all do not fit."""
        earlier = max(policy - 1, 0)
        stacks = (self._stacked(kept, policy), self._stacked(kept, earlier))
        first_F = self._first_F
        least_KFS = _least(*stacks, first_F, room_KFS / live_K)
        if self._one_KF.any():
            joined = (
                self._stacked("joined_PS", policy),
                self._stacked("joined_PS", earlier),
            )
            more_KF = self._stacked("more_PF", policy)
            if policy:
                more_KF = np.maximum(more_KF, self._stacked("more_PF", earlier))
            more_KF = more_KF[:, self._rows]
            room_KF1 = room_KFS[..., LAST] - more_KF[..., None]
            least_KF = _least(*joined, first_F, room_KF1, LAST)[..., 0]
            least_KFS[..., -1] = np.where(self._one_KF, least_KF, least_KFS[..., -1])
        return least_KFS

    def _seconds(
        self,
        policy_KFS: Int[np.ndarray, "tables layers stops"],
        count_KFS: Int[np.ndarray, "tables layers stops"],
    ) -> Float[np.ndarray, "tables layers stops"]:
        seconds_KFS = np.stack(
            [arrays.seconds_FS[self._rows] for arrays in self._arrays]
        )
        for policy in range(len(self._remat)):
            chosen_KFS = policy_KFS == policy
            if policy and not chosen_KFS.any():
                continue
            added_KFS = self._two_policies("added_s_PS", policy, count_KFS)
            if self._ends_K1.any():
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
        middle_KFS = np.minimum(self._first_F[:, None] + count_KFS, num_stops - 1)
        middle_KFS += (np.arange(num_tables) * num_stops)[:, None, None]
        change_KFS = (here_KS - later_KS).ravel()[middle_KFS]
        return change_KFS - here_KS[:, self._first_F, None] + later_KS[:, None, :]

    def _quickened(
        self, seconds_KFS: Float[np.ndarray, "tables layers stops"]
    ) -> Float[np.ndarray, "tables layers stops"]:
        """Seconds where more layers than must be take the second policy.

        What the first keeps it writes and reads again if forward and backward are
        programs of their own, which may take longer than to recompute it.
        """
        if not any(arrays.second_is_quicker for arrays in self._arrays):
            return seconds_KFS
        count_KFS = np.broadcast_to(self._length_FS, seconds_KFS.shape).copy()
        num_layers = len(self._arrays[0].params_L)
        last_KF = np.where(self._ends_K1, self._last_F, num_layers)
        must_KF = np.where(self._policy_KFS[..., -1] == 1, self._count_KFS[..., -1], 0)
        count_KFS[..., -1] = np.maximum(last_KF - self._first_F, must_KF)
        second_KFS = np.ones_like(self._policy_KFS)
        quick_KFS = self._seconds(second_KFS, count_KFS)
        gained_KFS = (self._policy_KFS <= 1) & (quick_KFS < seconds_KFS)
        self._policy_KFS = np.where(gained_KFS, 1, self._policy_KFS)
        self._count_KFS = np.where(gained_KFS, count_KFS, self._count_KFS)
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
        middle_KF = np.maximum(self._first_F + count_KF, self._last_F)
        middle_KF = np.minimum(middle_KF, here_KS.shape[1] - 1)
        change_KF = np.take_along_axis(here_KS - later_KS, middle_KF, axis=1)
        return change_KF - here_KS[:, self._last_F] + later_KS[:, -1:]


def _least(
    here_KS: Float[np.ndarray, "tables stops"],
    later_KS: Float[np.ndarray, "tables stops"],
    first_F: Int[np.ndarray, " layers"],
    room_KFX: Float[np.ndarray, "tables layers stops"],
    stops: slice = ALL,
) -> Int[np.ndarray, "tables layers stops"]:
    """The least count with which a run of two policies is within a room.

    More layers under a smaller policy keep less, so one search in what the change of
    policy saves answers all runs.
    """
    saved_KS = later_KS - here_KS
    asked_KFX = later_KS[:, None, stops] - here_KS[:, first_F, None] - room_KFX
    middle_KFX = np.stack(
        [s.searchsorted(a) for s, a in zip(saved_KS, asked_KFX, strict=True)]
    )
    return np.maximum(middle_KFX - first_F[:, None], 0)
