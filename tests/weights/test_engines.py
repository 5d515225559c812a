"""Weights into plans and out of them, and what a step in between changes."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

import hexijax
from hexijax.checkpoint import Saver, Tiers
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.layers.names import flatten
from hexijax.runtime.engine import Engine
from hexijax.runtime.intake import abstract_params, initial_params
from hexijax.runtime.plain import PlainEngine
from hexijax.weights import (
    Arrays,
    Orbax,
    Run,
    Safetensors,
    WeightsError,
    export,
    orbax,
    write_safetensors,
)
from hexijax.weights.source import index, whole
from hexijax.weights.stored.files import open_files
from tests.laws import cases
from tests.laws.law_models import Shape, tokens
from tests.weights.families import CONFIGS, params

ROOT = Path(__file__).parents[2]

SEEDS = {"nnx": 5673, "linen": 268}
"""Plans that the laws run too, of two replicas, one with several stages and lanes."""


@pytest.fixture(
    scope="module", params=["nnx", pytest.param("linen", marks=pytest.mark.laws)]
)
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[cases.Case, Engine]]:
    """A drawn case and its engine, one step old."""
    case = cases.draw(SEEDS[request.param])
    assert case.shape.api == request.param
    with pytest.MonkeyPatch.context() as patch:
        yield case, cases.run(case, patch).engine


def saved(engine: Any, run: Path, step: int = 1) -> Path:
    """The run folder that a saved engine leaves."""
    Saver(engine, Tiers(fast=open_files(run / "checkpoints"), keep=9)).save(step)
    return run


def assert_tree(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x, y)


def test_an_exported_tree_has_the_trainers_loss_without_the_runtime(
    trained: tuple[cases.Case, Engine], tmp_path: Path
):
    case, engine = trained
    run = saved(engine, tmp_path / "run")
    batch = tokens(cases.BATCH_SIZE, 99)
    loss = engine.step(batch, 1).fetch()["loss"]
    np.savez(tmp_path / "batch.npz", **batch)
    out = export(run, "orbax").path
    shape = case.shape
    arguments = [run, out, shape.api, shape.tied, shape.scanned, tmp_path / "batch.npz"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.plain_apply", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loaded, exported = map(float, done.stdout.split())
    assert loaded == exported
    assert loaded == pytest.approx(loss, rel=1e-6)


def test_every_source_comes_in_whole_and_goes_out_whole(
    trained: tuple[cases.Case, Engine], tmp_path: Path
):
    case, engine = trained
    experiment = cases.experiment(case.shape, case.clipped)
    tree = jax.tree.map(lambda x: x + np.float32(1), cases.model(case.shape)[1])
    arrays = Arrays(flatten(tree))
    write_safetensors(tmp_path / "dotted.safetensors", arrays)
    orbax.write(tmp_path / "orbax", arrays, arrays.paths)
    on_device = jax.tree.map(jax.numpy.asarray, tree)
    loss = case.shape.loss()
    for init in (
        tree,
        on_device,
        tmp_path / "dotted.safetensors",
        str(tmp_path / "orbax"),
        Orbax(tmp_path / "orbax"),
    ):
        given = dataclasses.replace(experiment, init=init, loss=loss)
        engine.set_params(initial_params(given, jax.devices()[0]))
        assert_tree(engine.params(), tree)
    engine.set_params(on_device)  # not through a source
    assert_tree(engine.params(), tree)

    held = engine.weights()
    for name, tensor in held.tensors.items():
        for box in (whole(tensor.shape), tuple((n // 2, n) for n in tensor.shape)):
            want = flatten(tree)[name][index(box)]
            np.testing.assert_array_equal(held.read(name, box), want)

    run = saved(engine, tmp_path / "run")
    assert_tree(hexijax.load(run), tree)
    saved_run = Run(run)
    for name, tensor in saved_run.tensors.items():
        box = tuple((n // 3, n) for n in tensor.shape)
        want = flatten(tree)[name][index(box)]
        np.testing.assert_array_equal(saved_run.read(name, box), want)
    # A run begins with another's parameters, whatever plan that had.
    given = dataclasses.replace(experiment, init=run, loss=loss)
    plain = PlainEngine(given, device=jax.devices()[3])
    plain.init()
    assert_tree(plain.params(), tree)
    assert {x.device for x in jax.tree.leaves(plain._params)} == {jax.devices()[3]}
    assert_tree(hexijax.load(saved(plain, tmp_path / "plain")), tree)


def squares(params: Any, batch: Any, keys: Any) -> Any:
    """A loss whose gradient is every parameter itself."""
    del keys
    total = sum(0.5 * (x**2).sum() for x in jax.tree.leaves(params))
    return batch["x"] * total, jax.numpy.ones_like(batch["x"])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), *((family, "bfloat16") for family in CONFIGS)],
)
def test_in_a_step_and_out_the_names_and_dtypes_are_the_same(
    family: str, dtype: str, tmp_path: Path
):
    before, stored = params(family), np.dtype(getattr(ml_dtypes, dtype, dtype))
    given = Arrays({k: v.astype(stored) for k, v in before.items()})
    write_safetensors(tmp_path / "in.safetensors", given, family)
    experiment = Experiment(
        loss=squares,
        init=Arrays(before),  # the model's shapes, float32
        optimizer=optax.sgd(0.5),
        batch_size=2,
    )
    engine = PlainEngine(experiment, device=jax.devices()[0])
    source = Safetensors(tmp_path / "in.safetensors", names=family)
    engine.set_params(source.fitted(Arrays(before).tensors))
    engine.step({"x": np.ones(2, np.float32)}, 0).fetch()
    run = saved(engine, tmp_path / "run")
    written = export(run, "safetensors", names=family)
    assert written.narrowed == (len(before) if dtype == "bfloat16" else 0)
    after = Safetensors(written.path, names=family)
    assert after.tensors == source.tensors
    for name, tensor in source.tensors.items():
        box = whole(tensor.shape)
        trained = np.float32(0.5) * source.read(name, box).astype(np.float32)
        np.testing.assert_array_equal(after.read(name, box), trained.astype(stored))
    full = export(run, "safetensors", out=tmp_path / "f", dtype="float32")
    assert {t.dtype.name for t in full.tensors.values()} == {"float32"}
    assert full.narrowed == 0
    half = export(run, "orbax", out=tmp_path / "h", dtype="float16")
    assert {t.dtype.name for t in Orbax(half.path).tensors.values()} == {"float16"}


def test_weights_that_do_not_fit_are_refused_before_anything_is_read(tmp_path: Path):
    shape = Shape()
    tree = flatten(cases.model(shape)[1])
    wrong = {k: v for k, v in tree.items() if k != "norm/scale"} | {
        "norm/scal": tree["norm/scale"]
    }

    class Unread(Arrays):
        def read(self, name, box):
            raise AssertionError("read")

    given = Experiment(loss=shape.loss(), init=Unread(wrong), name="x")
    for look in (abstract_params, lambda e: initial_params(e, jax.devices()[0])):
        with pytest.raises(WeightsError) as error:
            look(given)
        assert "1 missing, 1 left over, 0 of another shape" in str(error.value)
        assert "  missing    norm/scale float32[16]\n" in str(error.value)
        assert "  left over  norm/scal float32[16]\n" in str(error.value)
    with pytest.raises(UserError, match="'x' has no parameters: its loss is a plain"):
        abstract_params(Experiment(loss=squares, name="x"))


def test_what_cannot_be_exported_says_why(tmp_path: Path):
    (tmp_path / "new").mkdir()
    for run, fields, says in [
        ("none", {}, "There is no run .*none"),
        (
            "new",
            {},
            r"has no checkpoint, so its parameters are gone. .* --no-save",
        ),
        ("new", {"to": "torch"}, "--to torch: parameters can be written as orbax or s"),
        ("new", {"names": "bert"}, "--names bert goes with --to safetensors"),
    ]:
        with pytest.raises(UserError, match=says):
            export(tmp_path / run, **{"to": "orbax", **fields})
    one = {"w": np.ones(3, np.float32)}
    experiment = Experiment(loss=squares, init=one, optimizer=optax.sgd(1))
    engine = PlainEngine(experiment, device=jax.devices()[0])
    engine.init()
    run = saved(engine, saved(engine, tmp_path / "run", 2), 7)
    with pytest.raises(UserError, match="has no step 3; saved are 2, 7. Name one with"):
        export(run, "orbax", step=3)
    assert export(run, "orbax").step == 7
    with pytest.raises(UserError, match="orbax is there already. Name another with"):
        export(run, "orbax")
    assert_tree(hexijax.load(run, step=2), one)
    assert_tree(hexijax.load(run / "checkpoints" / "2"), one)
    manifest = run / "checkpoints" / "7" / "local" / "manifest.json"
    manifest.write_text('{"version": 1, "crc32": 0}\n{}')
    assert_tree(hexijax.load(run), one)  # step 2 is still whole
    with pytest.raises(UserError, match=r"has no step 7; saved are 2\."):
        hexijax.load(run, step=7)
