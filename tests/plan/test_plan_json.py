"""plan.json: round trips, the form that reports share, and what damage says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.plan.plan import PlanError
from hexijax.plan.serial import from_json, load, loads, report_replicas, save, to_json
from tests.plan.examples import make_chain, make_cluster
from tests.plan.random_plans import random_plan
from tests.plan.test_plan_text import UNEVEN


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_every_plan_survives_json(seed: int):
    plan = random_plan(seed)
    assert from_json(json.loads(json.dumps(to_json(plan)))) == plan


def test_reports_name_layers_and_degrees():
    first = report_replicas(UNEVEN)[0]
    assert {k: v for k, v in first.items() if k != "stages"} == {
        "microbatches": 6,
        "microbatch_size": 8,
        "samples": 44,
    }
    assert first["stages"][0] == {
        "layers": 4,
        "layer_range": [0, 4],
        "tensor_degree": 2,
        "data_degree": 2,
        "devices": ["fast/0", "fast/1", "fast/2", "fast/3"],
        "dtype": "bfloat16",
        "segments": [2, 2],
        "remat": ["none", "none", "none", "full"],
        "params": ["kept", "kept"],
        "waits": ["device", "device"],
        "residuals": ["device", "device"],
        "grads": 0,
        "leaving": 0,
    }


def test_a_saved_plan_stands_alone(tmp_path: Path):
    path = tmp_path / "plan.json"
    save(path, UNEVEN, make_cluster(), make_chain())
    saved = load(path)
    assert saved.plan == UNEVEN
    assert saved.cluster == make_cluster()
    assert saved.chain == make_chain()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def _with(path: str, value: Any) -> dict[str, Any]:
    """UNEVEN's JSON with one value replaced."""
    data = to_json(UNEVEN)
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    at: Any = data
    for parent in parents:
        at = at[parent]
    at[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 2, "plan has format version '2'; this hexijax reads version 1."),
        ("batch_size", "64", "plan.batch_size: expected a whole number, found '64'."),
        ("batch_size", -1, "plan.batch_size: expected a finite number from 0"),
        ("batch_size", True, "plan.batch_size: expected a whole number, found True."),
        ("batchsize", 1, "unknown key 'batchsize'. Did you mean 'batch_size'?"),
        (
            "schedule",
            "1f2b",
            "gpipe, interleaved, zero-bubble, eager-1f1b, layered, found",
        ),
        ("replicas", [], "plan.replicas: expected at least one, found []."),
        ("replicas.0.stages", 3, "plan.replicas[0].stages: expected a list of objects"),
        (
            "replicas.0.stages.1.layers",
            5,
            "expected 2, as in layer_range [4, 6], found 5.",
        ),
        (
            "replicas.0.stages.1.layer_range",
            [6, 4],
            "[first, one past the last], found",
        ),
        ("replicas.0.stages.1.layer_range", [0, 10**9], "[first, one past the last]"),
        (
            "replicas.0.stages.1.devices",
            "a/0",
            "stages[1].devices: expected a list [...]",
        ),
        (
            "replicas.0.stages.1.tensor_degree",
            1.5,
            "tensor_degree: expected a whole number",
        ),
        (
            "state.1.shares",
            {"a/0": None},
            "shares['a/0']: expected a number, found None.",
        ),
        (
            "prediction.step_s",
            [],
            "plan.prediction.step_s: expected a number, found [].",
        ),
    ],
)
def test_damage_is_named_by_its_path(path: str, value: Any, message: str):
    with pytest.raises(PlanError) as caught:
        from_json(_with(path, value))
    assert message in str(caught.value)


def test_a_damaged_file_is_refused(tmp_path: Path):
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="Cannot read the plan .*: No such file"):
        load(path)
    save(path, UNEVEN, make_cluster(), make_chain())
    text = path.read_text()
    with pytest.raises(PlanError, match="its chain is not the one that was saved"):
        loads(text.replace('"blocks/3/scale"', '"blocks/3/skale"').encode())
    with pytest.raises(PlanError, match="is not JSON: Expecting"):
        loads(text[:-4].encode())
    with pytest.raises(PlanError, match="is not JSON: too deeply nested"):
        loads(b"[" * 100_000)
    with pytest.raises(PlanError, match="is not JSON: NaN is no number"):
        loads(text.replace("0.0125", "NaN").encode())
