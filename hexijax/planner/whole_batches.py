"""Divides the global batch in whole microbatches: no replica pads its last one.

    batch size, pace of each replica -> split_whole -> BatchShare each

Samples are ``microbatches * size``, so a replica may need longer for 13 samples than
for 14, and more time never means room for every smaller number. For a deadline, the
sums that replicas can reach are known (as bits of one number), so the earliest deadline
at which they reach the batch is found by bisection. Of the splits that meet it, one in
which few others end as late is taken, by dynamic programming over (replica, samples so
far): O(R * B^2) for R replicas and a batch of B.
"""

import bisect
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from hexijax.planner.batches import BatchOption, BatchShare

LATENESS = 64
"""Power of an end over the deadline that is summed over replicas: so high that the
second latest end counts before all that are earlier."""


def split_whole(
    batch_size: int, replicas: Sequence[Sequence[BatchOption]]
) -> tuple[BatchShare, ...] | None:
    """Shares of whole microbatches that sum to the batch and end earliest.

    None if there are none, with at least one sample for every replica.
    """
    if batch_size < len(replicas) or not all(replicas):
        return None
    ends = _Ends(batch_size, replicas)
    deadline_s = ends.deadline_s()
    if deadline_s is None:
        return None
    shares: list[BatchShare] = []
    for options, samples in zip(replicas, ends.least_late(deadline_s), strict=True):
        best = min(
            (i for i, option in enumerate(options) if samples % option.size == 0),
            key=lambda i: (
                options[i].end_s(samples // options[i].size),
                -options[i].size,
            ),
        )
        count = samples // options[best].size
        shares.append(BatchShare(option=best, microbatches=count, samples=samples))
    return tuple(shares)


class _Ends:
    """When each replica ends for every number of samples; equal replicas once."""

    def __init__(
        self, batch_size: int, replicas: Sequence[Sequence[BatchOption]]
    ) -> None:
        self._batch_size = batch_size
        self._replicas = [tuple(options) for options in replicas]
        self._ends_s = {
            options: _ends_s(batch_size, options) for options in set(self._replicas)
        }

    def deadline_s(self) -> float | None:
        """The earliest at which the replicas' samples can sum to the batch."""
        ends_s = np.unique(np.concatenate(list(self._ends_s.values())))
        ends_s = ends_s[np.isfinite(ends_s)]
        first = bisect.bisect_left(ends_s, True, key=self._reaches)
        return float(ends_s[first]) if first < len(ends_s) else None

    def _reaches(self, deadline_s: float) -> bool:
        """Whether the batch is among the sums, of which bit n says that n is."""
        counts = {
            options: np.flatnonzero(ends_s <= deadline_s).tolist()
            for options, ends_s in self._ends_s.items()
        }
        sums, within = 1, (1 << (self._batch_size + 1)) - 1
        for options in self._replicas:
            more = 0
            for count in counts[options]:
                more |= sums << count
            sums = more & within
        return bool(sums >> self._batch_size & 1)

    def least_late(self, deadline_s: float) -> list[int]:
        """Samples of each replica; of equals the first replicas take most."""
        total = self._batch_size
        before = np.full(total + 1, np.inf)
        before[0] = 0.0
        taken: list[np.ndarray] = []
        for options in reversed(self._replicas):
            ends_s = self._ends_s[options]
            late = np.where(
                ends_s <= deadline_s, (ends_s / deadline_s) ** LATENESS, np.inf
            )
            # whole[n, k]: this replica takes k of the n that it and those after do.
            index = np.arange(total + 1)
            rest = index[:, None] - index[None, :]
            rest_late = np.where(rest >= 0, before[np.maximum(rest, 0)], np.inf)
            whole = rest_late + late[None, :]
            most = total - whole[:, ::-1].argmin(axis=1)  # the last of equals
            taken.append(most)
            before = whole[index, most]
        samples: list[int] = []
        for most in reversed(taken):
            samples.append(int(most[total]))
            total -= samples[-1]
        assert total == 0, "the deadline was met"
        return samples


def _ends_s(
    batch_size: int, options: Sequence[BatchOption]
) -> Float[np.ndarray, " samples"]:
    """``[n]``: the earliest end of exactly n samples; infinite where no size does."""
    earliest_s = np.full(batch_size + 1, np.inf)
    for option in options:
        most = batch_size // option.size
        ends_s = option.ends_s(most * option.size)
        at = np.arange(1, most + 1) * option.size
        earliest_s[at] = np.minimum(earliest_s[at], ends_s)
    return earliest_s
