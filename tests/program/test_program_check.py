"""The checker passes what is right and names what is wrong."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.plan.plan import Place, Schedule
from hexijax.program import names
from hexijax.program.check import check
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    HOST,
    Agree,
    Backward,
    Forward,
    Free,
    Instruction,
    Join,
    Kind,
    Part,
    Prefetch,
    Program,
    ProgramError,
    Read,
    Recv,
    Reduce,
    Send,
    Site,
    Snapshot,
    Sum,
    Update,
    WriteBack,
)
from hexijax.program.rules.fault import Faults
from hexijax.program.rules.streams import check_streams
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_plan
from tests.program.variants import (
    doubled,
    host_twin,
    split_backwards,
    with_body,
    with_reads,
    with_streamed_state,
    with_waiting_residuals,
    without,
)

CHAIN = make_chain(4, tied={"embed": [0, 3]})
PLAN = make_plan(
    (make_stages([2, 2], segments=[[1, 1], [2]]), 2),
    (make_stages([4], prefix="b", tensor=2), 1),
)
GOOD = lower(PLAN, CHAIN, rules=StepRules(clip=True))
GPIPE_PLAN = dataclasses.replace(PLAN, schedule=Schedule.GPIPE)
GPIPE = lower(GPIPE_PLAN, CHAIN, rules=StepRules())
INDICES = range(len(GOOD.body))
SCALED = lower(PLAN, CHAIN, rules=StepRules(dynamic_scale=True))

either = pytest.mark.parametrize("good", [GOOD, SCALED], ids=["clipped", "scaled"])


def find(program: Program, kind: type[Instruction], number: int = 0) -> int:
    """Index of the n-th instruction of a kind in the body."""
    found = [i for i, x in enumerate(program.body) if isinstance(x, kind)]
    return found[number]


def refused(program: Program) -> str:
    """What the checker says."""
    with pytest.raises(ProgramError) as error:
        check(program, PLAN, CHAIN)
    return str(error.value)


@either
def test_any_dropped_instruction_is_missed(good: Program):
    for index in range(len(good.body)):
        refused(without(good, index))


@either
def test_any_doubled_instruction_is_noticed(good: Program):
    for index in range(len(good.body)):
        refused(doubled(good, index))


@either
def test_any_read_that_is_dropped_is_missed(good: Program):
    for index, instr in enumerate(good.body):
        reads = instr.reads
        for i in range(len(reads)):
            refused(with_reads(good, index, (*reads[:i], *reads[i + 1 :])))


@either
def test_any_mark_that_is_lost_or_too_early_is_noticed(good: Program):
    last = {r.buffer: i for i, instr in enumerate(good.body) for r in instr.reads}
    for index, instr in enumerate(good.body):
        reads = instr.reads
        for i, read in enumerate(reads):
            # What the host has agreed on is a result: its last reader leaves it.
            result = read.buffer == names.agreed(HOST, "norm")
            assert read.dies == (last[read.buffer] == index and not result)
            flipped = Read(read.buffer, dies=not read.dies)
            refused(with_reads(good, index, (*reads[:i], flipped, *reads[i + 1 :])))


@either
def test_anything_in_the_prologue_is_needed(good: Program):
    for i in range(len(good.prologue)):
        kept = (*good.prologue[:i], *good.prologue[i + 1 :])
        refused(dataclasses.replace(good, prologue=kept))


def test_a_scale_reaches_all_who_multiply_by_it():
    agree = max(find(SCALED, Agree, n) for n in range(3))
    instr = SCALED.body[agree]
    assert [str(b) for b in instr.writes] == [
        *("Scalar[host scale]@1", "Scalar[r0.s1 scale]@1", "Scalar[r1.s0 scale]@1")
    ]
    body = list(SCALED.body)
    body[agree] = dataclasses.replace(
        instr, writes=instr.writes[:2], members=instr.members[:2]
    )
    message = refused(with_body(SCALED, body))
    assert "Its members are host, r0.s1; the plan has host, r0.s1, r1.s0" in message
    update = find(SCALED, Update)
    reads = tuple(r for r in SCALED.body[update].reads if r.buffer.subject != "norm")
    message = refused(with_reads(SCALED, update, reads))
    assert "waits for the norm of all gradients: it divides by the scale" in message


@given(seed=st.integers(0, 2**32))
@settings(max_examples=12)
def test_mutants_of_random_programs_are_caught(seed: int):
    plan, chain, rules = random_plan(seed, max_layers=6, max_microbatches=3)
    program = lower(plan, chain, rules=rules)
    rng = random.Random(seed)
    index = rng.randrange(len(program.body))
    other = rng.choice(
        [
            i
            for i, x in enumerate(program.body)
            if isinstance(x, type(program.body[index]))
        ]
    )
    mutants = [without(program, index), doubled(program, index)]
    if program.body[other].reads != program.body[index].reads:
        mutants.append(with_reads(program, index, program.body[other].reads))
    for mutant in mutants:
        with pytest.raises(ProgramError):
            check(mutant, plan, chain)


# What it says.


def test_a_missing_backward_is_named_and_the_stages_are_shown():
    (index,) = [
        i
        for i in INDICES
        if isinstance(x := GOOD.body[i], Backward)
        and (x.place, x.segment, x.microbatches) == ("r0.s0", 1, (1, 2))
    ]
    lines = refused(without(GOOD, index)).splitlines()
    assert lines[0].startswith(
        "The backward, input part, of segment g1 of r0.s0 for microbatch #1 never runs"
    )
    assert lines[1:3] == [
        "  r0.s0 | F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.0",
        "  r0.s1 | F0 B0 F1 B1",
    ]


def test_a_missing_recv_leaves_its_send_alone():
    message = refused(without(GOOD, find(GOOD, Recv)))
    assert message.startswith("No Recv has tag t")
    assert "\n-->" in message


def test_a_missing_reduce_update_or_gather_is_named():
    assert "is never reduced" in refused(without(GOOD, find(GOOD, Reduce)))
    assert "updates its boxes once a step" in refused(without(GOOD, find(GOOD, Update)))
    assert "never agrees on norm" in refused(without(GOOD, find(GOOD, Agree, 1)))


def test_a_read_after_death_is_underlined():
    (index, read) = next(
        (i, r)
        for i in INDICES
        for r in GOOD.body[i].reads
        if r.buffer.kind is Kind.PARAM and not r.dies
    )
    reads = tuple(
        Read(r.buffer, dies=True) if r == read else r for r in GOOD.body[index].reads
    )
    lines = refused(with_reads(GOOD, index, reads)).splitlines()
    assert f"{read.buffer} is read here, but it died at line" in lines[0]
    marked = next(i for i, text in enumerate(lines) if text.startswith("-->"))
    column = lines[marked + 1].index("^")
    assert lines[marked][column:].startswith(str(read.buffer))


def test_an_instruction_before_what_it_reads_is_refused():
    index = find(GOOD, Update)
    body = list(GOOD.body)
    body.insert(0, body.pop(index))
    message = refused(with_body(GOOD, body))
    assert "is read before anything writes it" in message


def test_old_parameters_are_gone_when_the_new_ones_come():
    (index,) = [
        i
        for i in INDICES
        if any(str(r) == "Param[r0.s1 l2]!" for r in GOOD.body[i].reads)
    ]
    reads = tuple(
        Read(r.buffer, r.dies and r.buffer.subject != "l2")
        for r in GOOD.body[index].reads
    )
    late = Free(
        reads=(
            Read(next(r.buffer for r in reads if r.buffer.subject == "l2"), dies=True),
        )
    )
    kept = with_reads(GOOD, index, reads)
    assert "still lives when its next version is written" in refused(
        with_body(kept, [*kept.body, late])
    )


def test_a_gradient_reduced_at_a_wrong_home_is_refused():
    index = find(GOOD, Reduce)
    body = list(GOOD.body)
    body[index] = dataclasses.replace(body[index], homes=(Place("r9.s9"),))
    assert "Its homes are r9.s9; the plan has" in refused(with_body(GOOD, body))


def test_a_body_trains_or_evaluates():
    index = find(GOOD, Forward)
    body = list(GOOD.body)
    body[index] = dataclasses.replace(body[index], grad=False)
    assert "A body trains or it evaluates" in refused(with_body(GOOD, body))


def test_places_that_wait_for_each_other_are_named():
    a, b = Place("r0.s0"), Place("r0.s1")
    there, back = (
        {"tag": 0, "source": a, "target": b},
        {"tag": 1, "source": b, "target": a},
    )
    streams = {
        a: [(0, Recv(**back)), (1, Send(**there))],
        b: [(2, Recv(**there)), (3, Send(**back))],
    }
    program = Program(body=tuple(x for s in streams.values() for _, x in s))
    with pytest.raises(ProgramError) as error:
        check_streams(streams, Faults(program))
    assert str(error.value).startswith(
        "Places wait for each other forever: r0.s0 waits at line 0, recv t1 from r0.s1 "
        "to r0.s0; r0.s1 waits at line 2, recv t0 from r0.s0 to r0.s1."
    )


# What later passes make.


def test_all_backwards_of_a_segment_are_split_or_none():
    index = find(GOOD, Backward)
    split = split_backwards(with_body(GOOD, [GOOD.body[index]]))
    assert "are split and some are not" in refused(
        with_body(GOOD, [*GOOD.body[:index], *split.body, *GOOD.body[index + 1 :]])
    )


@pytest.mark.parametrize(
    "schedule", [s for s in Schedule if s is not Schedule.ZERO_BUBBLE]
)
def test_split_backwards_hold(schedule: Schedule):
    plan = dataclasses.replace(PLAN, schedule=schedule)
    check(split_backwards(lower(plan, CHAIN, rules=StepRules())), plan, CHAIN)


def test_each_input_part_has_one_weight_part_that_takes_its_residuals():
    split = split_backwards(GOOD)
    weights = [
        i
        for i, x in enumerate(split.body)
        if isinstance(x, Backward) and x.part is Part.WEIGHT
    ]
    assert "weight part, of segment" in refused(without(split, weights[0]))
    assert "runs a second time" in refused(doubled(split, weights[0]))
    assert "is read before" in refused(
        with_body(
            split,
            [
                split.body[weights[0]],
                *split.body[: weights[0]],
                *split.body[weights[0] + 1 :],
            ],
        )
    )
    stolen = split.body[weights[1]].reads
    assert refused(with_reads(split, weights[0], stolen))


def test_residuals_may_wait_in_host_memory():
    report = check(with_waiting_residuals(GOOD, slots=1), PLAN, CHAIN)
    assert report.live_slots == {"pool": 1}
    assert set(report.live_microbatches.values()) == {1}


def test_a_pool_never_holds_more_than_its_slots():
    waiting = with_waiting_residuals(GPIPE, slots=1)
    check(waiting, GPIPE_PLAN, CHAIN)
    early, late = (find(waiting, Prefetch, i) for i in range(2))
    body = list(waiting.body)
    body.insert(early, body.pop(late))
    with pytest.raises(ProgramError, match="Pool 'pool' has 1 slots and this would be"):
        check(with_body(waiting, body), GPIPE_PLAN, CHAIN)
    two = dataclasses.replace(with_body(waiting, body), pools=(("pool", 2),))
    assert check(two, GPIPE_PLAN, CHAIN).live_slots == {"pool": 2}


def test_a_pool_that_is_not_there_is_named():
    waiting = with_waiting_residuals(GOOD, slots=1)
    nameless = dataclasses.replace(waiting, pools=(("pol", 1),))
    assert "has no pool 'pool'; it has pol. Did you mean 'pol'?" in refused(nameless)


def test_state_may_stream_through_the_device():
    report = check(with_streamed_state(GOOD, slots=1), PLAN, CHAIN)
    assert report.live_slots == {"pool": 1}


def test_streamed_state_that_is_not_written_back_fills_the_pool():
    streamed = with_streamed_state(GOOD, slots=1)
    index = find(streamed, WriteBack)
    assert "Pool 'pool' has 1 slots" in refused(without(streamed, index))


def test_a_host_update_reads_its_state_where_it_lives():
    index = find(GOOD, Update)
    body = list(GOOD.body)
    body[index] = dataclasses.replace(body[index], site=Site.HOST)
    assert "An update at site host reads its State in host memory" in refused(
        with_body(GOOD, body)
    )


def test_a_snapshot_waits_for_the_drain():
    state = next(r.buffer for r in GOOD.prologue[0].reads)
    snapshot = Snapshot(reads=(Read(state),))
    check(dataclasses.replace(GOOD, drain=(snapshot,)), PLAN, CHAIN)
    message = refused(with_body(GOOD, [*GOOD.body, snapshot]))
    assert message.startswith("A Snapshot copies State, and stands in the drain")


@pytest.mark.parametrize(
    ("end", "missed"),
    [
        (Sum, "is read before anything writes it"),
        (Join, "is still alive when the step"),
    ],
)
def test_what_travels_arrives_where_it_was_sent(end: type[Sum | Join], missed: str):
    index = find(GOOD, end)
    wrong = GOOD.body[index].reads[0].buffer._replace(subject="grad embed")
    body = list(GOOD.body)
    body[index] = dataclasses.replace(body[index], reads=(Read(wrong, True),))
    assert "It must read Pieces[" in refused(with_body(GOOD, body))
    assert missed in refused(without(GOOD, index))


def test_a_free_ends_all_it_reads():
    free = Free(reads=(Read(GOOD.body[-1].writes[0]),))
    message = refused(with_body(GOOD, [*GOOD.body, free]))
    assert message.startswith("All that a Free reads dies there")


def test_a_copy_is_of_the_buffer_it_names():
    waiting = with_waiting_residuals(GOOD, slots=1)
    index = find(waiting, WriteBack)
    body = list(waiting.body)
    wrong = host_twin(body[index].writes[0])
    wrong = wrong._replace(subject="g9")
    body[index] = dataclasses.replace(body[index], writes=(wrong,))
    assert "It must read Res[r0.s0 g0 #0] and write Res[r0.s0 g0 #0]~host." in refused(
        with_body(waiting, body)
    )
