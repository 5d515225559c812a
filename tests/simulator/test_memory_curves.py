"""What devices hold over a step, against the promise and against the schedule."""

import dataclasses
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hexijax.collector import collector_paused
from hexijax.costs import PlanCosts
from hexijax.costs.buffers import BufferBytes
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Array, Chain, Remat
from hexijax.plan.plan import Plan, Schedule
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Kind
from hexijax.simulator import predict
from hexijax.simulator.memory import lives
from hexijax.simulator.steps import Steps
from hexijax.simulator.tasks import tasks
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import frozen_plan, random_plan
from tests.simulator.test_fold import heavy, repeating
from tests.simulator.test_simulator import cluster

MACHINES = cluster(("a", 64), ("b", 64), ("c", 64), ("store", 1))


def unlike(chain: Chain, rng: random.Random) -> Chain:
    """Layers whose borders, residuals and work differ by far; a batch of any size."""
    unit = rng.choice([1, 10**4, 10**6])
    layers = []
    for layer in chain.layers:
        flops = rng.choice([1e9, 1e11])
        border = rng.choice([0, 1, 30]) * unit if layer.border_bytes else 0
        kept = {policy: rng.choice([1, 100]) * unit for policy in Remat}
        layers.append(
            dataclasses.replace(
                layer,
                forward_flops=flops,
                backward_flops=rng.choice([1, 2]) * flops,
                border_bytes=border,
                activation_bytes=kept,
            )
            if layer.backward
            else dataclasses.replace(layer, forward_flops=flops, border_bytes=border)
        )
    batch = {"tokens": Array(shape=(rng.choice([1, 10**3, 10**6]),), dtype="int32")}
    return dataclasses.replace(chain, layers=tuple(layers), batch=batch)


@settings(max_examples=40)
@given(st.integers(0, 100_000))
@example(20)  # cotangents of a GPipe come back while its forwards run
@example(132)
@example(169)  # the last of four stages has four batches
@example(229)  # residuals go to the host more slowly than they are made
@example(597)  # another replica is ahead
@example(654)
@example(172)  # cotangents come back to an eager stage before it needs them
@example(243)  # an eager stage is ahead of the next by more than that one holds
def test_no_device_holds_more_than_promised(seed: int):
    check_promise(seed, *random_plan(seed, max_layers=12, max_microbatches=6))


@settings(max_examples=40)
@given(st.integers(0, 100_000))
@example(122)  # cotangents of a layered pass lie where activations were
@example(145)  # other replicas' gradients come while all activations are there
@example(165)  # a device of a stage is a home of its own, too
@example(657)
def test_nor_where_some_parameters_do_not_train(seed: int):
    check_promise(seed, *frozen_plan(seed))


@pytest.mark.laws
@pytest.mark.parametrize("first", range(0, 3000, 500))
def test_promises_of_many_plans_hold(first: int):
    for seed in range(first, first + 500):
        check_promise(seed, *frozen_plan(seed))
        check_promise(seed, *random_plan(seed, max_layers=12, max_microbatches=6))


def check_promise(seed: int, plan: Plan, chain: Chain, rules: StepRules) -> None:
    """Of a chain like this whose layers are unlike."""
    chain = unlike(chain, random.Random(seed))
    timeline = predict(plan, chain, MACHINES, rules=rules, events=False, memory=True)
    promised = plan_memory(plan, chain, MACHINES)
    for place, stage in plan.stages():
        for device in stage.devices:
            assert device in timeline.memory, place
    for device, curve in timeline.memory.items():
        assert curve.peak_bytes <= promised[device].total_bytes, device
        # State never leaves; all else does, at some time of the step.
        assert min(curve.num_bytes) >= promised[device].state_bytes
        assert list(curve.times_s) == sorted(set(curve.times_s))
        assert 0 == curve.times_s[0] <= curve.times_s[-1] < timeline.step_s


def residuals(plan: Plan, chain: Chain) -> dict[str, int]:
    """By stage, the most microbatches whose residuals live at once."""
    costs = PlanCosts(plan, chain, MACHINES)
    program = lower(plan, chain, rules=StepRules(), costs=costs, checked=False)
    sizes = BufferBytes(plan, chain, MACHINES, costs)
    with collector_paused():
        steps = Steps(tasks(program, costs, MACHINES))
        step_s = steps.until_they_repeat()
        found = [*lives(program, steps, step_s, costs, sizes)]
    most: dict[str, int] = {}
    for place, _ in plan.stages():
        here = [
            x
            for x in found
            if x.place == place and x.buffer and x.buffer.kind is Kind.RES
        ]
        most[place] = max(
            sum(other.start_s <= life.start_s < other.end_s for other in here)
            for life in here
        )
    return most


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 9), (6, 6)])
def test_a_stage_of_1f1b_keeps_as_many_as_there_are_stages_from_it_on(
    stages: int, microbatches: int
):
    chain = heavy(make_chain(stages), random.Random(0))
    plan = make_plan((make_stages([1] * stages), microbatches))
    assert [*residuals(plan, chain).values()] == [
        min(stages - k, microbatches) for k in range(stages)
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 9), (6, 9)])
def test_a_stage_of_eager_1f1b_keeps_two_more_than_the_next(
    stages: int, microbatches: int
):
    chain = heavy(make_chain(stages), random.Random(0))
    plan = make_plan((make_stages([1] * stages), microbatches), schedule=Schedule.EAGER)
    assert [*residuals(plan, chain).values()] == [
        min(2 * (stages - k) - 1, microbatches) for k in range(stages)
    ]


def test_gpipe_keeps_every_microbatch():
    chain = heavy(make_chain(3), random.Random(0))
    plan = make_plan((make_stages([1] * 3), 7), schedule=Schedule.GPIPE)
    assert [*residuals(plan, chain).values()] == [7, 7, 7]


@settings(max_examples=15)
@given(st.integers(0, 10_000))
def test_what_is_played_once_fills_every_device_alike(seed: int):
    plan, chain, machines = repeating(seed)
    chain = unlike(chain, random.Random(seed))
    folded = predict(plan, chain, machines, events=False, memory=True).memory
    full = predict(plan, chain, machines, events=False, memory=True, folded=False)
    promised = plan_memory(plan, chain, machines)
    assert folded.keys() == full.memory.keys()
    for device, curve in folded.items():
        # Sums of unlike homes are on their way at unlike times.
        room = promised[device].sync_bytes + 0.02 * promised[device].total_bytes
        difference = curve.peak_bytes - full.memory[device].peak_bytes
        assert abs(difference) <= room, device
        assert curve.peak_bytes <= promised[device].total_bytes, device


def test_memory_is_looked_at_only_when_asked_for():
    chain, plan = make_chain(2), make_plan((make_stages([1, 1]), 2))
    assert predict(plan, chain, MACHINES).memory == {}


@pytest.mark.parametrize("gb_per_s", [1e-3, 1.0])
@pytest.mark.parametrize("freed", [False, True])
def test_layered_holds_gradients_of_two_passes_however_slow_the_links(
    gb_per_s: float, freed: bool
):
    parts = []
    for layers in (8, 16):
        chain = make_chain(layers, sizes=[4096] * layers)
        machines = cluster(("a", 1), ("b", 1), gb_per_s=gb_per_s)
        stages = [
            make_stages([layers], prefix=name, segments=[[1] * layers], freed=freed)
            for name in "ab"
        ]
        plan = make_plan(*((each, 3) for each in stages), schedule=Schedule.LAYERED)
        timeline = predict(plan, chain, machines, events=False, memory=True)
        parts.append(plan_memory(plan, chain, machines)["a/0"])
        assert timeline.memory["a/0"].peak_bytes <= parts[-1].total_bytes
    one = 4 * chain.group("l0").size
    assert [each.leaving_bytes for each in parts] == [2 * one, 2 * one]
    assert parts[1].passes_bytes == (2 * one if freed else 0)
