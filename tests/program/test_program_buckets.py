"""Buckets hold each group once, and only what is used and held alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.plan import Place, StateShare
from hexijax.program import buckets as module
from hexijax.program.boxes import homes
from hexijax.program.buckets import buckets, segment_buckets
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_plan


@given(st.integers(0, 10_000))
def test_every_leaf_is_in_one_bucket_that_its_segments_use_whole(seed: int):
    plan, chain, _ = random_plan(seed)
    found = buckets(plan, chain)
    ids = [leaf.id for bucket in found for leaf in bucket.leaves]
    assert sorted(ids) == sorted(leaf.id for leaf in chain.leaves())
    assert len({bucket.name for bucket in found}) == len(found)
    bucket_of = {leaf.id: b for b in found for leaf in b.leaves}
    for group in chain.groups:
        bucket = bucket_of[group.leaves[0].id]
        assert homes(plan, chain, group) == homes(plan, chain, bucket)
        for _, stage in plan.stages():
            for i in range(len(stage.segments)):
                span = stage.segment_layers(i)
                assert bool(segment_buckets((group,), span)) == bool(
                    segment_buckets((bucket,), span)
                )


def test_a_segment_is_one_bucket_where_replicas_are_cut_alike():
    plan = make_plan(
        (make_stages([3, 3], segments=[[1, 2], [3]]), 1),
        (make_stages([3, 3], prefix="b"), 1),
    )
    chain = make_chain(6, tied={"embed": [0, 5]})
    found = {b.name: [leaf.name for leaf in b.leaves] for b in buckets(plan, chain)}
    assert {name: len(leaves) // 2 for name, leaves in found.items()} == {
        "l0": 1,
        "embed": 0,
        "l1": 2,
        "l3": 3,
    }


def test_a_share_of_its_own_keeps_a_group_apart():
    shares = {Place("store/0"): 1.0}
    plan = make_plan(
        (make_stages([4]), 1), state=(StateShare(groups=("l1", "l2"), shares=shares),)
    )
    assert [b.name for b in buckets(plan, make_chain(4))] == ["l0", "l1"]


@pytest.mark.parametrize(("limit", "replicas"), [("ALONE_SIZE", 1), ("SHARED_SIZE", 2)])
def test_a_full_bucket_ends(limit: str, replicas: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, limit, 2 * (64 * 64 + 64))
    plan = make_plan(*((make_stages([5], prefix=p), 1) for p in "ab"[:replicas]))
    sizes = [len(b.layers) for b in buckets(plan, make_chain(5))]
    assert sizes == [2, 2, 1]
    monkeypatch.setattr(module, limit, 1)
    assert [len(b.layers) for b in buckets(plan, make_chain(5))] == [1] * 5


def test_a_bucket_whose_state_lies_elsewhere_is_a_shared_one(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "SHARED_SIZE", 2 * (64 * 64 + 64))
    stages = (make_stages([5]), 1)

    def sizes(home: str) -> list[int]:
        share = StateShare(groups=("*",), shares={Place(home): 1.0})
        plan = make_plan(stages, state=(share,))
        return [len(b.layers) for b in buckets(plan, make_chain(5))]

    assert sizes("store/0") == [2, 2, 1]
    assert sizes("r0.s0") == [5]
