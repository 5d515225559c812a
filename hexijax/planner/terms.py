"""Memory of every run of layers as one stage, but for what its layers keep.

    LayerArrays, Load -> Fixed.bytes_FS(Asked)

An upper bound of ``costs.memory``'s promise that can be summed layer by layer.

Arrays: L layers, F first layer, S the one past the last.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from hexijax.costs.activations import BORDERS_IN_FLIGHT, BORDERS_PASSING, Waiting
from hexijax.costs.sums import (
    GRAD_BYTES,
    GROUPS_IN_FLIGHT,
    PASSES,
    STATE_BYTES,
    alone_bytes,
    flying_bytes,
)
from hexijax.layers.chain import Remat
from hexijax.planner.arrays import LayerArrays
from hexijax.planner.layers import Span
from hexijax.planner.regime import PLAIN, Regime
from hexijax.program.buckets import ALONE_SIZE, shared_size


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

    regime: Regime = PLAIN
    """What passes over a segment keep."""


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

    arrays: LayerArrays
    """Of the mesh, for a size of microbatch."""

    state_devices: float
    """Devices over which each parameter's state is spread."""

    budget_bytes: int
    """What one device has for this stage."""

    held: Held
    """What waits there."""

    sharing: int = 1
    """Stages of the replica on the same devices, one of which computes."""

    whole: bool = False
    """Only runs from the first layer on are asked for."""


def is_joined(held: Held, regime: Regime) -> bool:
    """Whether the loss's segment runs both ways at once, in a stage that holds so."""
    return held.live == 1 or regime.layered


def kept_name(load: Load) -> str:
    """Of the arrays that say what layers keep; nothing of what enters, where each is a
    segment."""
    return "apart_PS" if load.regime.layered and load.per_segment == 1 else "kept_PS"


def segments_FS(
    arrays: LayerArrays, per_segment: int | None
) -> Int[np.ndarray, "layers stops"]:
    """Of each run of layers; one where it is empty."""
    most = per_segment or len(arrays.params_L)
    return -(-np.maximum(arrays.length_FS, 1) // most)


Chosen = tuple[int, int]
"""Index of a policy, and how many of a run's first layers take it; the rest take the
one before."""


def has_room(asked: Asked, load: Load, span: Span, chosen: Chosen) -> bool:
    """Whether a run of layers fits under what was chosen for it."""
    (first, stop), (policy, count) = span, chosen
    arrays, held, policies = asked.arrays, asked.held, (policy, max(policy - 1, 0))
    fixed = Fixed.of(arrays, load)
    room_bytes = asked.budget_bytes - fixed.bytes_FS(asked, span)
    last = stop == len(arrays.params_L)
    if last and is_joined(held, load.regime) and fixed.segments_FS[span] == 1:
        kept_PS, live = arrays.joined_PS, 1
        room_bytes -= max(arrays.more_PF[p, first] for p in policies)
    else:
        kept_PS, live = getattr(arrays, kept_name(load)), held.live
    here_S, later_S = (kept_PS[p] for p in policies)
    middle = first + count
    kept = here_S[middle] - here_S[first] + later_S[stop] - later_S[middle]
    return bool(kept * live <= room_bytes)


def _state_bytes(load: Load) -> int:
    """Of a parameter: its fp32 value and the optimizer's."""
    return STATE_BYTES * (1 + load.moments)


def _bucket_limit(arrays: LayerArrays, load: Load) -> int:
    """Parameters of a bucket that several arrays share."""
    if load.members == 1:
        return ALONE_SIZE
    return shared_size(int(arrays.whole_params_FS[0, -1]))


def _flying_bytes(arrays: LayerArrays, load: Load) -> tuple[float, float]:
    """Of a bucket's parameter on its way: at its home, and on every device."""
    item = arrays.item_bytes
    if load.members == 1:
        return 0.0, alone_bytes(1, 1, item, arrays.lanes)
    home, shard = (flying_bytes(*x, load.members, item) for x in ((1, 0), (0, 1)))
    return home, shard


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Of a bucket over replicas, in a stage of one segment: they begin when the last
    microbatch has left its program, of which nothing is in memory then."""

    bucket_FS: Float[np.ndarray, "layers stops"]
    """Parameters."""
    home: float
    """Bytes in flight of each at home."""
    shard: float
    """And of each that the stage computes with."""
    item_bytes: int
    """New, in the compute dtype."""
    members: int
    """Stages that send gradients, perhaps early."""
    inside_FS: Float[np.ndarray, "layers stops"]
    """Bytes alive in the program, what layers keep left out."""

    def bytes_FS(
        self, state_devices: float, at: Any, alive_FS: Any | None
    ) -> Float[np.ndarray, "layers stops"]:
        """Beside all else.

        Args:
          state_devices: over which a parameter's state is spread.
          at: which runs of layers.
          alive_FS: activations that are gone by then; None: others are there.
        """
        bucket_FS = self.bucket_FS[at]
        flying_FS = bucket_FS * (self.shard + self.home / state_devices)
        if alive_FS is None:
            return flying_FS
        early = GRAD_BYTES * self.members / state_devices
        staying = max(self.item_bytes * (1 + 1 / state_devices), early)
        gone_FS = self.inside_FS[at] + alive_FS
        more_FS = bucket_FS * GROUPS_IN_FLIGHT * staying
        return np.maximum(flying_FS - gone_FS, more_FS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fixed:
    """Parts of the terms of ``costs.memory``, for every run of layers.

    Bytes are ``fixed_FS + passing_FS / sharing + homed_FS / state_devices + live *
    live_FS + handed * handed_FS``, kept activations and what waits left out, and what
    ``sums`` add.
    """

    segments_FS: Int[np.ndarray, "layers stops"]
    fixed_FS: Float[np.ndarray, "layers stops"]
    passing_FS: Float[np.ndarray, "layers stops"]
    """Of the stage that computes."""
    homed_FS: Float[np.ndarray, "layers stops"]
    live_FS: Float[np.ndarray, "layers stops"]
    handed_FS: Float[np.ndarray, "layers stops"]
    sums: "Sums | None" = None
    """Of replicas, where they are no part of the others."""

    @classmethod
    def of(cls, arrays: LayerArrays, load: Load) -> "Fixed":
        """Under a load; equal loads are reckoned once."""
        made = arrays.known.get(load)
        if not isinstance(made, cls):
            made = cls._layered(arrays, load) if load.regime.layered else None
            made = made or cls._plain(arrays, load)
            arrays.known[load] = made
        return made

    @classmethod
    def _plain(cls, arrays: LayerArrays, load: Load) -> "Fixed":
        most = load.per_segment or len(arrays.params_L)
        count_FS = segments_FS(arrays, load.per_segment)
        # A bucket's boxes at home, of which no device has more than its whole gradient.
        shared_FS = np.minimum(arrays.params_FS, _bucket_limit(arrays, load))
        bucket_FS = np.maximum(arrays.largest_FS, shared_FS)
        home, shard = _flying_bytes(arrays, load)
        inside_FS = _temp_FS(arrays, most)
        inside_FS += BORDERS_IN_FLIGHT * (arrays.edges_FS + arrays.batch_bytes)
        fixed_FS = arrays.held_FS + arrays.params_FS * GRAD_BYTES + inside_FS
        homed_FS = arrays.whole_params_FS * _state_bytes(load)
        sums = None
        if load.members > 1 and load.per_segment is None:
            of = home, shard, arrays.item_bytes, load.members
            sums = Sums(bucket_FS, *of, inside_FS)
        else:
            fixed_FS, homed_FS = (
                fixed_FS + bucket_FS * shard,
                homed_FS + bucket_FS * home,
            )
        return cls(
            segments_FS=count_FS,
            fixed_FS=fixed_FS,
            passing_FS=np.zeros_like(arrays.params_FS),
            homed_FS=homed_FS,
            live_FS=count_FS * arrays.most_entering_FS + arrays.batch_bytes,
            handed_FS=arrays.handed_FS + arrays.batch_bytes,
            sums=sums,
        )

    @classmethod
    def _layered(cls, arrays: LayerArrays, load: Load) -> "Fixed":
        """Where each segment runs all microbatches before the next."""
        regime = load.regime
        most = load.per_segment or len(arrays.params_L)
        count_FS = segments_FS(arrays, load.per_segment)
        segment_FS = np.minimum(arrays.params_FS, most * arrays.largest_FS)
        bucket_FS = np.minimum(segment_FS, _bucket_limit(arrays, load))
        bucket_FS = np.maximum(arrays.largest_FS, bucket_FS)
        home, shard = _flying_bytes(arrays, load)
        fixed_FS = arrays.held_FS
        fixed_FS = fixed_FS + BORDERS_IN_FLIGHT * (arrays.edges_FS + arrays.batch_bytes)
        passing_FS = _temp_FS(arrays, most) + bucket_FS * shard
        passing_FS[:, -1] += arrays.last_bytes
        if regime.freed:
            largest_FS = np.minimum(arrays.trained_FS, most * arrays.most_trained_FS)
            fixed_FS = fixed_FS - arrays.trained_FS
            passing_FS += PASSES * largest_FS
        homed_FS = arrays.whole_params_FS * _state_bytes(load) + bucket_FS * home
        if load.members == 1 and arrays.lanes == 1:  # accumulators are the sums
            fixed_FS = fixed_FS + arrays.params_FS * GRAD_BYTES
        else:
            passing_FS += PASSES * segment_FS * GRAD_BYTES
            homed_FS = homed_FS + arrays.whole_params_FS * GRAD_BYTES
        entering_FS = arrays.enter_S[:-1, None]
        if regime.waits:
            passing_FS += BORDERS_PASSING * arrays.most_entering_FS
        elif most == 1:
            entering_FS = arrays.entering_FS
        elif load.per_segment is not None:
            entering_FS = count_FS * arrays.most_entering_FS
        return cls(
            segments_FS=count_FS,
            fixed_FS=fixed_FS,
            passing_FS=passing_FS,
            homed_FS=homed_FS,
            live_FS=entering_FS + np.zeros_like(fixed_FS) + arrays.batch_bytes,
            handed_FS=arrays.handed_FS + arrays.batch_bytes,
        )

    def bytes_FS(
        self, asked: Asked, at: Any = ...
    ) -> Float[np.ndarray, "layers stops"]:
        """Of a stage, beside what its layers keep; of all runs, or of those ``at``."""
        arrays, held = asked.arrays, asked.held
        sum_FS = self.fixed_FS[at] + self.homed_FS[at] / asked.state_devices
        sum_FS += self.passing_FS[at] / asked.sharing
        sum_FS += held.live * self.live_FS[at]
        if held.handed:
            sum_FS += held.handed * self.handed_FS[at]
        waiting = held.waiting
        if waiting.left:
            sum_FS += waiting.left * arrays.left_FS[at]
        if waiting.right:
            sum_FS += waiting.right * arrays.right_FS[at]
        sum_FS += waiting.batch * arrays.batch_bytes
        if self.sums:
            alive_FS = None
            if asked.sharing == 1 and not held.handed:
                alive_FS = held.live * self.live_FS[at]
            sum_FS += self.sums.bytes_FS(asked.state_devices, at, alive_FS)
        return sum_FS


def _temp_FS(arrays: LayerArrays, most: int) -> Float[np.ndarray, "layers stops"]:
    """Alive inside a program of at most so many layers."""
    waiting = min(most, arrays.waiting_layers)
    segment_FS = np.minimum(arrays.trained_FS, arrays.most_trained_FS * waiting)
    early_FS = np.minimum(arrays.early_FS, arrays.most_early_FS * most)
    temp_FS = segment_FS + early_FS + arrays.working_FS
    return arrays.temp_factor * temp_FS + arrays.scratch_bytes
