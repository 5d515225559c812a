"""What an explanation says of host memory: what is there, updates, order, the link."""

import dataclasses

from hexijax.layers.known import gpt
from hexijax.plan.plan import Plan, Schedule, UpdateOrder, stage_place
from hexijax.planner.offload.choice import LayerChoice, State, Weights
from hexijax.planner.offload.emit import placed_plan
from hexijax.report.judged import judge
from hexijax.report.offloaded import offloading
from hexijax.report.passes import passing
from hexijax.report.problem import Problem
from tests.planner.offload_boxes import machine
from tests.planner.test_offload_plans import pipeline

CHAIN = gpt(depth=4, width=512, num_heads=4, length=64, vocab_size=1024)
PROBLEM = Problem(name="gpt", chain=CHAIN, cluster=machine(60_000), batch_size=4)
STREAMED = LayerChoice(weights=Weights.STREAMED, state=State.STREAMED)
PLAN = placed_plan(
    pipeline(6),
    CHAIN,
    {
        stage_place(0, 0): (
            LayerChoice(),
            LayerChoice(),
            LayerChoice(state=State.STREAMED),
            STREAMED,
            STREAMED,
            LayerChoice(state=State.HOST),
        )
    },
)


def lines(plan: Plan) -> list[str]:
    return [*offloading(judge("plan", plan, PROBLEM))]


def test_what_is_on_the_host_is_said_in_words():
    streams, state, order, link = lines(PLAN)
    assert streams == (
        "streamed parameters come from host memory for each pass, while the pass "
        "before computes, and go after it"
    )
    assert state == (
        "state in host memory: of blocks/1 ... blocks/3 (3 groups) passes through the "
        "device in chunks for its update; of head is updated by the host's cores"
    )
    assert order == (
        "updates that find no time beside the backwards run in the next step, each "
        "before the forward that needs it"
    )
    assert link.startswith("the host link is busy: of box/0 ")
    assert "% of the step in and " in link
    assert "% out, its cores " in link


def test_first_come_first_served_is_said_so():
    fifo = dataclasses.replace(PLAN, order=UpdateOrder.FIFO)
    assert "all updates run before the next step's first forward" in lines(fifo)


def test_room_for_few_gradients_is_said():
    replicas = tuple(
        dataclasses.replace(
            r, stages=tuple(dataclasses.replace(s, grads=2) for s in r.stages)
        )
        for r in PLAN.replicas
    )
    plan = dataclasses.replace(PLAN, replicas=replicas, schedule=Schedule.LAYERED)
    line = next(passing(judge("plan", plan, PROBLEM)))
    assert (
        "box/0 has room for the gradients of 2 segments: a later one waits for their "
        "updates"
    ) in line


def test_of_what_is_on_the_device_nothing_is_said():
    assert lines(pipeline(6)) == []


def test_host_bytes_of_a_node_are_those_of_the_promise():
    judged = judge("plan", PLAN, PROBLEM)
    promised = sum(parts.host_bytes for parts in judged.memory.values())
    assert judged.figures()["host_memory_bytes_by_node"] == {"box": promised}
    (line,) = (x for x in passing(judged) if x.startswith("in host memory"))
    assert "on box: parameters of" in line
    assert line.endswith(", state")
