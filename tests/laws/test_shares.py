"""Uneven data parallelism: what computes and what stores are shared out apart.

The same laws as of any plan, on plans that free parameters after each pass, run layers
outside and microbatches inside, and hold the state wherever there is room.
"""

from typing import Any

import numpy as np
import pytest

from hexijax.plan.plan import Schedule
from hexijax.runtime.engine import Engine
from tests.laws.cases import Case, check, draw, reference, run
from tests.laws.law_models import tokens
from tests.laws.shares import computes_nothing, draw_shared, stores_nothing

FEW = [76, 94]
"""Cheap, and between them everything that ``shares`` draws."""

MANY = range(100)


@pytest.mark.parametrize("seed", [125])
def test_ministages_of_several_segments_give_the_plain_program_s_numbers(
    seed: int, monkeypatch: Any
):
    case = draw(seed, Schedule.LAYERED)
    (replica,) = case.plan.replicas
    sets = [stage.devices for stage in replica.stages]
    assert len(set(sets)) < len(sets)
    assert max(len(stage.segments) for stage in replica.stages) > 1
    assert replica.microbatches > 2
    check(case, run(case, monkeypatch))


@pytest.mark.laws
@pytest.mark.parametrize("seed", FEW)
def test_freed_parameters_and_uneven_state_give_the_plain_program_s_numbers(
    seed: int, monkeypatch: Any
):
    case = draw_shared(seed)
    engine = twice(case, monkeypatch)
    batch = tokens(case.plan.batch_size, seed)
    want, _ = reference(case.shape, False, engine.params(), batch, 0)
    assert engine.evaluate(batch, 0)["loss"] == pytest.approx(want["loss"], rel=2e-5)


@pytest.mark.laws
@pytest.mark.parametrize("seed", MANY)
def test_any_plan_that_shares_them_out_apart_does(seed: int, monkeypatch: Any):
    twice(draw_shared(seed), monkeypatch)


@pytest.mark.laws
def test_the_many_have_devices_that_store_nothing_and_that_only_store():
    plans = [draw_shared(seed).plan for seed in MANY]
    assert sum(map(stores_nothing, plans)) >= 20
    assert sum(map(computes_nothing, plans)) >= 20
    assert sum(any(stage.params for _, stage in p.stages()) for p in plans) >= 80
    assert sum(any(stage.waits for _, stage in p.stages()) for p in plans) >= 80
    assert len(plans) >= 100


def twice(case: Case, monkeypatch: Any) -> Engine:
    """Law 1, and a second run that gives the same bits."""
    first, second = run(case, monkeypatch), run(case, monkeypatch)
    for name, value in first.params.items():
        np.testing.assert_array_equal(value, second.params[name], err_msg=name)
    check(case, first)
    _freed_is_gone(first.engine)
    return first.engine


def _freed_is_gone(engine: Engine) -> None:
    """Between steps no parameters are left of what passes free."""
    for buffer in engine.live_buffers():
        if buffer.kind == "Param":
            keepers = {p for p, s in engine.plan.stages() if "kept" in s.params}
            keepers |= {p for p, s in engine.plan.stages() if not s.params}
            assert buffer.place in keepers
            assert buffer.microbatch is None
