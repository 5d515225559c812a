"""DeepSpeed's order of a step: a stage's exchanges, and nothing lost."""

import dataclasses
import textwrap

from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.plan import Schedule
from hexijax.program.linearise import UnitCosts
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Backward, Forward, Program, Recv, Send
from hexijax.published.deepspeed import pipeline_order
from tests.program.examples import make_chain, make_plan, make_stages


def ordered(stages: int, microbatches: int, replicas: int = 1) -> tuple[Program, ...]:
    """A 1f1b Program as lowered, and in DeepSpeed's order."""
    columns = [
        (make_stages([1] * stages, prefix=prefix), microbatches)
        for prefix in "abc"[:replicas]
    ]
    plan = make_plan(*columns, schedule=Schedule.ONE_F_ONE_B)
    program = lower(plan, make_chain(stages), rules=StepRules())
    return program, pipeline_order(program, UnitCosts(plan))


def turns(program: Program, place: str) -> str:
    """A stage's turns and moves: F0 B0, ``<`` receives and ``>`` sends."""
    words = []
    for i in program.body:
        match i:
            case Forward(place=at, microbatches=(m, _)) if at == place:
                words.append(f"F{m}")
            case Backward(place=at, microbatches=(m, _)) if at == place:
                words.append(f"B{m}")
            case Send(source=at) if at == place:
                moved = i.reads[0].buffer
                words.append(f"{moved.kind.lower()}{moved.microbatch}>")
            case Recv(target=at) if at == place:
                words.append(f"<{i.writes[0].kind.lower()}{i.writes[0].microbatch}")
    return " ".join(words)


def test_activations_leave_after_the_gradient_has_come():
    _, program = ordered(stages=3, microbatches=4)
    shown = "\n".join(turns(program, f"r0.s{s}") for s in range(3))
    middle = (
        "<act0 F0 act0> <act1 F1 <cot0 act1> B0 cot0> <act2 F2 <cot1 act2> B1 "
        "cot1> <act3 F3 <cot2 act3> B2 cot2> <cot3 B3 cot3>"
    )
    assert shown == textwrap.dedent(f"""\
        F0 act0> F1 act1> F2 <cot0 act2> B0 F3 <cot1 act3> B1 <cot2 B2 <cot3 B3
        {middle}
        <act0 F0 B0 cot0> <act1 F1 B1 cot1> <act2 F2 B2 cot2> <act3 F3 B3 cot3>""")


@given(
    stages=st.integers(1, 4), microbatches=st.integers(1, 6), replicas=st.integers(1, 3)
)
def test_it_is_the_same_step_in_an_order_that_runs(
    stages: int, microbatches: int, replicas: int
):
    before, after = ordered(stages, microbatches, replicas)
    assert sorted(map(str, before.body)) == sorted(map(str, after.body))
    inside = {buffer for i in after.body for buffer in i.writes}
    made = set()
    for instruction in after.body:
        unmade = {r.buffer for r in instruction.reads} & inside - made
        assert not unmade
        made |= {*instruction.writes}


def test_only_the_body_is_put_in_order():
    before, after = ordered(stages=2, microbatches=2)
    assert before.body != after.body
    assert dataclasses.replace(after, body=before.body) == before
