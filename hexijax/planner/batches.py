"""Divides the global batch over replicas of unlike speed, exactly.

    batch size, pace of each replica -> split_batch -> BatchShare each

A replica ends at ``first_s + (microbatches - 1) * next_s``. The last end is made as
early as can be, over whole numbers: for a deadline every replica's capacity is known,
so the earliest deadline with room for the batch is found by bisection over the ends
there are.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchOption:
    """One microbatch size of a replica, and how long it takes."""

    size: int
    """Samples in a microbatch, over all lanes."""

    first_s: float
    """Until the first microbatch is through."""

    next_s: float
    """What each further microbatch adds."""

    def end_s(self, microbatches: int) -> float:
        """When the last of some microbatches is through."""
        return self.first_s + (microbatches - 1) * self.next_s

    def capacity(self, deadline_s: float, most: int) -> int:
        """Most microbatches that end in time, up to ``most``; by ``end_s`` itself."""
        ends = _Ends(self, most)
        return bisect.bisect_right(ends, deadline_s)


class _Ends(Sequence[float]):
    """Ends of 1, 2, ... microbatches, computed where they are looked at."""

    def __init__(self, option: BatchOption, most: int) -> None:
        self._option = option
        self._most = most

    def __len__(self) -> int:
        return self._most

    def __getitem__(self, index: int) -> float:  # pyrefly: ignore
        return self._option.end_s(index + 1)


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
    deadline_s = _deadline_s(batch_size, replicas)
    rooms = [_room(options, deadline_s, batch_size) for options in replicas]
    # A replica with room beyond its part gives back to end earlier: fill in proportion.
    samples = _fill(batch_size, [room for room, _ in rooms])
    return tuple(
        _share(options, deadline_s, count)
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


def _deadline_s(batch_size: int, replicas: Sequence[Sequence[BatchOption]]) -> float:
    """The earliest end by which the replicas can take the whole batch."""
    options = [option for replica in replicas for option in replica]
    # Bisect each option's ends in turn between the best bounds known.
    low, high = _floor_s(replicas), math.inf
    if _total(replicas, low, batch_size) >= batch_size:
        return low
    for option in options:
        most = -(-batch_size // option.size)
        ends = _Ends(option, most)
        left = bisect.bisect_right(ends, low)
        right = bisect.bisect_left(ends, high) if high < math.inf else most
        while left < right:
            middle = (left + right) // 2
            if _total(replicas, ends[middle], batch_size) >= batch_size:
                high, right = min(high, ends[middle]), middle
            else:
                low, left = max(low, ends[middle]), middle + 1
    return high


def _floor_s(replicas: Sequence[Sequence[BatchOption]]) -> float:
    """No deadline is earlier: every replica takes at least one microbatch."""
    return max(min(option.first_s for option in options) for options in replicas)


def _room(
    options: Sequence[BatchOption], deadline_s: float, batch_size: int
) -> tuple[int, int]:
    """Most samples a replica can take in time, and by which option."""
    rooms = [
        option.size * option.capacity(deadline_s, -(-batch_size // option.size))
        for option in options
    ]
    best = max(range(len(rooms)), key=lambda i: rooms[i])
    return min(rooms[best], batch_size), best


def _total(
    replicas: Sequence[Sequence[BatchOption]], deadline_s: float, batch_size: int
) -> int:
    return sum(_room(options, deadline_s, batch_size)[0] for options in replicas)


def _fill(batch_size: int, rooms: Sequence[int]) -> list[int]:
    """At least one sample each, else in proportion to room; sums to the batch."""
    total = sum(rooms)
    counts = [max(1, batch_size * room // total) for room in rooms]
    for i in sorted(range(len(rooms)), key=lambda i: counts[i] - rooms[i]):
        change = batch_size - sum(counts)
        counts[i] = min(max(1, counts[i] + change), rooms[i])
    assert sum(counts) == batch_size
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
