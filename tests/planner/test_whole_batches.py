"""The global batch in whole microbatches: no padding, and no later than need be."""

import itertools
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.checks import check_whole
from hexijax.plan.plan import PlanError
from hexijax.planner import PlanOptions, make_plan
from hexijax.planner.batches import BatchOption, end_s
from hexijax.planner.whole_batches import split_whole
from hexijax.published.cephalo import GoldenCase, golden_cases
from tests.plan.examples import make_chain, make_cluster, make_kind
from tests.public_data import FOLDER, needs_public_data

CASES = golden_cases(FOLDER) if os.environ.get("HEXIJAX_DATA") else ()


def brute_force(batch_size: int, replicas: list[list[BatchOption]]) -> float:
    """The earliest end over all splits, infinite where no sizes sum to the batch."""
    best = float("inf")
    for samples in itertools.product(range(1, batch_size + 1), repeat=len(replicas)):
        if sum(samples) == batch_size:
            ends_s = [
                min(
                    (o.end_s(n // o.size) for o in options if n % o.size == 0),
                    default=float("inf"),
                )
                for n, options in zip(samples, replicas, strict=True)
            ]
            best = min(best, max(ends_s))
    return best


@given(seed=st.integers(0, 10**6))
def test_no_whole_split_ends_earlier(seed: int):
    rng = random.Random(seed)
    replicas = [
        [
            BatchOption(
                size=rng.randint(1, 4),
                first_s=rng.choice([1.0, 2.5, rng.random() + 0.1]),
                next_s=rng.choice([0.1, 1.0, rng.random()]),
            )
            for _ in range(rng.randint(1, 3))
        ]
        for _ in range(rng.randint(1, 3))
    ]
    batch_size = rng.randint(1, 12)
    best_s = brute_force(batch_size, replicas)
    shares = split_whole(batch_size, replicas)
    if shares is None:
        assert best_s == float("inf")
        return
    assert sum(share.samples for share in shares) == batch_size
    for share, options in zip(shares, replicas, strict=True):
        assert share.samples == share.microbatches * options[share.option].size
    assert end_s(shares, replicas) == best_s


def test_sizes_that_cannot_sum_to_the_batch_give_nothing():
    even = BatchOption(size=2, first_s=1.0, next_s=1.0)
    assert split_whole(5, [[even], [even]]) is None
    assert split_whole(1, [[even], [even]]) is None
    assert split_whole(4, [[even], []]) is None


def options(case: GoldenCase) -> list[list[BatchOption]]:
    """Every microbatch size of every device of a published case."""
    return [
        [
            BatchOption(size=m, first_s=device.first_s(m), next_s=device.next_s(m))
            for m in range(1, case.batch_size + 1)
        ]
        for device in case.devices
    ]


@needs_public_data
def test_published_cycles_are_reached_exactly():
    for case in CASES:
        replicas = options(case)
        shares = split_whole(case.batch_size, replicas)
        assert shares is not None
        cycle_s = end_s(shares, replicas)
        assert cycle_s == pytest.approx(case.optimal_cycle_s, rel=1e-9), case.name


@needs_public_data
def test_two_l4_an_a6000_and_a_p40_share_64_samples_as_published():
    case = next(case for case in CASES if case.name.startswith("row7/"))
    replicas = options(case)
    shares = split_whole(case.batch_size, replicas)
    assert shares is not None
    samples = tuple(share.samples for share in shares)
    assert samples == case.optimal_samples == (13, 12, 34, 5)
    assert round(end_s(shares, replicas) * 1e3, 1) == 342.3


KINDS = (make_kind("fast", tflops=10), make_kind("slow", tflops=2.5))


@pytest.mark.parametrize("batch_size", [13, 37])
def test_a_plan_of_losses_by_microbatch_never_pads(batch_size: int):
    chain = make_chain(6, width=256, rows=512, block_flops=1e8)
    cluster = make_cluster([[("fast", 2)], [("slow", 3)]], kinds=KINDS)
    options = PlanOptions(per_microbatch=True)
    plan = make_plan(chain, cluster, batch_size=batch_size, options=options)
    check_whole(plan)
    assert sum(replica.samples for replica in plan.replicas) == batch_size


def test_losses_over_samples_may_pad_or_cut_lanes_in_unlike_ways():
    chain = make_chain(6, width=256, rows=512, block_flops=1e8)
    cluster = make_cluster([[("fast", 2)], [("slow", 3)]], kinds=KINDS)
    plan = make_plan(chain, cluster, batch_size=37)
    with pytest.raises(PlanError, match="is padding|lanes, and with per_microbatch"):
        check_whole(plan)
