"""Boxes tile each leaf exactly, and pieces are what two tilings share."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.layers.chain import Chain, Group, Leaf
from hexijax.plan.plan import Place, Plan, PlanError, StateShare
from hexijax.program.boxes import (
    Box,
    Tiling,
    homes,
    intersect,
    overlap,
    split_rows,
    state_boxes,
)
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_cut, random_plan


def cells(box: Box, shape: tuple[int, ...]) -> set[int]:
    """Flat indices of the elements of a box."""
    index = np.arange(int(np.prod(shape))).reshape(shape)
    return set(index[tuple(slice(*span) for span in box)].flatten().tolist())


def shared_over(shares: dict[Place, float], **sizes: int) -> tuple[Plan, Chain, Group]:
    """One stage of one layer whose state is shared."""
    state = (StateShare(groups=("*",), shares=shares),)
    plan = make_plan((make_stages([1]), 1), state=state)
    chain = make_chain(1, sizes=[sizes.get("rows", 400)])
    return plan, chain, chain.groups[0]


def test_rows_follow_the_shares_and_small_leaves_stay_whole():
    shares = {Place("a/0"): 1.0, Place("store/0"): 3.0}
    plan, chain, group = shared_over(shares, rows=402)
    assert state_boxes(plan, chain, group) == {
        "a/0": {"l0/kernel": ((0, 101), (0, 64))},
        "store/0": {"l0/kernel": ((101, 402), (0, 64)), "l0/bias": ((0, 64),)},
    }


def test_even_over_the_devices_that_compute_unless_the_plan_says_otherwise():
    stages = make_stages([1, 1])
    wide = make_stages([2], prefix="b", tensor=3)
    plan = make_plan((stages, 1), (wide, 1))
    chain = make_chain(2)
    assert homes(plan, chain, chain.group("l0")) == (("r0.s0", 0.25), ("r1.s0", 0.75))


def test_the_last_share_that_names_a_group_counts():
    plan, chain, group = shared_over({})
    named = [
        StateShare(groups=("l0",), shares={Place("a/0"): 1.0}),
        StateShare(groups=("l0",), shares={Place("b/0"): 1.0}),
        StateShare(groups=("*",), shares={Place("c/0"): 1.0}),
    ]
    plan = make_plan((make_stages([1]), 1), state=tuple(named))
    assert homes(plan, chain, group) == (("b/0", 1.0),)


def test_a_share_of_zero_holds_nothing():
    shares = {Place("a/0"): 0.0, Place("b/0"): 2.0}
    plan, chain, group = shared_over(shares)
    assert list(state_boxes(plan, chain, group)) == ["b/0"]


@pytest.mark.parametrize("shares", [{"a/0": 0.0}, {"a/0": -1.0, "b/0": 2.0}])
def test_shares_that_divide_nothing_are_refused(shares: dict[str, float]):
    plan, chain, group = shared_over({Place(k): v for k, v in shares.items()})
    with pytest.raises(PlanError, match="none is negative, and at least one is above"):
        state_boxes(plan, chain, group)


def test_the_tensor_dim_is_never_cut():
    plan, chain, _ = shared_over({Place("a/0"): 1.0, Place("b/0"): 1.0})
    leaf = Leaf(name="w", shape=(512, 64), tensor_dim=0)
    group = Group(name="l0", leaves=(leaf,), layers=(0,))
    boxes = state_boxes(plan, chain, group)
    assert boxes["a/0"]["w"] == ((0, 512), (0, 32))
    assert boxes["b/0"]["w"] == ((0, 512), (32, 64))


def test_boxes_are_cut_so_that_all_lanes_can_divide_them():
    """A tensor shard's lanes have no other dim, and a box goes whole to all of them."""
    stages = [make_stages([1], prefix=x, tensor=2, lanes=2) for x in "abc"]
    plan = make_plan(*((s, 2) for s in stages))
    leaf = Leaf(name="w", shape=(101, 512), tensor_dim=1)
    group = Group(name="l0", leaves=(leaf,), layers=(0,))
    rows = [box["w"][0] for box in state_boxes(plan, make_chain(1), group).values()]
    assert rows == [(0, 34), (34, 68), (68, 101)]
    few = dataclasses.replace(leaf, shape=(20, 1024))  # even would be far from equal
    group = dataclasses.replace(group, leaves=(few,))
    rows = [box["w"][0] for box in state_boxes(plan, make_chain(1), group).values()]
    assert rows == [(0, 7), (7, 14), (14, 20)]


def test_whole_leaves_go_to_the_home_furthest_below_its_share():
    shares = {Place("a/0"): 1.0, Place("b/0"): 1.0}
    plan, chain, _ = shared_over(shares)
    leaves = [
        Leaf(name=n, shape=(s,)) for n, s in zip("wxyz", [40, 30, 20, 9], strict=True)
    ]
    group = Group(name="l0", leaves=tuple(leaves), layers=(0,))
    held = state_boxes(plan, chain, group, whole_leaves=True)
    assert {place: set(boxes) for place, boxes in held.items()} == {
        "a/0": {"w", "z"},
        "b/0": {"x", "y"},
    }


@given(
    rows=st.integers(0, 10_000),
    shares=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9),
)
def test_rows_sum_and_lie_within_one_of_their_share(rows: int, shares: list[float]):
    counts = split_rows(rows, shares)
    assert sum(counts) == rows
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - rows * share / sum(shares)) < 1 + 1e-6


@given(seed=st.integers(0, 2**32))
def test_boxes_tile_every_leaf_exactly(seed: int):
    plan, chain, _ = random_plan(seed, max_layers=6)
    for group, whole_leaves in itertools.product(chain.groups, [False, True]):
        tiling = state_boxes(plan, chain, group, whole_leaves=whole_leaves)
        for leaf in group.leaves:
            held = [b[leaf.id] for b in tiling.values() if leaf.id in b]
            counted = np.zeros(leaf.shape, int)
            for box in held:
                counted[tuple(slice(*span) for span in box)] += 1
            assert (counted == 1).all()
            assert len(held) == 1 or not whole_leaves


def random_tiling(rng: random.Random, shape: tuple[int, ...], prefix: str) -> Tiling:
    """A grid of boxes, one a place."""
    spans = []
    for rows in shape:
        parts = random_cut(rng, rows, rng.randint(1, min(3, rows)))
        stops = list(itertools.accumulate(parts))
        spans.append([(s - n, s) for s, n in zip(stops, parts, strict=True)])
    return {
        Place(f"{prefix}/{i}"): {"w": box}
        for i, box in enumerate(itertools.product(*spans))
    }


@given(seed=st.integers(0, 2**32))
def test_pieces_are_what_two_tilings_share(seed: int):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(0, 3)))
    sources, targets = random_tiling(rng, shape, "s"), random_tiling(rng, shape, "t")
    pieces = {(p.source, p.target): p.box for p in intersect(sources, targets)}
    for source, target in itertools.product(sources, targets):
        a, b = sources[source]["w"], targets[target]["w"]
        shared = cells(a, shape) & cells(b, shape)
        assert cells(pieces[source, target], shape) == shared if shared else True
        assert (overlap(a, b) is not None) == bool(shared)
        assert ((source, target) in pieces) == bool(shared)
