"""An evaluation under any plan is one device's, and training does not notice it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexijax.errors import UserError
from hexijax.job.evaluation import evaluate
from hexijax.runtime import tracing
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from tests.laws import cases
from tests.laws.cases import BATCH_SIZE, Case, chain, cluster, draw, model
from tests.laws.law_models import tokens
from tests.laws.test_exactness import SEEDS

SIZES = (BATCH_SIZE, BATCH_SIZE, 5)
"""Samples of the batches evaluated: the last one is short."""


def held_out() -> list[dict[str, np.ndarray]]:
    """Batches that weigh unlike: in samples, and in the weights of their tokens."""
    found = [tokens(size, 90 + i) for i, size in enumerate(SIZES)]
    for i, batch in enumerate(found):
        batch["weights"] = batch["weights"] * np.float32(1 + 3 * i)
    return found


def on_one_device(loss: Any, params: Any) -> dict[str, float]:
    """All samples of all batches at once: no batches, no plan."""
    batches = held_out()
    whole = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    keys = jax.random.split(jax.random.key(0), sum(SIZES))
    total, weight, metrics = jax.jit(loss)(params, whole, keys)
    pairs = {"loss": (total, weight), **metrics}
    return {k: float(jnp.sum(s) / jnp.sum(w)) for k, (s, w) in pairs.items()}


def make_engine(case: Case, monkeypatch: Any, **fields: Any) -> Engine:
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    if "loss" not in fields:
        monkeypatch.setattr(tracing, "trace_model", cases._shared_trace)
    job = dataclasses.replace(cases.experiment(case.shape, case.clipped), **fields)
    made = Engine(job, case.plan, chain(case.shape), cluster(), assign(cluster()))
    made.init()
    return made


def check(seed: int, monkeypatch: Any) -> None:
    case = draw(seed)
    plainly = make_engine(case, monkeypatch)
    evaluating = make_engine(case, monkeypatch)
    for step in range(3):
        found = evaluate(evaluating, held_out())
        assert (found.batches, found.samples) == (3, sum(SIZES))
        want = on_one_device(model(case.shape)[0], evaluating.params())
        assert found.means == {k: pytest.approx(v, rel=2e-6) for k, v in want.items()}
        batch = tokens(BATCH_SIZE, step)
        trained = evaluating.step(batch, step).fetch()
        assert trained == plainly.step(batch, step).fetch()  # bit by bit
    for a, b in zip(
        jax.tree.leaves(plainly.params()),
        jax.tree.leaves(evaluating.params()),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    # Who does not evaluate compiles nothing for it.
    assert plainly._evaluator is None
    assert evaluating._evaluator is not None


def test_an_evaluation_is_one_devices_and_leaves_training_alone(monkeypatch: Any):
    check(SEEDS[0], monkeypatch)


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(20_000, 20_010))
def test_evaluations_of_any_plan(seed: int, monkeypatch: Any):
    check(seed, monkeypatch)


def test_a_loss_that_adds_its_samples_up_evaluates_short_batches(monkeypatch: Any):
    """No number by sample is there to leave padding out of."""
    case = draw(SEEDS[1])
    by_sample, params = model(case.shape)

    def added_up(params: Any, batch: Any, keys: Any) -> Any:
        return jax.tree.map(jnp.sum, by_sample(params, batch, keys))

    engine = make_engine(case, monkeypatch, loss=added_up)
    want = on_one_device(by_sample, params)
    found = evaluate(engine, held_out())
    assert found.means == {k: pytest.approx(v, rel=2e-6) for k, v in want.items()}
    for size, says in [(0, "has 0 samples"), (13, "has 13 samples, and the batch siz")]:
        with pytest.raises(UserError, match=says):
            engine.sums(tokens(size), 0)


def test_samples_that_stand_together_are_not_padded(monkeypatch: Any):
    engine = make_engine(draw(SEEDS[0]), monkeypatch)
    engine.experiment = dataclasses.replace(engine.experiment, per_microbatch=True)
    with pytest.raises(UserError, match="A batch of 5 samples was to be evaluated, an"):
        engine.sums(tokens(5), 0)
