"""What rests or waits in host memory changes no number, and does lie there."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from hexijax.layers.names import flatten
from hexijax.plan.plan import UpdateOrder
from hexijax.runtime.engine import Engine
from tests.laws.cases import BATCH_SIZE, Case, check, run
from tests.laws.law_models import tokens
from tests.laws.offload import (
    draw_offloaded,
    offloaded,
    rests_on_host,
    traits,
    watch,
)
from tests.laws.test_frozen import frozen_case

FEW = [88, 96]
"""Cheap, and between them everything that is drawn."""

MANY = range(100)

FROZEN = range(30)


@pytest.mark.parametrize(
    "seed", [FEW[0], *(pytest.param(x, marks=pytest.mark.laws) for x in FEW[1:])]
)
def test_offload_gives_the_plain_program_s_numbers(seed: int, monkeypatch: Any):
    one_step(draw_offloaded(seed), monkeypatch)


@pytest.mark.parametrize(
    "seed", [88, *(pytest.param(x, marks=pytest.mark.laws) for x in (14, 24, 97))]
)
def test_five_steps_are_the_same_bits_in_either_order(seed: int, monkeypatch: Any):
    case = draw_offloaded(seed)
    fifo, priority = (
        five_steps(
            dataclasses.replace(case, plan=dataclasses.replace(case.plan, order=order)),
            monkeypatch,
        )
        for order in UpdateOrder
    )
    for name, value in fifo.items():
        np.testing.assert_array_equal(value, priority[name], err_msg=name)


def five_steps(case: Case, monkeypatch: Any) -> dict[str, np.ndarray]:
    """Losses and the parameters that they end with."""
    case = small_chunks(case)
    engine = run(case, monkeypatch).engine
    assert bool(engine.program.drain) is (case.plan.order is UpdateOrder.PRIORITY)
    losses = [
        engine.step(tokens(BATCH_SIZE, case.seed + step), step).fetch()["loss"]
        for step in range(1, 5)
    ]
    return {"losses": np.array(losses), **flatten(engine.params())}


def small_chunks(case: Case) -> Case:
    """Some leaves in each, or some rows of large ones."""
    plan = dataclasses.replace(case.plan, chunk=256 if case.seed % 2 else 1500)
    return dataclasses.replace(case, plan=plan)


@pytest.mark.laws
@pytest.mark.parametrize("seed", MANY)
def test_any_plan_that_offloads_does(seed: int, monkeypatch: Any):
    one_step(draw_offloaded(seed), monkeypatch)


@pytest.mark.laws
@pytest.mark.parametrize("seed", FROZEN)
def test_so_does_any_of_a_model_that_trains_in_part(seed: int, monkeypatch: Any):
    one_step(offloaded(frozen_case(seed)), monkeypatch)


@pytest.mark.laws
def test_the_many_are_examples_of_everything():
    cases = [*map(draw_offloaded, MANY), *(offloaded(frozen_case(s)) for s in FROZEN)]
    found = Counter(trait for case in cases for trait in traits(case))
    assert len(found) == 13
    assert min(found.values()) >= 4, found


def one_step(case: Case, monkeypatch: Any) -> None:
    """Law 1, with everything where the Program says after each instruction."""
    case = small_chunks(case)
    init = Engine.init
    monkeypatch.setattr(
        Engine, "init", lambda self: (watch(self._executor), init(self))[1]
    )
    outcome = run(case, monkeypatch)
    check(case, outcome)
    resting = rests_on_host(outcome.engine)
    assert resting or "streamed" not in traits(case)
    for value in resting.values():
        for x in jax.tree.leaves(value):
            assert x.sharding.memory_kind == "pinned_host"
    targets = outcome.engine.targets()
    for each, copies in outcome.engine.slices().items():  # so a restore puts it there
        for x, like in zip(copies, targets[each], strict=True):
            assert x.sharding.memory_kind == like.sharding.memory_kind, each
