"""Choices as plans: text and back, judged like any other, small cards alone."""

import dataclasses
import math

import pytest

from experiments.offloaded import cells
from hexijax.cluster import Cluster, DeviceGroup
from hexijax.layers.chain import Remat
from hexijax.layers.known import gpt
from hexijax.plan import text
from hexijax.plan.plan import (
    Memory,
    Params,
    Plan,
    Replica,
    Schedule,
    Stage,
    UpdateOrder,
    stage_place,
)
from hexijax.plan.training import Training
from hexijax.planner import InfeasiblePlanError, PlanOptions, make_plan
from hexijax.planner.baselines.offload import rests_on_host
from hexijax.planner.effort import Effort
from hexijax.planner.judge import Judge
from hexijax.planner.offload.budget import Budget
from hexijax.planner.offload.choice import Kept, LayerChoice, State, Weights
from hexijax.planner.offload.emit import placed_plan
from hexijax.planner.offload.place import Placer
from hexijax.planner.offload.score import QUICK
from hexijax.planner.offload.search import Offloading, may_offload
from hexijax.planner.score import Scorer
from hexijax.planner.search import search
from hexijax.simulator.predict import predict
from tests.planner.offload_boxes import MIB, machine

CHAIN = gpt(depth=4, width=512, num_heads=4, length=64, vocab_size=1024)
WIDE = gpt(depth=5, width=2048, num_heads=16, length=64, vocab_size=1024)
ON_DEVICES = PlanOptions(offload=False)


def pipeline(*stops: int) -> Plan:
    """A stage on each device."""
    stages = tuple(
        Stage(devices=(f"box/{i}",), layers=(start, stop), dtype="bfloat16")
        for i, (start, stop) in enumerate(zip((0, *stops), stops, strict=False))
    )
    replica = Replica(stages=stages, microbatches=2, microbatch_size=2, samples=4)
    return Plan(replicas=(replica,), batch_size=4)


def test_a_choice_is_a_plan_that_reads_back():
    choice = (
        LayerChoice(),
        LayerChoice(kept=Kept.DOTS),
        LayerChoice(weights=Weights.STREAMED, state=State.STREAMED, kept=Kept.FULL),
        LayerChoice(weights=Weights.STREAMED, state=State.STREAMED, kept=Kept.HOST),
        LayerChoice(state=State.HOST),
        LayerChoice(state=State.HOST),
    )
    plan = placed_plan(pipeline(6), CHAIN, {stage_place(0, 0): choice})
    stage = plan.replicas[0].stages[0]
    assert stage.segments == (1,) * 6
    assert stage.remat[1:4] == (Remat.DOTS, Remat.FULL, Remat.DOTS)
    assert [stage.streams(g) for g in range(6)] == [False, False, True, True, 0, 0]
    assert [stage.keeps_on_host(g) for g in range(6)] == [0, 0, 0, True, 0, 0]
    assert plan.order is UpdateOrder.PRIORITY
    homes = {
        group: (share.memory, share.update)
        for share in plan.state
        for group in share.groups
    }
    assert homes["*"] == (Memory.DEVICE, Memory.DEVICE)
    assert homes["blocks/1"] == homes["blocks/2"] == (Memory.HOST, Memory.DEVICE)
    assert homes["blocks/3"] == homes["head"] == (Memory.HOST, Memory.HOST)
    assert "embed/embedding" not in homes, "tied: its first user's choice counts"
    assert text.parse(text.render(plan)) == plan


def test_all_on_the_device_is_the_plan_in_segments():
    plan = placed_plan(pipeline(6), CHAIN, {stage_place(0, 0): (LayerChoice(),) * 6})
    assert plan.state == pipeline(6).state
    assert plan.order is UpdateOrder.FIFO
    assert plan.replicas[0].stages[0].params == ()


@pytest.mark.laws
def test_what_fits_nowhere_fits_with_its_host():
    cluster = machine(3700)
    with pytest.raises(InfeasiblePlanError):
        make_plan(WIDE, cluster, batch_size=4, dtype="bfloat16", options=ON_DEVICES)
    plan = make_plan(WIDE, cluster, batch_size=4, dtype="bfloat16")
    assert any(share.memory is Memory.HOST for share in plan.state)
    assert plan.prediction
    assert max(plan.prediction.memory_bytes.values()) <= 3700 * MIB
    timeline = predict(plan, WIDE, cluster)
    assert timeline.step_s == pytest.approx(plan.prediction.step_s)
    assert timeline.link_bytes["box/0 host in"] > 0


@pytest.mark.laws
def test_borders_wait_before_a_host_updates():
    """Seven times as fast, for a GPT of 4 B on a card of which 12 GiB are used."""
    chain = gpt(depth=21, width=4096, num_heads=32, length=1024, vocab_size=50304)
    cluster = cells.cluster(12, rates={"in": 44e9, "out": 44e9, "update": 3e8})
    plan = make_plan(chain, cluster, batch_size=8, dtype="bfloat16")
    assert plan.prediction
    assert plan.prediction.step_s < 3
    assert all(share.update is Memory.DEVICE for share in plan.state)
    assert Memory.HOST in plan.replicas[0].stages[0].waits


def test_a_host_that_is_too_small_is_said_with_both_numbers():
    cluster = machine(3700, host_gib=7.5)
    says = r"its host needs 4,[0-9,]+ and has 488,064,465 beside its process"
    with pytest.raises(InfeasiblePlanError, match=says):
        make_plan(WIDE, cluster, batch_size=4, dtype="bfloat16")


def test_only_the_small_card_offloads():
    cluster = machine(60_000, 3382)
    plan = pipeline(2, 7)
    judge = Judge(WIDE, cluster, PlanOptions())
    assert not judge.fits(plan)
    every = [*Placer(WIDE, cluster, PlanOptions(), judge).place(plan)]
    assert {made.order for made in every} == set(UpdateOrder)
    placed = min(filter(judge.fits, every), key=judge.step_s)
    large, small = placed.replicas[0].stages
    assert large == plan.replicas[0].stages[0]
    assert small != plan.replicas[0].stages[1]
    stored = {name for share in placed.state for name in share.groups} - {"*"}
    assert stored
    assert stored <= {*(f"blocks/{i}" for i in range(1, 5)), "head"}
    assert Params.FREED not in small.params
    assert predict(placed, WIDE, cluster).step_s > 0


def test_what_was_too_slow_is_looked_for_again_where_more_time_is_allowed():
    cluster = machine(3700)
    judge = Judge(WIDE, cluster, PlanOptions())
    placer = Placer(WIDE, cluster, PlanOptions(), judge)
    assert not [*placer.place(pipeline(7), below_s=1e-9)]
    assert [*placer.place(pipeline(7))]


def test_what_would_take_longer_than_allowed_is_not_looked_for():
    cluster = machine(3792)
    judge = Judge(WIDE, cluster, PlanOptions())
    one_look = QUICK * 2 * 2 * 7  # there and back, two microbatches, seven layers

    def found(most: float) -> tuple[int, int]:
        placer, budget = Placer(WIDE, cluster, PlanOptions(), judge), Budget(most)
        return len([*placer.place(pipeline(7), budget=budget)]), budget.drawn

    assert found(one_look - 1) == (0, 0)
    some, every = found(one_look), found(math.inf)
    assert one_look <= some[1] < every[1]
    assert 0 < some[0] < every[0]


def test_a_brief_search_places_a_model_too():
    """In less time, and no plan is better than that of a search in full."""
    cluster = machine(3700)
    full = make_plan(WIDE, cluster, batch_size=4, dtype="bfloat16")
    brief = make_plan(
        WIDE,
        cluster,
        batch_size=4,
        dtype="bfloat16",
        options=PlanOptions(brief=True),
    )
    assert full.prediction
    assert brief.prediction
    assert rests_on_host(brief)
    step_s = full.prediction.step_s
    assert step_s <= brief.prediction.step_s <= step_s * 1.25


def test_a_regime_that_takes_long_leaves_others_their_share(
    monkeypatch: pytest.MonkeyPatch,
):
    """What may be chosen from besides makes no plan slower."""
    most = Effort.of(machine(3700)).offloaded
    monkeypatch.setattr("hexijax.planner.offload.search.BRIEF", most // 100)
    cluster, options = machine(3700), PlanOptions(brief=True)
    added: list[Plan] = []
    offloading = Offloading(
        WIDE,
        cluster,
        options,
        Judge(WIDE, cluster, options),
        Scorer(WIDE, cluster, 4, options),
        add=added.append,
        check_time=lambda: None,
    )
    offloading.look([pipeline(7)], [], least=1e3, formula=1e3)
    assert {plan.schedule for plan in added} == {
        Schedule.ONE_F_ONE_B,
        Schedule.LAYERED,
    }


@pytest.mark.parametrize("microbatches", [1, 2])
def test_state_that_streams_beside_backwards_costs_no_time(microbatches: int):
    """Its copies are handed over before the backward they run beside."""
    chain = gpt(depth=8, width=2048, num_heads=16, length=1024)
    cluster = machine(80_000)
    stage = Stage(devices=("box/0",), layers=(0, 10), dtype="bfloat16")
    replica = Replica(
        stages=(stage,),
        microbatches=microbatches,
        microbatch_size=64 // microbatches,
        samples=64,
    )
    plan = Plan(replicas=(replica,), batch_size=64)

    def step_s(streamed: int) -> float:
        choice = [LayerChoice()] * 10
        for i in range(8, 8 - streamed, -1):
            choice[i] = LayerChoice(state=State.STREAMED)
        choices = {stage_place(0, 0): tuple(choice)}
        placed = placed_plan(plan, chain, choices, leaving=4)
        return predict(placed, chain, cluster, events=False).step_s

    assert step_s(4) <= step_s(0) * 1.01


def slow(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """The machine with a host link as it was measured."""
    (node,) = cluster.nodes
    node = dataclasses.replace(
        node, host_link_bytes_per_s=bytes_per_s, host_out_bytes_per_s=bytes_per_s
    )
    return dataclasses.replace(cluster, nodes=(node,))


def test_a_slow_host_link_leaves_the_plan_as_it_is_without_a_host():
    """2.7 GB/s, as a machine was measured to have."""
    chain = gpt(depth=6, width=1024, num_heads=16, length=512, vocab_size=1024)
    cluster = slow(machine(1900), 2.7e9)
    by_default, on_devices = (
        make_plan(chain, cluster, batch_size=32, dtype="bfloat16", options=options)
        for options in (None, ON_DEVICES)
    )
    assert by_default == on_devices
    assert not rests_on_host(by_default)


def test_with_room_on_the_device_nothing_of_the_host_is_looked_at():
    cluster = machine(60_000)
    by_default, on_devices = (
        search(WIDE, cluster, batch_size=4, dtype="bfloat16", options=options)
        for options in (None, ON_DEVICES)
    )
    assert by_default.plan == on_devices.plan
    assert by_default.played == on_devices.played


def test_offload_is_left_out_where_asked_or_where_jax_pins_no_memory():
    cluster = machine(3700)
    assert may_offload(cluster, PlanOptions())
    assert not may_offload(cluster, PlanOptions.of(Training(offload=False)))
    node = dataclasses.replace(
        cluster.nodes[0], devices=(DeviceGroup(kind="ascend-910b-64g", count=1),)
    )
    other = Cluster(name="other", nodes=(node,))
    assert not may_offload(other, PlanOptions())
