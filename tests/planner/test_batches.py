"""The global batch over replicas: exact, and no later than need be."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from hexijax.planner.batches import BatchOption, end_s, split_batch


def brute_force(batch_size: int, replicas: list[list[BatchOption]]) -> float:
    """The earliest end over all splits into at least one sample a replica."""
    earliest = [
        [
            min(o.end_s(-(-samples // o.size)) for o in options)
            for samples in range(1, batch_size + 1)
        ]
        for options in replicas
    ]
    best = float("inf")
    for inner in itertools.combinations(range(1, batch_size), len(replicas) - 1):
        edges = [0, *inner, batch_size]
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        best = min(best, max(e[n - 1] for e, n in zip(earliest, sizes, strict=True)))
    return best


@given(seed=st.integers(0, 10**6))
def test_no_split_ends_earlier(seed: int):
    rng = random.Random(seed)
    replicas = [
        [
            BatchOption(
                size=rng.randint(1, 5),
                first_s=rng.choice([1.0, 2.5, rng.random()]),
                next_s=rng.choice([0.1, 1.0, rng.random()]),
            )
            for _ in range(rng.randint(1, 3))
        ]
        for _ in range(rng.randint(1, 4))
    ]
    batch_size = rng.randint(1, 14)
    shares = split_batch(batch_size, replicas)
    if batch_size < len(replicas):
        assert shares is None
        return
    assert shares is not None
    assert sum(share.samples for share in shares) == batch_size
    for share, options in zip(shares, replicas, strict=True):
        size = options[share.option].size
        assert (share.microbatches - 1) * size < share.samples
        assert share.samples <= share.microbatches * size
    assert end_s(shares, replicas) == brute_force(batch_size, replicas)


def test_shares_follow_speed():
    fast = BatchOption(size=2, first_s=1.0, next_s=1.0)
    slow = BatchOption(size=2, first_s=3.0, next_s=3.0)
    shares = split_batch(24, [[fast], [slow]])
    assert shares is not None
    assert [share.samples for share in shares] == [18, 6]


def test_a_replica_that_fits_nowhere_gets_nothing():
    assert split_batch(4, [[BatchOption(size=1, first_s=1.0, next_s=1.0)], []]) is None
