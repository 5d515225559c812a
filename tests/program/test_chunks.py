"""State that rests in host memory: a chunk at a time comes, is updated, and leaves."""

import dataclasses

import pytest

from hexijax.layers.chain import Chain, LeafPart
from hexijax.plan.plan import (
    CHUNK_SIZE,
    Memory,
    Plan,
    Schedule,
    StateShare,
    UpdateOrder,
)
from hexijax.program import buckets as bucketing
from hexijax.program.buckets import buckets
from hexijax.program.check import check
from hexijax.program.linearise import CHUNKS, UnitCosts
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    Backward,
    Forward,
    Instruction,
    Kind,
    Prefetch,
    Program,
    Site,
    Update,
    WriteBack,
)
from tests.program.examples import make_chain, make_plan, make_stages

LAYERS = 8
SIZES = [256] * LAYERS


def example(*, segments: int = LAYERS, chunk: int = CHUNK_SIZE) -> tuple[Plan, Chain]:
    """One stage whose state rests on the host."""
    chain = make_chain(LAYERS, sizes=SIZES)
    stages = make_stages([LAYERS], segments=[[LAYERS // segments] * segments])
    share = StateShare(groups=("*",), shares={}, memory=Memory.HOST)
    plan = make_plan((stages, 2), state=(share,))
    return dataclasses.replace(plan, chunk=chunk), chain


A_LAYER = make_chain(LAYERS, sizes=SIZES).groups[0].size
"""A chunk that is a layer's."""


def kinds(program: Program) -> str:
    """The body's copies of state, updates and backwards, a letter each."""
    letters = {Prefetch: "p", WriteBack: "w", Update: "u", Backward: "B"}
    return "".join(letters.get(type(i), "") for i in program.body)


@pytest.mark.parametrize("clip", [False, True])
def test_few_chunks_are_on_the_device_at_once(clip: bool):
    plan, chain = example(chunk=A_LAYER)
    program = lower(plan, chain, rules=StepRules(clip=clip))
    assert len(buckets(plan, chain)) == LAYERS
    report = check(program, plan, chain)
    assert 1 <= report.live_slots["r0.s0 State"] <= CHUNKS
    assert program.pools == (("r0.s0 State", report.live_slots["r0.s0 State"]),)
    sites = {i.site for i in program.body if isinstance(i, Update)}
    assert sites == {Site.STREAMED}


def test_a_chunk_is_updated_while_earlier_layers_go_backward():
    plan, chain = example(chunk=A_LAYER)
    order = kinds(lower(plan, chain, rules=StepRules()))
    assert order.index("u") < order.rindex("B")
    # A chunk is on its way before the one ahead of it is updated.
    assert "pu" in order or "pwu" in order


def test_large_groups_are_cut_between_leaves(monkeypatch: pytest.MonkeyPatch):
    plan, chain = example(chunk=make_chain(1, sizes=SIZES).groups[0].leaves[0].size)
    assert len(buckets(plan, chain)) == LAYERS  # a bias goes with its matrix
    monkeypatch.setattr(bucketing, "SLACK", 2**20)
    cut = buckets(plan, chain)
    assert [x for g in cut for x in g.leaves] == [
        x for g in chain.groups for x in g.leaves
    ]
    assert len(cut) == sum(len(g.leaves) for g in chain.groups)
    lower(plan, chain, rules=StepRules())  # and proves it
    lower(plan, chain, rules=StepRules(), whole_leaves=True)
    resident = dataclasses.replace(plan, state=(StateShare(groups=("*",), shares={}),))
    assert len(buckets(resident, chain)) == len(chain.groups)


def test_leaves_of_more_than_two_chunks_are_cut_between_rows():
    plan, chain = example()
    group = chain.groups[0]
    size = max(leaf.size for leaf in group.leaves)
    plan = dataclasses.replace(plan, chunk=size // 3)
    cut = buckets(plan, chain)
    assert all(bucket.size <= size // 3 * 9 // 8 for bucket in cut)
    parts = [x for bucket in cut for x in bucket.leaves if isinstance(x, LeafPart)]
    assert len({part.id for part in parts}) == len(parts)
    for leaf in chain.leaves():
        mine = [part for part in parts if part.whole == leaf]
        if leaf.size <= 2 * (size // 3):
            assert not mine
            continue
        (dim,) = {part.dim for part in mine}
        stops = [part.start + part.shape[dim] for part in mine]
        assert [0, *stops] == [*(part.start for part in mine), leaf.shape[dim]]
    lower(plan, chain, rules=StepRules())
    whole = buckets(plan, chain, whole_leaves=True)
    assert not any(isinstance(x, LeafPart) for bucket in whole for x in bucket.leaves)


def test_what_a_step_leaves_on_the_host_the_next_one_reads():
    plan, chain = example(segments=2)
    program = lower(plan, chain, rules=StepRules())
    left = {b for i in program.body for b in i.writes if b.kind is Kind.STATE}
    assert {b.step for b in left if b.memory is Memory.HOST} == {1}


def test_the_host_updates_what_has_left_the_device():
    plan, chain = example()
    share = dataclasses.replace(plan.state[0], update=Memory.HOST)
    program = lower(
        dataclasses.replace(plan, state=(share,)), chain, rules=StepRules(clip=True)
    )
    updates = [i for i in program.body if isinstance(i, Update)]
    assert {i.site for i in updates} == {Site.HOST}
    for update in updates:
        touched = [*(r.buffer for r in update.reads), *update.writes]
        assert {b.memory for b in touched if b.kind is not Kind.SCALAR} == {Memory.HOST}
    assert not any(isinstance(i, Prefetch) for i in program.body)


@pytest.mark.parametrize("memory", list(Memory))
def test_under_priority_a_layer_starts_before_a_later_one_is_updated(memory: Memory):
    plan, chain = example(chunk=A_LAYER)
    share = dataclasses.replace(plan.state[0], memory=memory)
    plan = dataclasses.replace(
        plan, state=(share,), order=UpdateOrder.PRIORITY, schedule=Schedule.LAYERED
    )
    program = lower(plan, chain, rules=StepRules(clip=True), costs=Busy(plan))
    groups = [i.group for i in program.body if isinstance(i, Update)]
    assert groups == [g.name for g in chain.groups]
    assert len([i for i in program.drain if isinstance(i, Update)]) == LAYERS
    first = next(i for i in program.body if isinstance(i, Forward))
    last = [i for i in program.body if isinstance(i, Update)][-1]
    assert program.body.index(first) < program.body.index(last)


class Busy(UnitCosts):
    """Copies take as long as a forward."""

    def duration_s(self, instruction: Instruction) -> float:
        copy = isinstance(instruction, Prefetch | WriteBack)
        return 1.0 if copy else super().duration_s(instruction)
