"""One step of any plan equals one step of the plain single-device program.

Gradients are compared leaf by leaf before the optimizer: a gradient three times too
large passes a test of parameters under Adam.
"""

import dataclasses
import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

from experiments.bench_mixed import remembering
from hexijax.layers.names import flatten
from hexijax.plan.plan import Plan, Replica, Schedule, Stage
from hexijax.program.boxes import whole
from hexijax.runtime.reach import OptimizerError
from tests.laws import cover
from tests.laws.cases import BATCH_SIZE, Case, chain, check, draw, gradient_error, run
from tests.laws.drawing import SCHEDULES
from tests.laws.law_models import Shape, tokens

SEEDS = [4, 1538, 448, 3489, 182, 2992, 6256, 15, 5673, 376, 469, 1087, 268]
"""Printed by ``python -m tests.laws.cover``."""

LONG = (3489, 5673, 2992, 448)
"""Take as long as all others together."""


@pytest.mark.laws
def test_the_cases_cover_every_pair_of_factors(
    record_property: Callable[[str, object], None],
):
    pairs = cover.covered(draw(seed) for seed in SEEDS)
    record_property("pairs of factors", f"{len(pairs)} of {len(cover.all_pairs())}")
    assert pairs == cover.all_pairs()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.laws] if seed in LONG else [])
        for seed in SEEDS
    ],
)
def test_a_plan_gives_the_plain_program_s_numbers(seed: int, monkeypatch: Any):
    check(draw(seed), run(draw(seed), monkeypatch))


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(10_000, 10_320))
def test_any_plan_gives_the_plain_program_s_numbers(seed: int, monkeypatch: Any):
    check(draw(seed), run(draw(seed), monkeypatch))


def by_hand(shape: Shape, *replicas: Replica, **fields: Any) -> Case:
    """A case with a plan written out."""
    plan = Plan(replicas=replicas, batch_size=BATCH_SIZE, **fields)
    assert sum(r.samples for r in replicas) == BATCH_SIZE
    return Case(0, shape, False, plan)


def two_stages(shape: Shape, first: Stage, second: Stage, **fields: Any) -> Case:
    """A pipeline of two stages over all layers."""
    layers = len(chain(shape).layers)
    stages = (
        dataclasses.replace(first, layers=(0, 3), segments=(), remat=()),
        dataclasses.replace(second, layers=(3, layers), segments=(), remat=()),
    )
    return by_hand(shape, Replica(stages=stages, **fields))


@pytest.mark.laws
def test_dropout_does_not_depend_on_four_lanes_before_two(monkeypatch: Any):
    case = two_stages(
        Shape(dropout=0.3),
        Stage(devices=tuple(f"fast/{i}" for i in range(4)), layers=(0, 1), lanes=4),
        Stage(devices=("slow/0", "slow/1"), layers=(0, 1), lanes=2),
        microbatches=3,
        microbatch_size=4,
        samples=BATCH_SIZE,
    )
    check(case, run(case, monkeypatch))


def test_twelve_samples_on_five_lanes_are_padded_and_exact(monkeypatch: Any):
    layers = len(chain(Shape()).layers)
    devices = (*(f"fast/{i}" for i in range(4)), "slow/0")
    stage = Stage(devices=devices, layers=(0, layers), lanes=5)
    replica = Replica(stages=(stage,), microbatches=1, microbatch_size=15, samples=12)
    case = by_hand(Shape(), replica)
    check(case, run(case, monkeypatch))


@pytest.mark.laws
def test_a_bfloat16_plan_is_within_five_percent(monkeypatch: Any):
    shape = Shape(tied=False, dtype="bfloat16")
    case = two_stages(
        shape,
        Stage(devices=("fast/0", "fast/1"), layers=(0, 1), tensor=2),
        Stage(devices=("slow/0",), layers=(0, 1)),
        microbatches=3,
        microbatch_size=4,
        samples=BATCH_SIZE,
    )
    outcome = run(case, monkeypatch)
    norms = {k: np.linalg.norm(g) for k, g in outcome.want_grads.items()}
    total = np.sqrt(sum(n**2 for n in norms.values()))
    for name, want in outcome.want_grads.items():
        error = np.linalg.norm(outcome.grads[name] - want)
        assert error <= 5e-2 * norms[name] + 1e-3 * total, name
    assert outcome.result["loss"] == pytest.approx(
        outcome.want_result["loss"], rel=5e-2
    )
    stored = outcome.engine.state().values()
    assert {x.dtype.name for s in stored for x in s["master"]} == {"float32"}


def test_two_runs_of_one_plan_agree_bitwise(monkeypatch: Any):
    case = draw(SEEDS[0])
    first, second = run(case, monkeypatch), run(case, monkeypatch)
    for name, value in first.params.items():
        np.testing.assert_array_equal(value, second.params[name], err_msg=name)


def test_donated_buffers_give_the_numbers_of_kept_ones(monkeypatch: Any):
    case = draw(SEEDS[1])
    donated = run(case, monkeypatch)
    jit = jax.jit

    @functools.wraps(jit)
    def keeping(f: Any, **options: Any) -> Any:
        options.pop("donate_argnums", None)
        return jit(f, **options)

    monkeypatch.setattr(jax, "jit", keeping)
    kept = run(case, monkeypatch)
    for name, value in kept.params.items():
        np.testing.assert_array_equal(value, donated.params[name], err_msg=name)


def test_a_gradient_error_is_seen():
    outcome = type("O", (), {})()
    outcome.want_grads = {"a": np.ones(4), "b": np.ones(4)}
    outcome.grads = {"a": np.ones(4), "b": np.ones(4) * (1 + 1e-4)}
    error, leaf = gradient_error(outcome)
    assert error > 5
    assert leaf == "b"


def test_random_plans_are_not_all_alike():
    rng = random.Random(0)
    cases = [draw(rng.randrange(10**6)) for _ in range(100)]
    assert {c.plan.schedule for c in cases} == set(SCHEDULES)
    assert any(len(c.plan.replicas) == 3 for c in cases)
    assert any(len(c.plan.state) > 1 for c in cases)


def test_an_engine_leaves_nothing_behind(monkeypatch: Any):
    case = draw(SEEDS[0])
    outcome = run(case, monkeypatch)
    gone = weakref.ref(outcome.engine)
    del outcome
    gc.collect()
    assert gone() is None


INSIDE = {
    "lamb": optax.lamb(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "muon and adam by hand": optax.multi_transform(
        {True: optax.contrib.scale_by_muon(), False: optax.adam(1e-2)},
        lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    ),
}
EXHAUSTIVE = ("lamb", "adafactor", "muon", "muon and adam by hand")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.laws] if name in EXHAUSTIVE else [])
        for name in INSIDE
    ],
)
def test_an_optimizer_that_looks_inside_leaves_keeps_each_whole(
    name: str, monkeypatch: Any
):
    case = two_stages(
        Shape(),
        Stage(devices=("fast/0", "fast/1"), layers=(0, 1), tensor=2),
        Stage(devices=("slow/0", "slow/1"), layers=(0, 1), lanes=2),
        microbatches=3,
        microbatch_size=4,
        samples=BATCH_SIZE,
    )
    inner = INSIDE[name]
    outcome = run(case, monkeypatch, optimizer=remembering(inner))
    check(case, outcome, inner)
    for group in outcome.engine.groups.values():
        for home in group.homes:
            for leaf, box in group.held[home]:
                assert box == whole(leaf), (home, leaf)


SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)
ELEMENTWISE = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "injected schedule": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "decay of matrices": optax.adamw(
        SCHEDULE, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
    "by label": optax.multi_transform(
        {True: optax.lion(1e-3), False: optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name == "injected schedule" else [pytest.mark.laws]
        )
        for name in ELEMENTWISE
    ],
)
def test_any_element_by_element_is_cut_and_updates_as_it_does(
    name: str, monkeypatch: Any
):
    case, inner = draw(SEEDS[1]), ELEMENTWISE[name]
    outcome = run(case, monkeypatch, optimizer=remembering(inner))
    check(case, outcome, inner)
    if name == "injected schedule":  # every home counts on, and holds what it used
        rates = [
            float(array)
            for each, copies in outcome.engine.slices().items()
            if "hyperparams/learning_rate" in each.kind
            for array in copies
        ]
        assert rates
        assert rates == pytest.approx([float(SCHEDULE(1))] * len(rates))


def test_it_is_refused_for_layers_stacked_in_one_leaf(monkeypatch: Any):
    case = next(c for c in map(draw, SEEDS) if c.shape.scanned)
    with pytest.raises(OptimizerError, match="is one layer's row of a leaf stacked"):
        run(case, monkeypatch, optimizer=optax.lamb(1e-2))


@pytest.mark.parametrize(
    ("seed", "scale"),
    [
        (4, 1024.0),
        (4, "dynamic"),
        pytest.param(56, "dynamic", marks=pytest.mark.laws),
    ],
)
def test_a_loss_scale_changes_no_number(
    seed: int, scale: float | str, monkeypatch: Any
):
    check(draw(seed), run(draw(seed), monkeypatch, loss_scale=scale))


@pytest.mark.laws
@pytest.mark.parametrize("schedule", Schedule)
def test_a_dynamic_scale_changes_no_number_under_any_schedule(
    schedule: Schedule, monkeypatch: Any
):
    case = draw(10_000, schedule)
    check(case, run(case, monkeypatch, loss_scale="dynamic"))


def test_a_step_that_is_not_finite_is_skipped_everywhere(monkeypatch: Any):
    case = draw(SEEDS[0])
    engine = run(case, monkeypatch, skip_nonfinite=True).engine
    broken = engine.params()
    name, leaf = next(iter(flatten(broken).items()))
    leaf[...] = np.inf
    engine.set_params(broken)
    before = flatten(engine.params())
    result = engine.step(tokens(BATCH_SIZE), 1).fetch()
    assert result["finite"] == 0, name
    for key, value in flatten(engine.params()).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)
