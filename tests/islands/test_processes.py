"""A plan over processes gives what it gives in one, bit by bit, and obeys law 1."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexijax.runtime.devices import assign
from tests.islands import cases
from tests.islands.processes import Islands, islands
from tests.laws import cases as laws
from tests.laws.cases import Outcome, gradient_error, model, reference
from tests.laws.law_models import tokens


def check(running: Islands, count: int, seed: int, *, bits: bool) -> dict[str, Any]:
    """Each island has what the plain program gives; with ``bits`` also exactly what
    the plan gives in one process."""
    told = running.all(do="train", islands=count, seed=seed)
    case = cases.draw(count, seed)
    batch = tokens(laws.BATCH_SIZE, seed)
    want, want_grads = reference(
        case.shape, case.clipped, model(case.shape)[1], batch, 0
    )
    first, *_ = told.values()
    for key, value in want.items():
        assert first["first"][key] == laws._near(value), (key, case)
    grads = {k: first[f"gradient {k}"] for k in want_grads}
    error, leaf = gradient_error(
        Outcome(
            engine=None,
            result={},
            grads=grads,
            params={},
            want_result={},
            want_grads=want_grads,
        )  # type: ignore[arg-type]
    )
    assert error <= 1.0, (error, leaf, case)
    wanted = dict(first)
    if bits:
        engine = cases.make(count, seed, assign(cases.cluster(count)))
        wanted |= cases.outcome(engine, seed)
    for name, got in told.items():
        for key, value in wanted.items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(got[key], value, err_msg=f"{name} {key}")
            elif isinstance(value, dict):
                assert got[key] == value, (name, key, case)
    return told


@pytest.mark.laws
@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_plan_over_islands_obeys_law_1(
    count: int, tmp_path: Path, record_property: Any
):
    with islands(count, tmp_path) as running:
        for seed in range(11):
            told = check(running, count, seed, bits=seed % 4 == 0)
            assert sum(said["came"] for said in told.values()) > 0, seed
