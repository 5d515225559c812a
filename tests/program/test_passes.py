"""Freed parameters: gathered for each pass, gone after it, two passes' at most."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.plan import Params, Plan, Schedule
from hexijax.program import names
from hexijax.program.check import check
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    Backward,
    Forward,
    Gather,
    Instruction,
    Join,
    Kind,
    Program,
    ProgramError,
    Read,
    Update,
)
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_plan
from tests.program.variants import doubled, with_body, with_reads, without

CHAIN = make_chain(4, tied={"embed": [0, 3]})
RULES = StepRules()


def plan(schedule: Schedule, microbatches: int, *, freed: bool = True) -> Plan:
    """One stage of four segments beside another kind of replica."""
    stages = make_stages([4], segments=[[1, 1, 1, 1]], freed=freed)
    beside = make_stages([2, 2], prefix="b", segments=[[2], [1, 1]], freed=freed)
    return make_plan((stages, microbatches), (beside, 2), schedule=schedule)


PLAN = plan(Schedule.LAYERED, 2)
GOOD = lower(PLAN, CHAIN, rules=RULES)


def refused(program: Program) -> str:
    """What the checker says."""
    with pytest.raises(ProgramError) as error:
        check(program, PLAN, CHAIN)
    return str(error.value)


def gathered_bytes(program: Program, place: str) -> int:
    """Of parameters that come to a place in a body, at four bytes each."""
    sizes = {group.name: 4 * group.size for group in CHAIN.groups}
    return sum(
        sizes[i.group]
        for i in program.body
        if isinstance(i, Gather) and place in i.places
    )


def positions(program: Program, place: str, *kinds: type[Instruction]) -> list[int]:
    """Where a place's instructions of some kinds stand in the body."""
    return [
        at
        for at, i in enumerate(program.body)
        if isinstance(i, kinds)
        and place in getattr(i, "places", (getattr(i, "place", ""),))
    ]


def test_the_order_of_one_place_reads_like_this():
    small = make_plan(
        (make_stages([3], segments=[[1, 1, 1]], freed=True), 2),
        schedule=Schedule.LAYERED,
    )
    body = lower(small, make_chain(3), rules=RULES).body
    kept = (Gather, Join, Forward, Backward)
    words = {Gather: "gather", Join: "join", Forward: "F", Backward: "B"}
    assert " ".join(
        f"{words[type(i)]} {i.group}"
        if isinstance(i, Gather | Join)
        else f"{words[type(i)]}{i.microbatches[0]}.{i.segment}"
        for i in body
        if isinstance(i, kept)
    ) == (
        "gather l0 join l0 gather l1 F0.0 F1.0 join l1 gather l2 F0.1 F1.1 "
        "join l2 gather l1 F0.2 B0.2 F1.2 B1.2 join l1 gather l0 B0.1 B1.1 "
        "join l0 B0.0 B1.0"
    )


@pytest.mark.parametrize("microbatches", [2, 8, 32])
def test_layered_gathers_as_much_however_many_microbatches(microbatches: int):
    layered = lower(plan(Schedule.LAYERED, microbatches), CHAIN, rules=RULES)
    plain = lower(plan(Schedule.ONE_F_ONE_B, microbatches), CHAIN, rules=RULES)
    one = lower(plan(Schedule.ONE_F_ONE_B, 1), CHAIN, rules=RULES)
    once = gathered_bytes(one, "r0.s0")
    assert gathered_bytes(layered, "r0.s0") == once
    # The plain order joins a backward of its first segment with the next forward.
    (table,) = (group.size for group in CHAIN.groups if group.name == "embed")
    (first,) = (group.size for group in CHAIN.groups if group.name == "l0")
    joined = 4 * (microbatches - 1) * (table + first)
    assert gathered_bytes(plain, "r0.s0") == microbatches * once - joined


@given(seed=st.integers(0, 2**32))
def test_no_place_ever_holds_more_than_two_passes(seed: int):
    drawn, chain, rules = random_plan(seed, max_layers=16, max_microbatches=4)
    report = check(lower(drawn, chain, rules=rules), drawn, chain)
    frees = {place for place, stage in drawn.stages() if stage.params}
    assert set(report.live_passes) == frees
    assert all(1 <= n <= 2 for n in report.live_passes.values())


@pytest.mark.parametrize("schedule", Schedule)
def test_the_next_pass_travels_while_one_computes(schedule: Schedule):
    three = plan(schedule, 3)
    if schedule is Schedule.INTERLEAVED:
        three = dataclasses.replace(three, replicas=three.replicas[:1])
    program = lower(three, CHAIN, rules=RULES)
    work = positions(program, "r0.s0", Forward, Backward)
    body = program.body
    passes: dict[int, list[int]] = {}
    for at in work:
        for read in body[at].reads:
            if read.buffer.kind is Kind.PARAM:
                passes.setdefault(read.buffer.microbatch or 0, []).append(at)
    for at in positions(program, "r0.s0", Gather):
        number = body[at].writes[0].microbatch or 0
        if number > 0:
            assert at < min(passes[number - 1])
        if number > 1:
            assert at > max(passes[number - 2])


def test_an_evaluation_gathers_from_the_state_and_leaves_it():
    program = lower(PLAN, CHAIN, rules=RULES, evaluation=True)
    assert not program.prologue
    gathers = [i for i in program.body if isinstance(i, Gather)]
    assert {r.buffer.kind for i in gathers for r in i.reads} == {Kind.STATE}
    assert not any(r.dies for i in gathers for r in i.reads)


def test_what_one_segment_keeps_the_others_of_its_stage_need_not_gather():
    (stage,) = make_stages([4], segments=[[1, 1, 1, 1]], freed=True)
    freed = Params.FREED
    stage = dataclasses.replace(stage, params=(Params.KEPT, freed, freed, freed))
    program = lower(make_plan(((stage,), 2)), CHAIN, rules=RULES)
    assert [i.group for i in program.prologue if isinstance(i, Gather)] == [
        *("l0", "embed")
    ]
    in_passes = {
        i.group
        for i in program.body
        if isinstance(i, Gather) and names.is_freed(i.writes[0])
    }
    assert in_passes == {"l1", "l2", "l3"}
    sliced = {i.group for i in program.body if isinstance(i, Update) and i.writes[1:]}
    assert sliced == {"l0", "embed"}


def test_any_dropped_or_doubled_instruction_or_read_is_noticed():
    for index, instr in enumerate(GOOD.body):
        refused(without(GOOD, index))
        refused(doubled(GOOD, index))
        for i in range(len(instr.reads)):
            reads = (*instr.reads[:i], *instr.reads[i + 1 :])
            refused(with_reads(GOOD, index, reads))


def test_a_third_pass_is_one_too_many():
    body = list(GOOD.body)
    late = positions(GOOD, "r0.s0", Gather)[-1]
    body.insert(0, body.pop(late))
    message = refused(with_body(GOOD, body))
    assert "is one pass too many: r0.s0 would hold parameters of 3 passes" in message


def test_a_run_reads_one_pass_of_all_it_needs():
    (at, run) = next(
        (at, i)
        for at, i in enumerate(GOOD.body)
        if isinstance(i, Forward) and i.place == "r0.s0" and i.segment == 3
    )
    other = [
        Read(r.buffer._replace(microbatch=0)) if r.buffer.subject == "embed" else r
        for r in run.reads
    ]
    message = refused(with_reads(GOOD, at, tuple(other)))
    assert "it reads one of each, all of one pass" in message


def test_who_keeps_parameters_gathers_them_once():
    kept_plan = plan(Schedule.LAYERED, 2, freed=False)
    kept = lower(kept_plan, CHAIN, rules=RULES)
    assert "Its segment frees l0, embed after each pass" in refused(kept)
    with pytest.raises(ProgramError, match="Its segment frees none after each pass"):
        check(GOOD, kept_plan, CHAIN)
    early = dataclasses.replace(GOOD, prologue=GOOD.body[:1])
    message = refused(early)
    assert "frees the parameters of l0. Kept ones are gathered once a step" in message
