"""Plans become Programs: golden text, and what holds for every plan."""

import dataclasses
import itertools
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.plan.plan import Place, Plan, Schedule, Stage, stage_place
from hexijax.program import names
from hexijax.program.check import check
from hexijax.program.json import from_json, to_json
from hexijax.program.linearise import IN_FLIGHT, UnitCosts
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    Agree,
    Backward,
    Forward,
    Gather,
    Instruction,
    Join,
    Kind,
    Load,
    Part,
    Program,
    ProgramError,
    Recv,
    Reduce,
    Send,
    Sum,
    Update,
)
from hexijax.program.text import by_stage, parse, render
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.golden import CASES, FOLDER, golden_text
from tests.program.random_plans import random_plan

RULES = StepRules()


def position(program: Program, kind: type[Instruction], **fields: object) -> int:
    """Where the one instruction of a kind with these fields stands in the body."""
    found = [
        i
        for i, instr in enumerate(program.body)
        if isinstance(instr, kind)
        and all(getattr(instr, name) == value for name, value in fields.items())
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str):
    assert golden_text(name) == (FOLDER / f"{name}.txt").read_text(), (
        "python -m tests.program.golden writes the files again"
    )


def test_stages_warm_up_alternate_and_drain():
    plan = make_plan((make_stages([1, 1]), 3))
    program = lower(plan, make_chain(2), rules=RULES)
    assert by_stage(program) == textwrap.dedent("""\
        r0.s0 | F0 F1 B0 F2 B1 B2
        r0.s1 | F0 B0 F1 B1 F2 B2""")


def test_segments_go_forward_in_order_and_backward_in_reverse():
    plan = make_plan((make_stages([3], segments=[[1, 1, 1]]), 2))
    program = lower(plan, make_chain(3), rules=RULES)
    assert by_stage(program) == (
        "r0.s0 | F0.0 F0.1 F0.2 B0.2 B0.1 B0.0 F1.0 F1.1 F1.2 B1.2 B1.1 B1.0"
    )


def test_reduces_overlap_the_backward_that_is_left():
    plan = make_plan((make_stages([2], segments=[[1, 1]]), 1))
    program = lower(plan, make_chain(2), rules=RULES)
    late = position(program, Backward, segment=1)
    early = position(program, Backward, segment=0)
    assert late < position(program, Reduce, group="l1") < early
    assert early < position(program, Update, group="l1")


def test_clipping_holds_every_update_until_all_gradients_are_known():
    plan = make_plan((make_stages([1, 1]), 2))
    program = lower(plan, make_chain(2), rules=StepRules(clip=True))
    agreed = position(program, Agree, name="norm")
    updates = [i for i, x in enumerate(program.body) if isinstance(x, Update)]
    assert min(updates) > agreed
    assert program.body[agreed].members == ("r0.s0", "r0.s1", "host")
    first = [x.group for x in program.body if isinstance(x, Update | Gather)]
    assert first == ["l0", "l0", "l1", "l1"]


def test_a_send_follows_its_producer_and_a_load_stands_one_ahead():
    plan = make_plan((make_stages([1, 1]), 3))
    body = lower(plan, make_chain(2), rules=RULES).body
    for before, instr in itertools.pairwise(body):
        if isinstance(instr, Send):
            assert instr.reads[0].buffer in before.writes
    kinds = [
        f"{type(x).__name__} {getattr(x, 'microbatch', '')}".strip()
        for x in body
        if isinstance(x, Load) or (isinstance(x, Forward) and x.place == "r0.s0")
    ]
    assert kinds == ["Load 0", "Load 1", "Forward", "Load 2", "Forward", "Forward"]


@given(seed=st.integers(0, 2**32))
def test_few_buckets_are_in_flight_at_a_place(seed: int):
    plan, chain, rules = random_plan(seed)
    program = lower(plan, chain, rules=rules)
    for start, end in ((Reduce, Sum), (Gather, Join)):
        flying: dict[Place, int] = {}
        for instr in program.body:
            if isinstance(instr, start):
                for buffer in instr.writes:
                    if names.is_freed(buffer):
                        continue  # a pass needs all of its own
                    flying[buffer.place] = flying.get(buffer.place, 0) + 1
                    assert flying[buffer.place] <= IN_FLIGHT
            elif isinstance(instr, end) and not names.is_freed(instr.reads[0].buffer):
                flying[instr.reads[0].buffer.place] -= 1


def test_a_home_computes_on_while_gradients_come():
    """On the clock a Sum stands where its pieces have come, the next Reduce before."""

    class Costs(UnitCosts):
        def duration_s(self, instruction: Instruction) -> float:
            travels = isinstance(instruction, Reduce)
            return 2.5 if travels else super().duration_s(instruction)

    stages = [make_stages([4], prefix=p, segments=[[1, 1, 1, 1]]) for p in "ab"]
    plan = make_plan(*((each, 1) for each in stages))
    costs = Costs(plan)
    program = lower(plan, make_chain(4), rules=RULES, costs=costs)
    found = [
        f"{type(x).__name__} {x.group}"
        for x in program.body
        if isinstance(x, Reduce) or (isinstance(x, Sum) and x.home == "r0.s0")
    ]
    assert ", ".join(found) == (
        "Reduce l3, Reduce l2, Sum l3, Reduce l1, Sum l2, Reduce l0, Sum l1, Sum l0"
    )


def test_costs_settle_the_order():
    @dataclasses.dataclass
    class Slow:
        """One place computes slower than the other."""

        place: Place

        def duration_s(self, instruction: Instruction) -> float:
            run = isinstance(instruction, Forward | Backward)
            return 0.0 if not run else 9.0 if instruction.place == self.place else 1.0

    def places(slow: str) -> list[str]:
        plan = make_plan((make_stages([1]), 2), (make_stages([1], prefix="b"), 2))
        program = lower(plan, make_chain(1), rules=RULES, costs=Slow(Place(slow)))
        return [x.place for x in program.body if isinstance(x, Forward | Backward)]

    slow, fast = ["r0.s0"] * 4, ["r1.s0"] * 4
    assert places("r0.s0") == [*slow[:1], *fast, *slow[1:]]
    assert places("r1.s0") == [slow[0], fast[0], *slow[1:], *fast[1:]]


def test_stages_on_the_same_devices_send_without_a_copy_but_send():
    stages = make_stages([1, 1], num_sets=1)
    program = lower(make_plan((stages, 1)), make_chain(2), rules=RULES)
    assert sum(isinstance(x, Send) for x in program.body) == 2


@pytest.mark.parametrize("layers", [[(0, 2), (3, 4)], [(0, 2), (1, 4)], [(0, 3)]])
def test_a_layer_lost_or_doubled_is_refused(layers: list[tuple[int, int]]):
    stages = tuple(
        Stage(devices=(f"a/{k}",), layers=span) for k, span in enumerate(layers)
    )
    with pytest.raises(ProgramError, match="Each layer sits in exactly one stage"):
        lower(make_plan((stages, 1)), make_chain(4), rules=RULES)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=12)
def test_every_plan_lowers_checks_and_round_trips(seed: int):
    plan, chain, rules = random_plan(seed, max_layers=8, max_microbatches=4)
    program = lower(plan, chain, rules=rules)
    assert parse(render(program)) == program
    assert from_json(to_json(program)) == program
    assert lower(plan, chain, rules=rules) == program
    _check_layers(program, plan, len(chain.layers))
    evaluation = lower(plan, chain, rules=rules, evaluation=True)
    assert not any(isinstance(x, Backward | Update) for x in evaluation.body)
    assert parse(render(evaluation)) == evaluation


@pytest.mark.laws
@given(seed=st.integers(0, 2**32))
@settings(max_examples=200)
def test_every_large_plan_lowers_and_checks(seed: int):
    plan, chain, rules = random_plan(seed)
    program = lower(plan, chain, rules=rules)
    assert parse(render(program)) == program
    _check_layers(program, plan, len(chain.layers))


def test_a_split_program_s_picture_has_both_parts():
    plan = make_plan((make_stages([1, 1]), 3), schedule=Schedule.ZERO_BUBBLE)
    program = lower(plan, make_chain(2), rules=RULES)
    assert by_stage(program) == textwrap.dedent("""\
        r0.s0 | F0 F1 B0 F2 B1 B2
        r0.s1 | F0 b0 F1 b1 w0 F2 b2 w1 w2""")


def _check_layers(program: Program, plan: Plan, num_layers: int) -> None:
    """Each replica and microbatch passes every layer in order, then back."""
    there: dict[tuple[str, int], list[int]] = {}
    back: dict[tuple[str, int], list[int]] = {}
    for instr in program.body:
        if isinstance(instr, Forward | Backward):
            span = range(*plan.stage(instr.place).segment_layers(instr.segment))
            key = (instr.place.split(".")[0], instr.microbatches[0])
            if isinstance(instr, Backward) and instr.part is Part.WEIGHT:
                continue
            if isinstance(instr, Forward):
                there.setdefault(key, []).extend(span)
            else:
                back.setdefault(key, []).extend(reversed(span))
    count = sum(replica.microbatches for replica in plan.replicas)
    assert len(there) == len(back) == count
    assert all(layers == list(range(num_layers)) for layers in there.values())
    assert all(layers == list(range(num_layers))[::-1] for layers in back.values())


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 3, 7])
def test_1f1b_keeps_min_of_stages_left_and_microbatches(
    num_stages: int, num_microbatches: int
):
    plan = make_plan((make_stages([1] * num_stages), num_microbatches))
    chain = make_chain(num_stages)
    report = check(lower(plan, chain, rules=RULES), plan, chain)
    for k in range(num_stages):
        place = stage_place(0, k)
        assert report.live_microbatches[place] == min(num_stages - k, num_microbatches)
        waiting = report.live_activations.get(place, 0)
        assert waiting <= min(num_stages - k + 1, num_microbatches)


def test_gpipe_keeps_them_all():
    plan = make_plan((make_stages([1, 1]), 5), schedule=Schedule.GPIPE)
    chain = make_chain(2)
    report = check(lower(plan, chain, rules=RULES), plan, chain)
    assert report.live_microbatches == {"r0.s0": 5, "r0.s1": 5}


def test_a_tied_group_has_one_chain_of_additions_a_stage():
    plan = make_plan((make_stages([2], segments=[[1, 1]]), 2))
    program = lower(plan, make_chain(2, tied={"embed": [0, 1]}), rules=RULES)
    written = [
        buffer.microbatch
        for instr in program.body
        for buffer in instr.writes
        if buffer.kind is Kind.GRAD and buffer.subject == "embed"
    ]
    assert written == [0, 1, 2, 3, None]


def test_recv_waits_for_the_wire_on_the_clock():
    plan = make_plan((make_stages([1, 1]), 3))
    program = lower(plan, make_chain(2), rules=RULES)
    cot = next(
        i
        for i, x in enumerate(program.body)
        if isinstance(x, Recv) and x.writes[0].kind is Kind.COT
    )
    # F1 of the first stage runs while the second computes what is sent back.
    forwards = [x for x in program.body[:cot] if isinstance(x, Forward)]
    assert [x.microbatches[0] for x in forwards if x.place == "r0.s0"] == [0, 1]
