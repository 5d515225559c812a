"""Eager 1F1B beside 1F1B, where borders take time."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.plan.plan import Schedule
from hexijax.planner.pace import pipeline_s
from hexijax.simulator import predict
from tests.program.examples import make_chain, make_plan, make_stages
from tests.simulator.test_simulator import cluster


def step_s(
    schedule: Schedule, *, stages: int, microbatches: int, border_bytes: int
) -> float:
    """Of alike stages of 10 + 20 ms, borders of 1 ms each 10 MB."""
    chain = make_chain(stages)
    layers = tuple(
        dataclasses.replace(
            layer,
            forward_flops=1e11,
            backward_flops=2e11,
            border_bytes=border_bytes if layer.border_bytes else 0,
        )
        for layer in chain.layers
    )
    names = [f"n{k}" for k in range(stages)]
    made = [
        dataclasses.replace(stage, devices=(f"{name}/0",))
        for name, stage in zip(names, make_stages([1] * stages), strict=True)
    ]
    plan = make_plan((tuple(made), microbatches), schedule=schedule)
    machines = cluster(*((name, 1) for name in names), gb_per_s=10)
    return predict(plan, dataclasses.replace(chain, layers=layers), machines).step_s


@settings(max_examples=15)
@given(
    stages=st.integers(2, 5),
    microbatches=st.integers(1, 12),
    border_bytes=st.integers(0, 400_000_000),
)
def test_it_is_never_slower_where_stages_are_alike(
    stages: int, microbatches: int, border_bytes: int
):
    early_s, plain_s = (
        step_s(
            schedule,
            stages=stages,
            microbatches=microbatches,
            border_bytes=border_bytes,
        )
        for schedule in (Schedule.EAGER, Schedule.ONE_F_ONE_B)
    )
    assert early_s <= plain_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("schedule", "ahead"), [(Schedule.ONE_F_ONE_B, 1), (Schedule.EAGER, 2)]
)
@pytest.mark.parametrize("border_s", [0.0, 0.005, 0.01, 0.025])
def test_the_formula_knows_what_borders_cost(
    schedule: Schedule, ahead: int, border_s: float
):
    # An inner stage sends activations and cotangents over one network card.
    first_s, next_s = pipeline_s(
        [0.03] * 4, [border_s] * 3, 4, ahead=ahead, way_s=2 * border_s
    )
    found_s = step_s(
        schedule, stages=4, microbatches=40, border_bytes=int(border_s * 10e9)
    )
    assert found_s == pytest.approx(first_s + 39 * next_s, rel=0.04)


def test_borders_of_a_third_of_a_stage_s_time_cost_a_trip_and_no_more():
    early_s = step_s(
        Schedule.EAGER, stages=4, microbatches=40, border_bytes=100_000_000
    )
    assert early_s == pytest.approx(43 * 0.03 + 6 * 0.01, rel=0.01)
