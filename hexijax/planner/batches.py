"""Divides the global batch over replicas of unlike speed, exactly.

    batch size, pace of each replica -> split_batch -> BatchShare each

A replica ends at ``first_s + (microbatches - 1) * next_s``. The last end is made as
early as can be, over whole numbers: for a deadline every replica's capacity is known,
so the earliest deadline with room for the batch is found by bisection over the ends
there are.
"""

import dataclasses
import operator
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchOption:
    """One microbatch size of a replica, and how long it takes."""

    size: int
    """Samples in a microbatch, over all lanes."""

    first_s: float
    """Until the first microbatch is through."""

    next_s: float
    """What each further microbatch adds."""

    def no_faster(self, pace_s: float) -> "BatchOption":
        """The same where a microbatch takes so long for another reason."""
        if pace_s <= self.next_s:
            return self
        return dataclasses.replace(self, next_s=pace_s)

    def end_s(self, microbatches: int) -> float:
        """When the last of some microbatches is through."""
        return self.first_s + (microbatches - 1) * self.next_s

    def ends_s(self, batch_size: int) -> Float[np.ndarray, " microbatches"]:
        """When 1, 2, ... microbatches are through, up to the whole batch."""
        most = -(-batch_size // self.size)
        return self.first_s + np.arange(most) * self.next_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchShare:
    """What one replica takes."""

    option: int
    """Index of its option."""

    microbatches: int
    """How many."""

    samples: int
    """Real samples; the rest of the last microbatch is padding."""


def split_batch(
    batch_size: int, replicas: Sequence[Sequence[BatchOption]]
) -> tuple[BatchShare, ...] | None:
    """Shares that sum to the batch and end earliest; None if a replica would get none.

    Args:
      batch_size: samples of the global batch.
      replicas: the options of each replica.
    """
    if batch_size < len(replicas) or not all(replicas):
        return None
    rooms = _Rooms(batch_size, replicas)
    deadline_s = rooms.deadline_s()
    # A replica with room beyond its part gives back to end earlier: fill in proportion.
    samples = _fill(batch_size, rooms.at(deadline_s))
    shares: dict[tuple[int, int], BatchShare] = {}
    for options, count in zip(replicas, samples, strict=True):
        key = (id(options), count)
        if key not in shares:
            shares[key] = _share(options, deadline_s, count)
    return tuple(
        shares[id(options), count]
        for options, count in zip(replicas, samples, strict=True)
    )


def end_s(
    shares: Sequence[BatchShare], replicas: Sequence[Sequence[BatchOption]]
) -> float:
    """When the last replica ends."""
    return max(
        options[share.option].end_s(share.microbatches)
        for share, options in zip(shares, replicas, strict=True)
    )


class _Rooms:
    """How many samples each replica can take by a deadline; equal replicas once."""

    def __init__(
        self, batch_size: int, replicas: Sequence[Sequence[BatchOption]]
    ) -> None:
        self._batch_size = batch_size
        alike: dict[tuple[BatchOption, ...], int] = {}
        seen: dict[int, int] = {}  # the lists of equal replicas often are one
        for options in replicas:
            if id(options) not in seen:
                seen[id(options)] = alike.setdefault(tuple(options), len(alike))
        self._alike_R = [seen[id(options)] for options in replicas]
        self._counts = np.bincount(self._alike_R).tolist()
        self._ends_s = [
            [(option.size, option.ends_s(batch_size)) for option in options]
            for options in alike
        ]

    def at(self, deadline_s: float) -> list[int]:
        """Samples, by the option that takes most, up to the whole batch."""
        rooms = self._rooms(deadline_s)
        return [rooms[i] for i in self._alike_R]

    def deadline_s(self) -> float:
        """The earliest end by which all take at least one and together the batch."""
        ends_s = np.unique(
            np.concatenate([ends_s for found in self._ends_s for _, ends_s in found])
        )
        low, high = 0, len(ends_s) - 1
        while low < high:
            middle = (low + high) // 2
            rooms = self._rooms(float(ends_s[middle]))
            total = sum(map(operator.mul, self._counts, rooms))
            if min(rooms) >= 1 and total >= self._batch_size:
                high = middle
            else:
                low = middle + 1
        return float(ends_s[low])

    def _rooms(self, deadline_s: float) -> list[int]:
        """Samples by a deadline, of each of the unlike replicas."""
        return [
            min(
                self._batch_size,
                max(
                    size * int(ends_s.searchsorted(deadline_s, "right"))
                    for size, ends_s in found
                ),
            )
            for found in self._ends_s
        ]


def _fill(batch_size: int, rooms: Sequence[int]) -> list[int]:
    """At least one sample each, else in proportion to room; sums to the batch."""
    total = sum(rooms)
    counts = [max(1, batch_size * room // total) for room in rooms]
    change = batch_size - sum(counts)
    for i in sorted(range(len(rooms)), key=lambda i: counts[i] - rooms[i]):
        count = min(max(1, counts[i] + change), rooms[i])
        change -= count - counts[i]
        counts[i] = count
    assert not change
    return counts


def _share(
    options: Sequence[BatchOption], deadline_s: float, samples: int
) -> BatchShare:
    """The option that takes these samples soonest; the larger size of equals."""
    counts = [-(-samples // option.size) for option in options]
    best = min(
        range(len(options)),
        key=lambda i: (options[i].end_s(counts[i]), -options[i].size),
    )
    assert options[best].end_s(counts[best]) <= deadline_s
    return BatchShare(option=best, microbatches=counts[best], samples=samples)
