"""A tensor degree that a kind's table lacks is no option, and stops nobody."""

import dataclasses

import pytest

from hexijax.planner import PlanOptions, make_plan
from hexijax.planner.baselines import all_baselines
from tests.plan.examples import make_chain, make_cluster, make_kind

CHAIN = make_chain(6)


def measured_at_degree_one():
    """A node of a kind whose every layer was measured, at tensor degree 1 only."""
    rows = tuple(
        {
            "signature": signature,
            "dtype": "float32",
            "tensor": 1,
            "samples": samples,
            "forward_s": samples * 1e-3,
            "backward_s": samples * 2e-3,
        }
        for signature in dict.fromkeys(layer.signature for layer in CHAIN.layers)
        for samples in (1, 8)
    )
    kind = dataclasses.replace(make_kind("fast"), layer_times=rows)
    return make_cluster([[("fast", 4)]], kinds=[kind])


def test_the_planner_leaves_the_degree_out():
    plan = make_plan(
        CHAIN,
        measured_at_degree_one(),
        batch_size=16,
        dtype="float32",
        options=PlanOptions(),
    )
    assert {stage.tensor for _, stage in plan.stages()} == {1}


@pytest.mark.parametrize("name", all_baselines())
def test_baselines_leave_it_out_too(name: str):
    plan = all_baselines()[name](
        CHAIN,
        measured_at_degree_one(),
        batch_size=16,
        dtype="float32",
        options=PlanOptions(),
    )
    assert plan is None or {stage.tensor for _, stage in plan.stages()} == {1}
