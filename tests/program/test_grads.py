"""Gradients of a few passes: a later pass waits until an earlier one's are updated."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.costs.sums import CHUNKS_ON_DEVICE
from hexijax.plan.plan import Memory, Plan, PlanError, Schedule, StateShare, UpdateOrder
from hexijax.program.check import check
from hexijax.program.linearise import UnitCosts
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    Backward,
    Instruction,
    Kind,
    Prefetch,
    Program,
    ProgramError,
    Update,
    WriteBack,
)
from hexijax.program.waiting import held_back
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_plan

CHAIN = make_chain(6)
RULES = StepRules()


def plan(grads: int, *, order: UpdateOrder = UpdateOrder.FIFO, host: bool = True):
    """A stage of six segments, its state in host memory."""
    stages = [
        dataclasses.replace(stage, grads=grads)
        for stage in make_stages([6], segments=[[1] * 6])
    ]
    made = make_plan((stages, 2), schedule=Schedule.LAYERED)
    memory = Memory.HOST if host else Memory.DEVICE
    state = (StateShare(groups=("*",), shares={}, memory=memory),)
    return dataclasses.replace(made, state=state, order=order)


class SlowLink(UnitCosts):
    """State comes from the host in as long as some layers take."""

    def __init__(self, made: Plan, seconds: float) -> None:
        super().__init__(made)
        self._seconds = seconds

    def duration_s(self, instruction: Instruction) -> float:
        """As it says."""
        if isinstance(instruction, Prefetch):
            return self._seconds
        return super().duration_s(instruction)


def slowly(made: Plan, seconds: float = 100.0) -> Program:
    """The Program for a slow link."""
    return lower(made, CHAIN, rules=RULES, costs=SlowLink(made, seconds))


def order_of(made: Plan) -> str:
    """Backwards of the first microbatch and updates, by segment."""
    return " ".join(
        f"B{i.segment}" if isinstance(i, Backward) else f"u{i.group}"
        for i in slowly(made).body
        if isinstance(i, Update) or (isinstance(i, Backward) and not i.microbatches[0])
    )


def test_the_order_reads_like_this():
    assert order_of(plan(2)) == ("B5 B4 ul5 B3 ul4 B2 ul3 B1 ul2 B0 ul1 ul0")


@given(seed=st.integers(0, 2**32))
def test_no_stage_ever_holds_gradients_of_more_passes_than_it_has_room_for(seed: int):
    drawn, chain, rules = random_plan(seed, max_layers=16, max_microbatches=4)
    costs = SlowLink(drawn, seed % 11)
    report = check(lower(drawn, chain, rules=rules, costs=costs), drawn, chain)
    for place, passes in report.live_grads.items():
        assert 1 <= passes <= drawn.stage(place).grads


@pytest.mark.parametrize("order", UpdateOrder)
@pytest.mark.parametrize("grads", [1, 2, 4])
def test_all_that_fit_are_there_at_once(grads: int, order: UpdateOrder):
    made = plan(grads, order=order)
    report = check(slowly(made), made, CHAIN)
    assert report.live_grads == {"r0.s0": grads}


def test_a_pass_too_many_is_noticed():
    wider = slowly(plan(2))
    check(wider, plan(2), CHAIN)
    with pytest.raises(ProgramError) as error:
        check(wider, plan(1), CHAIN)
    assert (
        "is one pass too many: r0.s0 would hold gradients of 2 passes at once, and the "
        "plan has room for 1. The update of an earlier one comes first."
    ) in str(error.value)


def test_updates_that_wait_for_all_gradients_are_refused():
    with pytest.raises(PlanError) as error:
        lower(plan(2), CHAIN, rules=StepRules(clip=True))
    assert str(error.value) == (
        "Stage r0.s0 has room for gradients of 2 passes at once ('grads'), and "
        "clip_norm, skip_nonfinite and a dynamic loss scale need those of all before "
        "the first update. Plan anew for this training, or train without them."
    )


@given(seed=st.integers(0, 2**32))
def test_chunks_on_a_device_are_few_however_far_dispatch_runs_ahead(seed: int):
    drawn, chain, rules = random_plan(seed, max_layers=16, max_microbatches=4)
    body = lower(drawn, chain, rules=rules, costs=SlowLink(drawn, seed % 11)).body
    held = held_back(body, {})
    there: dict[str, list[object]] = {}
    for position, instr in enumerate(body):
        if position in held and held[position].kind is Kind.STATE:
            copies, left = there[held[position].place], held[position]
            if left in copies:  # they leave in turn
                del copies[: copies.index(left) + 1]
        if isinstance(instr, Prefetch) and instr.buffer.kind is Kind.STATE:
            there.setdefault(instr.buffer.place, []).append(None)
            assert len(there[instr.buffer.place]) <= CHUNKS_ON_DEVICE
        elif isinstance(instr, WriteBack) and instr.buffer.kind is Kind.STATE:
            copies = there[instr.buffer.place]
            copies[copies.index(None)] = instr.writes[0]
