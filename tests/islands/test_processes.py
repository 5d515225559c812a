"""A plan over processes gives what it gives in one, bit by bit, and obeys law 1."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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
    told = running.all(do="train", islands=count, seed=seed, whole=bits)
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
            engine=cast("Any", None),
            result={},
            grads=grads,
            params={},
            want_result={},
            want_grads=want_grads,
        )
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


@pytest.fixture(scope="module", params=[2, 3, 4])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Islands]]:
    """So many islands, and they."""
    folder = tmp_path_factory.mktemp("islands")
    with islands(request.param, folder) as made:
        yield request.param, made


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(11))
def test_any_plan_over_islands_obeys_law_1(running: tuple[int, Islands], seed: int):
    told = check(running[1], running[0], seed, bits=seed % 4 == 0)
    assert sum(said["came"] for said in told.values()) > 0


@pytest.mark.laws
def test_islands_of_unlike_software_train_one_model(tmp_path: Path):
    other = os.environ.get("HEXIJAX_OTHER_PYTHON")
    if not other:
        pytest.skip("HEXIJAX_OTHER_PYTHON names no interpreter with another JAX")
    with islands(2, tmp_path, python={"n1": other}) as running:
        told = running.all(do="train", islands=2, seed=0, whole=True)
    want = cases.outcome(cases.make(2, 0, assign(cases.cluster(2))), 0)
    first, second = told.values()
    assert first["versions"] != second["versions"]
    for key in ("first", "seen", "second"):
        assert first[key] == second[key]
        for name, value in want[key].items():
            assert first[key][name] == pytest.approx(value, rel=1e-5), (key, name)
