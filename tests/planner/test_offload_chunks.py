"""State comes in chunks for which the card has room: smaller ones on a small card."""

import dataclasses

import pytest

from experiments.offloaded import cells
from hexijax.layers.known import gpt
from hexijax.plan import text
from hexijax.plan.checks import check
from hexijax.plan.plan import (
    CHUNK_SIZE,
    Memory,
    Plan,
    PlanError,
    Replica,
    Schedule,
    Stage,
)
from hexijax.planner import PlanOptions
from hexijax.planner.judge import Judge
from hexijax.planner.offload import place as placing
from hexijax.planner.offload.place import Placer

CHAIN = gpt(depth=4, width=4096, num_heads=32, length=1024, vocab_size=50257)
"""Blocks of GPT 4 B, and its table."""

DEPTH = len(CHAIN.layers)
STAGE = Stage(
    devices=(cells.DEVICE,),
    layers=(0, DEPTH),
    dtype="bfloat16",
    segments=(1,) * DEPTH,
    waits=(Memory.HOST,) * DEPTH,
)
SKELETON = Plan(
    replicas=(Replica(stages=(STAGE,), microbatches=4, microbatch_size=2, samples=8),),
    batch_size=8,
    schedule=Schedule.LAYERED,
)


def placed(cap_gib: float) -> list[Plan]:
    """On a card of so much."""
    cluster, options = cells.cluster(cap_gib), PlanOptions(offload=True)
    judge = Judge(CHAIN, cluster, options)
    found = [*Placer(CHAIN, cluster, options, judge).place(SKELETON)]
    assert all(judge.fits(plan) for plan in found)
    return found


def streams(plan: Plan) -> bool:
    """Whether the card updates what rests on the host."""
    updates = {s.update for s in plan.state if s.memory is Memory.HOST}
    return Memory.DEVICE in updates


def test_a_card_of_8_gb_updates_a_model_that_it_could_not_in_larger_chunks(
    monkeypatch: pytest.MonkeyPatch,
):
    found = placed(8)
    assert found
    assert {plan.chunk for plan in found} < {*placing.CHUNK_SIZES} - {CHUNK_SIZE}
    assert any(map(streams, found))
    for plan in found:
        assert text.parse(text.render(plan)) == plan
        assert f"\nchunk       {plan.chunk}\n" in text.render(plan)
    monkeypatch.setattr(placing, "CHUNK_SIZES", (CHUNK_SIZE,))
    assert not any(map(streams, placed(8)))


def test_a_large_card_s_plans_say_nothing_of_chunks():
    found = placed(24)
    assert found
    for plan in found:
        assert plan.chunk == CHUNK_SIZE
        assert "chunk" not in text.render(plan)


def test_a_chunk_of_nothing_is_refused():
    plan = dataclasses.replace(SKELETON, chunk=0)
    with pytest.raises(PlanError, match="in chunks of 0 parameters; a chunk has one"):
        check(plan, CHAIN, cells.cluster(24))
