"""Safetensors files and Orbax folders: ours read by others, others' read by us."""

import json
import math
import weakref
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hexijax.experiment import Experiment
from hexijax.layers.names import flatten
from hexijax.runtime.plain import PlainEngine
from hexijax.weights import (
    Arrays,
    Named,
    Orbax,
    Safetensors,
    WeightsError,
    open_weights,
    orbax,
    safetensors,
)
from hexijax.weights.source import Box, Tensor, index, whole

TREE = {
    "blocks": {"0": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4)}},
    "half": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "list": [np.ones(3, np.float16), np.int32(7)],
    "zeros": np.zeros((4, 2), np.float32),
}
NAMES = {
    "blocks/0/kernel": TREE["blocks"]["0"]["kernel"],
    "half": TREE["half"],
    "list/0": TREE["list"][0],
    "list/1": np.asarray(TREE["list"][1]),
    "zeros": TREE["zeros"],
}
WANTED = {k: Tensor(v.shape, v.dtype) for k, v in NAMES.items()}


def read(source, name):
    return np.array(source.read(name, whole(source.tensors[name].shape)))


def assert_holds(source, arrays):
    assert source.tensors == {k: Tensor(v.shape, v.dtype) for k, v in arrays.items()}
    for name, array in arrays.items():
        np.testing.assert_array_equal(read(source, name), array)
        for box in source.windows(name):
            np.testing.assert_array_equal(source.read(name, box), array[index(box)])


def test_a_file_is_what_the_safetensors_package_reads_and_writes(tmp_path: Path):
    package = pytest.importorskip("safetensors", reason="needs the safetensors package")
    del package
    from safetensors.flax import load_file, save_file

    file = tmp_path / "a.safetensors"
    safetensors.write(file, Arrays(NAMES), metadata={"format": "flax"})
    for name, array in load_file(file).items():
        assert array.dtype == NAMES[name].dtype
        np.testing.assert_array_equal(array, NAMES[name])
    save_file({k: jax.numpy.asarray(v) for k, v in NAMES.items()}, file)
    assert_holds(Safetensors(file), NAMES)


def test_a_folder_of_shards_is_one_model(tmp_path: Path):
    parts = [dict(list(NAMES.items())[:2]), dict(list(NAMES.items())[2:])]
    for i, part in enumerate(parts):
        safetensors.write(tmp_path / f"{i}.safetensors", Arrays(part), metadata={})
    assert_holds(Safetensors(tmp_path), NAMES)
    where = {name: f"{i}.safetensors" for i, part in enumerate(parts) for name in part}
    only = {k: v for k, v in where.items() if v == "0.safetensors"}
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": only}))
    assert_holds(Safetensors(tmp_path), parts[0])
    (tmp_path / "1.safetensors").unlink()
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(WeightsError, match="names files that are not there: .*/1.safe"):
        assert Safetensors(tmp_path).tensors
    (tmp_path / safetensors.INDEX).unlink()
    safetensors.write(tmp_path / "2.safetensors", Arrays(parts[0]), metadata={})
    with pytest.raises(WeightsError, match="blocks/0/kernel is in two files, "):
        assert Safetensors(tmp_path).tensors


def test_a_broken_file_is_told_before_it_is_read(tmp_path: Path):
    file = tmp_path / "a.safetensors"
    safetensors.write(file, Arrays(NAMES), metadata={})
    good = file.read_bytes()
    for data, says in [
        (b"", "cannot be read"),
        (good[:50], "its header is to be"),
        (good[:-4], "is said to lie at"),
        (good[:8] + b"x" + good[9:], "its header cannot be read"),
        (good.replace(b'"F16"', b'"F99"'), "list/0 has dtype 'F99'"),
    ]:
        file.write_bytes(data)
        with pytest.raises(WeightsError, match=says):
            assert Safetensors(file).tensors
    with pytest.raises(WeightsError, match="none is not there"):
        assert Safetensors(tmp_path / "none").tensors
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="has no \\*.safetensors in it"):
        assert Safetensors(tmp_path / "empty").tensors


def test_orbax_restores_what_we_wrote_and_we_read_what_orbax_saved(tmp_path: Path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(theirs, TREE)
    source = Orbax(theirs)
    assert_holds(source, NAMES)
    orbax.write(ours, source, source.paths)
    assert_holds(Orbax(ours), NAMES)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(ours)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), TREE
        )
        as_asked = checkpointer.restore(ours, target)
    for tree in (restored, as_asked):
        assert jax.tree.structure(tree) == jax.tree.structure(TREE)
        jax.tree.map(np.testing.assert_array_equal, tree, TREE)
    assert restored["half"].dtype == ml_dtypes.bfloat16


def test_orbax_arrays_that_were_sharded_are_read_in_any_box(tmp_path: Path):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    split = NamedSharding(mesh, PartitionSpec("a", "b"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(
            tmp_path / "x", {"params": {"w": jax.device_put(array, split)}}
        )
    source = Orbax(tmp_path / "x", under="params")
    assert_holds(source, {"w": array})
    np.testing.assert_array_equal(source.read("w", ((1, 7), (3, 5))), array[1:7, 3:5])


def test_rows_larger_than_a_chunk_are_written_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 40)
    array = np.arange(34, dtype=np.float32).reshape(17, 2)

    class Windows(Arrays):
        def windows(self, name):
            return [((a, b), (0, 2)) for a, b in ((0, 3), (3, 13), (13, 17))]

    source = Windows({"w": array})
    orbax.write(tmp_path / "x", source, source.paths)
    assert_holds(Orbax(tmp_path / "x"), {"w": array})


def test_paths_are_told_apart_by_what_lies_there(tmp_path: Path):
    safetensors.write(tmp_path / "a.safetensors", Arrays(NAMES), metadata={})
    orbax.write(tmp_path / "x" / "default", Arrays(NAMES), Arrays(NAMES).paths)
    assert isinstance(open_weights(tmp_path / "a.safetensors"), Safetensors)
    assert isinstance(open_weights(str(tmp_path)), Safetensors)
    assert_holds(open_weights(tmp_path / "x"), NAMES)
    orbax.write(tmp_path / "x" / "other", Arrays(NAMES), Arrays(NAMES).paths)
    with pytest.raises(WeightsError, match=r"holds 2 Orbax folders. Name one .*other"):
        assert open_weights(tmp_path / "x").tensors
    with pytest.raises(WeightsError, match="Weights were asked of .*none, which is no"):
        open_weights(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="Weights were asked of .*, which holds no"):
        open_weights(tmp_path / "empty")


def test_names_are_paths_however_they_are_joined(tmp_path: Path):
    wanted = WANTED
    dotted = {k.replace("/", "."): v for k, v in NAMES.items()}
    for arrays in (NAMES, dotted, {f"{k}/value": v for k, v in NAMES.items()}):
        fitted = Arrays(arrays).fitted(wanted)
        assert_holds(fitted, NAMES)
    file = tmp_path / "a.safetensors"
    below = {f"params.{k}": v for k, v in dotted.items()}
    safetensors.write(file, Arrays(below), metadata={})
    assert_holds(Safetensors(file, under="params").fitted(wanted), NAMES)
    with pytest.raises(WeightsError, match="All of them are there below 'params': say"):
        Safetensors(file).fitted(wanted)
    with pytest.raises(WeightsError, match="differs    list/1 is float32"):
        Arrays(NAMES | {"list/1": np.float32(3)}).fitted(wanted)
    wider = Arrays(NAMES | {"half": NAMES["half"].astype(np.float64)})
    assert wider.fitted(wanted).tensors["half"].dtype == np.float64


def test_a_file_that_does_not_fit_is_told_whole(tmp_path: Path):
    file = tmp_path / "a.safetensors"
    wrong = {
        "blocks.0.kernel": np.zeros((4, 3), np.float32),
        "half": TREE["half"],
        "list.0": TREE["list"][0],
        "list.1": np.asarray(7.0, np.float32),
        "more.0": np.zeros(2, np.float32),
        "more.1": np.zeros(2, np.float32),
    }
    safetensors.write(file, Arrays(wrong), metadata={})
    with pytest.raises(WeightsError) as error:
        Safetensors(file).fitted(WANTED)
    assert str(error.value) == (
        f"The weights of {file} do not fit the model, which has 5 of them: 1 missing, "
        "2 left over, 2 of another shape or kind. Nothing was read.\n"
        "  missing    zeros float32[4,2]\n"
        "  left over  more.0 float32[2]\n"
        "  left over  more.1 float32[2]\n"
        "  differs    blocks/0/kernel is float32[4,3], the model's is float32[3,4]\n"
        "  differs    list/1 is float32[], the model's is int32[]\n"
        "Build the model in the size that these weights have."
    )


def test_an_orbax_folder_of_another_layout_and_dtype_comes_in(tmp_path: Path):
    """Theirs: stacked by layer, turned, bfloat16; ours: a list of float32 layers."""
    half = ml_dtypes.bfloat16
    stack = np.arange(24).reshape(2, 4, 3).astype(half)
    theirs = {"params": {"layer_0": {"w": stack[0]}, "layer_1": {"w": stack[1]}}}
    theirs["params"]["out"] = {"bias": np.ones(3, np.float16)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", theirs)
    ours = {
        "blocks": [{"kernel": np.zeros((3, 4), np.float32)} for _ in range(2)],
        "bias": np.zeros(3, np.float32),
    }
    names = {
        "blocks/*/kernel": Named(name="layer_*/w", axes="o i -> i o"),
        "bias": "out/bias",
    }
    experiment = Experiment(
        loss=lambda params, batch, keys: (batch["x"], batch["x"]),
        init=ours,
        optimizer=optax.sgd(0.1),
    )
    engine = PlainEngine(experiment, device=jax.devices()[1])
    wanted = Arrays(flatten(ours)).tensors
    source = Orbax(tmp_path / "x", under="params", names=names)
    engine.set_params(source.fitted(wanted))
    got = engine.params()
    assert jax.tree.structure(got) == jax.tree.structure(ours)
    for layer, want in zip(got["blocks"], stack, strict=True):
        np.testing.assert_array_equal(layer["kernel"], want.T.astype(np.float32))
    np.testing.assert_array_equal(got["bias"], np.ones(3, np.float32))
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"float32"}
    with pytest.raises(WeightsError) as error:
        Orbax(tmp_path / "x", names=names).fitted(wanted)
    for line in (
        "missing    layer_0/w (for blocks/0/kernel) float32[4,3]",
        "left over  params/out/bias float16[3]",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize("to", [safetensors, orbax])
def test_a_window_is_gone_when_the_next_is_read(to: Any, tmp_path: Path):
    """Else a host holds two: a view or a loop's variable would keep it."""

    class Windows(Arrays):
        last: Any = None

        def windows(self, name: str) -> list[Box]:
            rows = self.tensors[name].shape[0]
            return [((i, i + 1), (0, 8)) for i in range(rows)]

        def read(self, name: str, box: Box) -> np.ndarray:
            assert self.last is None or self.last() is None
            window = super().read(name, box).copy()
            self.last = weakref.ref(window)
            return window

    rows = np.arange(24, dtype=np.float32).reshape(3, 8)
    arrays = {"a": rows, "b": rows + 1}
    source = Windows(arrays)
    if to is orbax:
        orbax.write(tmp_path / "x", source, source.paths)
        assert_holds(Orbax(tmp_path / "x"), arrays)
    else:
        safetensors.write(tmp_path / "x.safetensors", source, metadata={})
        assert_holds(Safetensors(tmp_path / "x.safetensors"), arrays)


@given(data=st.data())
def test_a_box_is_read_a_few_chunks_at_a_time(data: st.DataObject):
    dims = data.draw(st.integers(0, 3))
    chunk = tuple(data.draw(st.integers(1, 9)) for _ in range(dims))
    box = tuple(
        (start := data.draw(st.integers(0, 20)), start + data.draw(st.integers(1, 30)))
        for _ in range(dims)
    )
    limit = data.draw(st.integers(1, 4000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax, "READ_BYTES", limit)
        parts = list(orbax.few_chunks(box, chunk, 4))
    seen = np.zeros([stop for _, stop in box], int)
    for part in parts:
        seen[index(part)] += 1
        met = [-(-b // n) - a // n for (a, b), n in zip(part, chunk, strict=True)]
        assert math.prod(met) == 1 or math.prod(met) * math.prod(chunk) * 4 <= limit
    assert (seen[index(box)] == 1).all()
    assert seen.sum() == seen[index(box)].size
