"""Layers over stages: each exactly once, in order, and no slower than need be."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.planner.layers import Span, split_layers
from hexijax.planner.segments import layers_per_segment, segments


def by_sums(weights: list[float], speeds: list[float]) -> list[np.ndarray]:
    """Seconds of every run of layers on each stage: weights over the stage's speed."""
    num_layers = len(weights)
    costs = [np.full((num_layers, num_layers + 1), np.inf) for _ in speeds]
    for cost, speed in zip(costs, speeds, strict=True):
        for first, stop in itertools.combinations(range(num_layers + 1), 2):
            cost[first, stop] = sum(weights[first:stop]) / speed
    return costs


def check_spans(spans: tuple[Span, ...], num_layers: int, num_stages: int) -> None:
    """Every layer in exactly one stage, in order, none empty."""
    assert len(spans) == num_stages
    assert [i for span in spans for i in range(*span)] == list(range(num_layers))
    assert all(start < stop for start, stop in spans)


@given(num_layers=st.integers(1, 64), num_stages=st.integers(1, 8))
def test_every_layer_sits_in_exactly_one_stage(num_layers: int, num_stages: int):
    spans = split_layers(by_sums([1.0] * num_layers, [1.0] * num_stages))
    if num_stages > num_layers:
        assert spans is None
        return
    assert spans is not None
    check_spans(spans, num_layers, num_stages)
    # Equal layers on equal devices: the longest is what division leaves it.
    assert max(b - a for a, b in spans) == math.ceil(num_layers / num_stages)


@pytest.mark.parametrize(
    ("num_layers", "num_stages"), [(30, 4), (10, 3), (42, 16), (7, 7)]
)
def test_splits_that_lost_layers_elsewhere(num_layers: int, num_stages: int):
    costs = by_sums([1.0] * num_layers, [1.0] * num_stages)
    spans = split_layers(costs)
    assert spans is not None
    check_spans(spans, num_layers, num_stages)


def brute_force(costs: list[np.ndarray]) -> float:
    """The pace of the best of all splits."""
    num_stages, num_layers = len(costs), costs[0].shape[0]
    paces = []
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        edges = [0, *inner, num_layers]
        paces.append(max(costs[k][edges[k], edges[k + 1]] for k in range(num_stages)))
    return min(paces)


@given(seed=st.integers(0, 10**6))
def test_no_split_is_faster(seed: int):
    rng = random.Random(seed)
    num_stages = rng.randint(1, 4)
    num_layers = rng.randint(num_stages, 9)
    weights = [rng.choice([1.0, 1.0, 2.0, rng.random()]) for _ in range(num_layers)]
    weights[-1] *= rng.choice([1, 5])
    speeds = [rng.choice([1.0, 2.0, 4.8]) for _ in range(num_stages)]
    costs = by_sums(weights, speeds)
    for cost in costs:  # memory: no more layers than so many
        length = np.arange(num_layers + 1)[None, :] - np.arange(num_layers)[:, None]
        cost[length > rng.randint(1, num_layers)] = np.inf
    spans = split_layers(costs)
    expected = brute_force(costs)
    if spans is None:
        assert expected == math.inf
        return
    check_spans(spans, num_layers, num_stages)
    assert max(costs[k][span] for k, span in enumerate(spans)) == expected


def test_a_head_of_five_blocks_gets_a_stage_of_its_own():
    weights = [0.1, *[1.0] * 8, 5.0]
    costs = by_sums(weights, [1.0] * 3)
    spans = split_layers(costs)
    assert spans is not None
    assert spans[-1] == (9, 10)
    assert max(costs[k][span] for k, span in enumerate(spans)) == 5


def test_layers_follow_speed():
    spans = split_layers(by_sums([1.0] * 29, [4.8, 1.0]))
    assert spans == ((0, 24), (24, 29))


def test_of_equal_paces_the_least_work_is_chosen():
    # Whatever the second stage takes up to 4 layers hides behind the first.
    spans = split_layers(by_sums([1.0] * 4, [0.25, 1.0, 10.0]))
    assert spans == ((0, 1), (1, 2), (2, 4))


@given(num_layers=st.integers(1, 64), most=st.none() | st.integers(1, 9))
def test_segments_cover_a_stage_evenly(num_layers: int, most: int | None):
    found = segments(num_layers, most)
    assert sum(found) == num_layers
    assert min(found) >= 1
    assert max(found) - min(found) <= 1
    assert most is None or max(found) <= most


def test_segments_are_short_where_gradients_travel():
    assert layers_per_segment(1, None) is None
    assert layers_per_segment(2, None) == 4
    assert layers_per_segment(1, 3) == 3
