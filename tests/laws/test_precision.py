"""Stages of unlike dtypes, and the loss scale that all of them share.

A new card computes in bfloat16, an old one in float16, one that is older still in
float32: a plan over the three gives one device's numbers.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.bench_mixed import remembering
from hexijax.checkpoint import Saver, Tiers, inventory, restore
from hexijax.cluster import Cluster
from hexijax.data import TextBytes
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.job.intake import trace_chain, training_facts
from hexijax.job.machine import make_machine
from hexijax.layers.chain import Chain
from hexijax.layers.loss import nnx_loss
from hexijax.layers.names import flatten
from hexijax.plan import checks
from hexijax.plan.plan import Memory, Params, Plan, Replica, Stage, StateShare
from hexijax.plan.precision import (
    DYNAMIC,
    FIRST_SCALE,
    GOOD_STEPS,
    LEAST_SCALE,
    MOST_SCALE,
)
from hexijax.planner.mesh import compute_dtype
from hexijax.report.problem import Problem
from hexijax.runtime import scaling
from hexijax.runtime.engine import Engine
from hexijax.runtime.plain import PlainEngine
from hexijax.weights.stored.files import open_files
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss
from tests.laws.law_models import LENGTH, VOCAB, WIDTH, score, tokens

BATCH_SIZE = 6
CLUSTER = """
format = 1
name = "generations"

[[nodes]]
name = "box"
devices = [
  { kind = "rtx3090-24g", count = 1 },
  { kind = "v100-16g-sxm", count = 1 },
  { kind = "p40-24g", count = 2 },
]
host_memory_gib = 64
host_cores = 16
link = { latency_us = 15, bandwidth_gb_per_s = 12 }
"""
NEW, OLD, OLDEST, OTHER = "box/0", "box/1", "box/2", "box/3"


def llama(vocab_size: int, width: int) -> Callable[..., Llama]:
    """A builder that a stage can ask for its dtype."""

    def build(
        rngs: nnx.Rngs, dtype: str = "float32", attention: str | None = None
    ) -> Llama:
        config = LlamaConfig(
            vocab_size=vocab_size,
            width=width,
            depth=2,
            num_heads=2,
            num_kv_heads=2,
            ff_width=2 * width,
            dtype=dtype,
            attention=attention,
        )
        return Llama(config, rngs=rngs)

    return build


LOSS = nnx_loss(llama(VOCAB, WIDTH), score)


class Tokens:
    """Batches that differ from step to step."""

    def batches(self, batch_size: int) -> Any:
        return (tokens(batch_size, step) for step in range(10_000))

    def fingerprint(self) -> str:
        return "tokens"


@functools.cache
def cluster() -> Cluster:
    return Cluster.from_toml(CLUSTER)


@functools.cache
def experiment(**fields: Any) -> Experiment:
    values = {
        "loss": LOSS,
        "optimizer": remembering(optax.sgd(0.1, momentum=0.9)),
        "data": Tokens(),
        "batch_size": BATCH_SIZE,
        "tokens_per_sample": LENGTH,
        "dtype": "bfloat16",
    }
    return Experiment(**values | fields)


@functools.cache
def chain() -> Chain:
    return trace_chain(experiment())


def stages(*parts: tuple[str, int]) -> tuple[Stage, ...]:
    """A pipeline of (device, layers), each in the best dtype its kind has."""
    made, start = [], 0
    for name, layers in parts:
        dtype = compute_dtype("bfloat16", cluster().device(name))
        stop = start + layers
        made.append(Stage(devices=(name,), layers=(start, stop), dtype=dtype))
        start = stop
    return tuple(made)


def plan_of(
    *replicas: tuple[tuple[Stage, ...], int, int], model: Chain | None = None
) -> Plan:
    """Of (stages, microbatches, samples)."""
    made = tuple(
        Replica(
            stages=stages,
            microbatches=count,
            microbatch_size=samples // count,
            samples=samples,
        )
        for stages, count, samples in replicas
    )
    plan = Plan(replicas=made, batch_size=sum(r.samples for r in made))
    checks.check(plan, model or chain(), cluster())
    return plan


def three() -> Plan:
    """A pipeline over three generations, beside one old card alone."""
    pipeline = stages((NEW, 1), (OLD, 1), (OLDEST, 2))
    return plan_of((pipeline, 2, 4), (stages((OTHER, 4)), 1, 2))


def test_packed_parameters_come_from_state_in_host_memory(monkeypatch: Any):
    """To two cards of one dtype, one of which gathers them before each pass."""
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 1)
    pair = Cluster.from_toml(CLUSTER.replace('24g", count = 1', '24g", count = 2'))
    count, job = len(chain().layers), experiment()
    parts = [
        dataclasses.replace(
            stages((NEW, count))[0],
            devices=(name,),
            segments=(1,) * count,
            params=(params,) * count,
        )
        for name, params in ((NEW, Params.FREED), (OLD, Params.KEPT))
    ]
    replicas = tuple(
        Replica(stages=(part,), microbatches=1, microbatch_size=3, samples=3)
        for part in parts
    )
    found: dict[Memory, list[float]] = {}
    for memory in Memory:
        state = StateShare(groups=("*",), shares={}, memory=memory)
        plan = Plan(replicas=replicas, batch_size=BATCH_SIZE, state=(state,))
        run = make_machine(job, pair, chain(), plan, emulate=True).engine
        assert isinstance(run, Engine)
        run.init()
        assert any(
            group._packs(home) for group in run.groups.values() for home in group.homes
        )
        found[memory] = []
        for step in range(3):
            found[memory].append(
                run.step(tokens(BATCH_SIZE, step), step).fetch()["loss"]
            )
            run.load({k: [x.copy() for x in v] for k, v in run.slices().items()})
    assert found[Memory.HOST] == pytest.approx(found[Memory.DEVICE], rel=1e-6)


def engine(plan: Plan | None, job: Experiment) -> Engine | PlainEngine:
    made = make_machine(job, cluster(), chain(), plan, emulate=True).engine
    made.init()
    return made


def single(job: Experiment, dtype: str) -> PlainEngine:
    made = PlainEngine(job, device=jax.devices()[0], dtype=dtype)
    made.init()
    return made


def test_each_kind_computes_in_what_it_has():
    dtypes = {
        name: stage.dtype for _, stage in three().stages() for name in stage.devices
    }
    assert dtypes == {
        NEW: "bfloat16",
        OLD: "float16",
        OLDEST: "float32",
        OTHER: "float32",
    }


def grads_of(made: Engine | PlainEngine) -> Mapping[str, np.ndarray]:
    if isinstance(made, Engine):
        return made.moments_like("grads")
    return {k: np.asarray(v) for k, v in flatten(made.moments()["grads"]).items()}


def taken(made: Engine | PlainEngine, batch: Any) -> list[dict[str, float]]:
    """Numbers of the steps on a batch, up to the first that is not skipped."""
    results = [made.step(batch, 0).fetch()]
    while results[-1].get("skipped") and len(results) < 24:
        results.append(made.step(batch, 0).fetch())
    return results


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.laws), "float16"]
)
def test_a_plan_of_three_dtypes_is_within_five_percent(dtype: str):
    mixed, plain = engine(three(), experiment()), single(experiment(), dtype)
    assert isinstance(mixed, Engine)
    assert mixed.loss_scale == DYNAMIC
    batch = tokens(BATCH_SIZE)
    result, want = taken(mixed, batch)[-1], taken(plain, batch)[-1]
    for name in ("loss", "grad_norm"):
        assert result[name] == pytest.approx(want[name], rel=5e-2), name
    got, due = grads_of(mixed), grads_of(plain)
    total = np.sqrt(sum(np.square(g).sum() for g in due.values()))
    for name, gradient in due.items():
        error = np.linalg.norm(got[name] - gradient)
        assert error <= 5e-2 * np.linalg.norm(gradient) + 1e-3 * total, name
    masters = [x for s in mixed.state().values() for x in s["master"]]
    assert {x.dtype.name for x in masters} == {"float32"}


def test_a_dynamic_scale_changes_no_digit_in_float32():
    plan = plan_of((stages((OLDEST, 2), (OTHER, 2)), 3, 6))
    batch, made = tokens(BATCH_SIZE), {}
    for scale in (1.0, DYNAMIC):
        made[scale] = engine(plan, experiment(loss_scale=scale))
        made[scale].step(batch, 0)
    got, want = (flatten(made[s].params()) for s in (DYNAMIC, 1.0))
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def loud_head(made: Engine | PlainEngine) -> None:
    """A head so large that its cotangents, scaled, are beyond float16, not float32."""
    params = made.params()
    params["head"]["kernel"] = params["head"]["kernel"] * np.float32(20.0)
    made.set_params(params)


def test_an_overflow_on_one_stage_skips_the_step_everywhere_once(tmp_path: Path):
    mixed, old = engine(three(), experiment()), single(experiment(), "float16")
    for made in (mixed, old):
        loud_head(made)
    before = {k: np.asarray(v[0]) for k, v in mixed.slices().items()}
    batch = tokens(BATCH_SIZE)
    first = mixed.step(batch, 0).fetch()
    assert (first["skipped"], first["scale"]) == (1, FIRST_SCALE)
    assert np.isfinite(first["loss"])
    for key, (value, *_) in mixed.slices().items():
        if key == scaling.SLICE:
            np.testing.assert_array_equal(value, [FIRST_SCALE / 2, 0])
        else:
            np.testing.assert_array_equal(value, before[key], err_msg=key)
    results = [first, *taken(mixed, batch)]
    scales = [r["scale"] for r in results]
    assert scales == [FIRST_SCALE / 2**i for i in range(len(results))]
    assert results[-1]["skipped"] == 0
    # The old card alone overflows too; once it does not, the step is the same.
    want = taken(old, batch)
    assert len(want) > 1
    for name in ("loss", "grad_norm"):
        assert results[-1][name] == pytest.approx(want[-1][name], rel=5e-2), name

    tiers = Tiers(fast=open_files(tmp_path))
    Saver(mixed, tiers).save(9)
    again = engine(three(), experiment())
    restore(again, inventory(tiers), where="here", facts={})
    np.testing.assert_array_equal(again.slices()[scaling.SLICE][0], [scales[-1], 1])
    for step in (1, 2):
        batch = tokens(BATCH_SIZE, step)
        assert again.step(batch, step).fetch() == mixed.step(batch, step).fetch()


@pytest.mark.laws
def test_two_hundred_steps_of_three_dtypes_end_at_float32s_loss(
    record_property: Callable[[str, object], None],
):
    def by_sample(model: Any, batch: Any) -> Any:
        return next_token_loss(model(batch["inputs"]), batch["targets"])

    job = experiment(
        loss=nnx_loss(llama(256, 64), by_sample),
        optimizer=optax.adamw(3e-3),
        data=TextBytes(length=64),
        batch_size=12,
        clip_norm=1.0,
        steps=200,
    )
    model = trace_chain(job)
    pipeline = stages((NEW, 1), (OLD, 1), (OLDEST, 2))
    plan = plan_of((pipeline, 2, 8), (stages((OTHER, 4)), 1, 4), model=model)
    mixed = make_machine(job, cluster(), model, plan, emulate=True).engine
    mixed.init()
    losses: dict[str, list[dict[str, float]]] = {}
    for name, made in {"mixed": mixed, "single": single(job, "float32")}.items():
        batches = job.data.batches(job.batch_size)
        losses[name] = [made.step(next(batches), i).fetch() for i in range(job.steps)]
    ends = {
        name: float(np.mean([numbers["loss"] for numbers in line[-20:]]))
        for name, line in losses.items()
    }
    skipped = sum(numbers["skipped"] for numbers in losses["mixed"])
    first = losses["single"][0]["loss"]
    record_property("loss", f"{first:.3f} -> {ends}")
    record_property("skipped, last scale", (skipped, losses["mixed"][-1]["scale"]))
    assert ends["single"] < 0.6 * first
    assert ends["mixed"] == pytest.approx(ends["single"], rel=0.01)


def test_a_scale_halves_at_once_and_doubles_after_many_good_steps():
    state, update = scaling.first_state(), jax.jit(scaling.next_state)
    for _ in range(GOOD_STEPS - 1):
        state = update(state, True)
    np.testing.assert_array_equal(state, [FIRST_SCALE, GOOD_STEPS - 1])
    np.testing.assert_array_equal(update(state, True), [2 * FIRST_SCALE, 0])
    np.testing.assert_array_equal(update(state, False), [FIRST_SCALE / 2, 0])
    most = np.asarray([MOST_SCALE, GOOD_STEPS - 1], np.float32)
    np.testing.assert_array_equal(update(most, True), [MOST_SCALE, 0])
    least = np.asarray([LEAST_SCALE, 3], np.float32)
    np.testing.assert_array_equal(update(least, False), [LEAST_SCALE, 0])


def test_a_scale_is_dynamic_where_a_stage_computes_in_float16():
    agreed = {"loss", "norm"}
    wide = plan_of((stages((NEW, 2), (OLDEST, 2)), 1, 6))
    for asked, plan, names in [
        (None, three(), {*agreed, "scale"}),
        (None, wide, agreed),
        (DYNAMIC, wide, {*agreed, "scale"}),
        (1024.0, three(), agreed),
    ]:
        job = experiment(loss_scale=asked)
        facts = Problem(
            name="p",
            chain=chain(),
            cluster=cluster(),
            batch_size=BATCH_SIZE,
            training=training_facts(job),
        )
        assert facts.rules(plan).dynamic_scale == ("scale" in names), (asked, names)
    misspelt: Any = "dynamc"
    with pytest.raises(
        UserError,
        match=r"Experiment\.loss_scale is 'dynamc'; it must be positive and finite, or "
        "'dynamic'",
    ):
        Experiment(loss=None, loss_scale=misspelt)
