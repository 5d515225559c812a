"""Parameters that do not train: no gradient, no update, no traffic, in any plan."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.layers.chain import Chain
from hexijax.plan.plan import Schedule
from hexijax.program import names
from hexijax.program.buckets import buckets
from hexijax.program.check import check
from hexijax.program.lower import StepRules, lower
from hexijax.program.placement import group_places
from hexijax.program.program import (
    Backward,
    Forward,
    Gather,
    Instruction,
    Kind,
    Memory,
    Program,
    ProgramError,
    Reduce,
    Sum,
    Update,
)
from hexijax.program.text import by_stage, parse, render
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.golden import in_bfloat16
from tests.program.random_plans import frozen_plan
from tests.program.variants import with_body

RULES = StepRules()


def gradients_of(program: Program) -> set[str]:
    """Groups with a gradient anywhere, on its way or summed."""
    buffers = [
        b for i in program.body for b in (*i.writes, *(r.buffer for r in i.reads))
    ]
    found = {b.subject for b in buffers if b.kind is Kind.GRAD}
    pieces = (b.subject for b in buffers if b.kind is Kind.PIECES)
    return found | {s.removeprefix("grad ") for s in pieces if s.startswith("grad ")}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_does_not_train_has_no_gradient_no_update_and_no_traffic(seed: int):
    plan, chain, rules = frozen_plan(seed)
    program = lower(plan, chain, rules=rules)  # and proves it
    groups = buckets(plan, chain)
    trained = {g.name for g in groups if g.trainable}
    assert gradients_of(program) == trained
    touched = {
        i.group for i in program.body if isinstance(i, Reduce | Sum | Update | Gather)
    }
    assert touched <= trained
    gathered = {i.group for i in program.prologue if isinstance(i, Gather)}
    places = {g.group: g for g in group_places(plan, chain)}
    assert gathered == {name for name, g in places.items() if g.gathers}
    assert all(g.keepers == g.users for g in places.values() if not g.trainable)
    assert parse(render(program)) == program


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_cotangent_goes_further_than_the_first_layer_that_trains(seed: int):
    plan, chain, rules = frozen_plan(seed)
    program = lower(plan, chain, rules=rules)
    borders = {
        int(b.subject.removeprefix("L"))
        for i in program.body
        for b in i.writes
        if b.kind is Kind.COT
    }
    assert min(borders, default=len(chain.layers)) > chain.first_trained
    for i in program.body:
        if not isinstance(i, Forward | Backward):
            continue
        _, stop = plan.stage(i.place).segment_layers(i.segment)
        if isinstance(i, Forward):
            assert i.grad == (stop > chain.first_trained)
        else:
            assert stop > chain.first_trained


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_stage_without_a_backward_is_no_further_ahead_than_1f1b(seed: int):
    rng = random.Random(seed)
    num_stages, microbatches = rng.randint(2, 5), rng.randint(1, 10)
    first = rng.randrange(num_stages)
    every = [f"l{i}/{x}" for i in range(num_stages) for x in ("kernel", "bias")]
    frozen = every[: 2 * first]
    plan = make_plan((make_stages([1] * num_stages), microbatches))
    chains = [make_chain(num_stages, frozen=names) for names in (frozen, ())]
    mine, whole = (check(lower(plan, c, rules=RULES), plan, c) for c in chains)
    for place, count in whole.live_activations.items():
        # One more: the border itself, which nobody keeps for a backward.
        assert mine.live_activations.get(place, 0) <= count + 1, place


def test_the_base_s_masters_wait_in_host_memory_where_a_cast_of_them_computes():
    chain = make_chain(3, frozen=["l0/kernel", "l1/kernel", "l1/bias"])
    stages = make_stages([1, 1, 1])
    plan = make_plan((in_bfloat16(stages), 1))
    program = lower(plan, chain, rules=RULES)
    read = [r.buffer for i in program.prologue for r in i.reads]
    state = Counter((b.subject, b.memory) for b in read if b.kind is Kind.STATE)
    assert state == {
        ("l0", Memory.DEVICE): 1,
        ("l0.frozen", Memory.HOST): 1,
        ("l1", Memory.HOST): 1,
        ("l2", Memory.DEVICE): 1,
    }
    as_it_is = lower(make_plan((stages, 1)), chain, rules=RULES)
    read = [r.buffer for i in as_it_is.prologue for r in i.reads]
    assert {b.memory for b in read} == {Memory.DEVICE}


def test_only_the_loss_s_stage_goes_backward_where_only_its_layer_trains():
    plan = make_plan((make_stages([2, 2]), 2), schedule=Schedule.ZERO_BUBBLE)
    frozen = [f"l{i}/{x}" for i in range(3) for x in ("kernel", "bias")]
    program = lower(plan, make_chain(4, frozen=frozen), rules=RULES)
    assert by_stage(program).splitlines() == ["r0.s0 | F0 F1", "r0.s1 | F0 B0 F1 B1"]


def refused(program: Program, changed: list[Instruction], chain: Chain) -> str:
    plan = make_plan((make_stages([2]), 1))
    with pytest.raises(ProgramError) as caught:
        check(with_body(program, changed), plan, chain)
    return str(caught.value)


def test_a_program_that_trains_them_all_the_same_is_refused():
    chain = make_chain(2, frozen=["l1/kernel"])
    plan = make_plan((make_stages([2]), 1))
    program = lower(plan, chain, rules=RULES)
    whole = lower(plan, make_chain(2), rules=RULES)
    body = list(program.body)
    (at,) = (i for i, x in enumerate(body) if isinstance(x, Update))
    update = body[at]
    assert isinstance(update, Update)
    home = update.home
    more = Update(
        reads=update.reads,
        writes=(
            names.state(home, "l1.frozen", step=1),
            names.param_slice(home, "l1.frozen"),
        ),
        group="l1.frozen",
        home=home,
    )
    said = refused(program, [*body, more], chain)
    assert "Group l1.frozen does not train: it has no gradient and no update" in said
    eager = make_chain(2, frozen=["l0/kernel", "l0/bias", "l1/kernel"])
    cut = make_plan((make_stages([2], segments=[[1, 1]]), 1))
    keeps = lower(cut, make_chain(2), rules=RULES)
    with pytest.raises(ProgramError, match="no backward reads them"):
        check(keeps, cut, eager)
    assert whole != program
