"""Hugging Face's names, there and back: every number, every name, every dtype."""

import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hexijax.weights import (
    Arrays,
    Named,
    NameMap,
    Safetensors,
    WeightsError,
    vit,
    write_safetensors,
)
from hexijax.weights.maps import FAMILIES
from hexijax.weights.source import index, whole
from tests.weights.families import CONFIGS, params, shapes


def read(source, name):
    return np.array(source.read(name, whole(source.tensors[name].shape)))


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_is_the_same_after_going_in_and_out(
    tmp_path: Path, family: str, stacked: bool, dtype: str
):
    ours = Arrays(params(family, stacked=stacked, dtype=dtype))
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_safetensors(first, ours, family)
    back = Safetensors(first, names=family).fitted(ours.tensors)
    assert back.tensors == ours.tensors
    for name in ours.tensors:
        np.testing.assert_array_equal(read(back, name), read(ours, name))
    write_safetensors(second, back, family)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_any_box_is_the_same_box_of_the_whole(family: str, stacked: bool):
    ours = Arrays(params(family, stacked=stacked))
    theirs = FAMILIES[family].written(ours)
    both_ways = FAMILIES[family].read(theirs, ours.tensors)
    rng = random.Random(1)
    for source in (theirs, both_ways):
        for name, tensor in source.tensors.items():
            every = read(source, name)
            for _ in range(4):
                box = []
                for rows in tensor.shape:
                    start = rng.randrange(rows)
                    box.append((start, rng.randrange(start, rows) + 1))
                np.testing.assert_array_equal(
                    source.read(name, tuple(box)), every[index(tuple(box))]
                )
            joined = [source.read(name, box) for box in source.windows(name)]
            np.testing.assert_array_equal(np.concatenate(joined), every)


def test_unrolled_and_stacked_models_give_one_file(tmp_path: Path):
    stacked = params("llama", stacked=True)
    unrolled = {
        name.replace("blocks/", f"blocks/{i}/"): array[i]
        for name, array in stacked.items()
        if name.startswith("blocks/")
        for i in range(3)
    } | {k: v for k, v in stacked.items() if not k.startswith("blocks/")}
    assert unrolled.keys() == shapes("llama").keys()
    linen = {k.replace("blocks/", "blocks_", 1): v for k, v in unrolled.items()}
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for file, tree in zip(files, (stacked, unrolled, linen), strict=True):
        write_safetensors(file, Arrays(tree), "llama")
    assert len({file.read_bytes() for file in files}) == 1
    theirs = Safetensors(files[0]).tensors
    assert theirs["model.layers.2.mlp.down_proj.weight"].shape == (16, 24)
    assert theirs["lm_head.weight"].shape == (11, 16)


def test_qkv_is_fused_patches_are_a_convolution_and_torchs_linears_are_turned():
    gpt, image = params("gpt2"), params("vit")
    fused = FAMILIES["gpt2"].written(Arrays(gpt))
    got = read(fused, "transformer.h.1.attn.c_attn.weight")
    parts = [gpt[f"blocks/1/attention/{x}/kernel"] for x in ("query", "key", "value")]
    np.testing.assert_array_equal(got, np.concatenate(parts, axis=1))
    conv = read(
        FAMILIES["vit"].written(Arrays(image)),
        "vit.embeddings.patch_embeddings.projection.weight",
    )
    assert conv.shape == (16, 3, 4, 4)
    assert conv[7, 2, 1, 3] == image["patch/kernel"][(1 * 4 + 3) * 3 + 2, 7]
    gray = {**image, "patch/kernel": np.zeros((16, 16), np.float32)}
    one = vit(channels=1).written(Arrays(gray)).tensors
    assert one["vit.embeddings.patch_embeddings.projection.weight"].shape == (
        *(16, 1, 4, 4),
    )


def their_file(path: Path, family: str, change) -> Path:
    """A file with Hugging Face's names, changed."""
    source = FAMILIES[family].written(Arrays(params(family)))
    tensors = {name: read(source, name) for name in source.tensors}
    write_safetensors(path, Arrays(change(tensors)))
    return path


def test_files_may_spell_names_as_older_and_bare_models_did(tmp_path: Path):
    def bare(tensors):
        out = {k.removeprefix("transformer."): v for k, v in tensors.items()}
        return out | {
            "h.0.attn.bias": np.ones((1, 1, 6, 6), np.uint8),
            "h.0.attn.masked_bias": np.float32(-1e4),
            "lm_head.weight": out["wte.weight"],
        }

    def old(tensors):
        renamed = {
            k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): v
            for k, v in tensors.items()
        }
        return renamed | {
            "bert.pooler.dense.weight": np.zeros((16, 16), np.float32),
            "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
        }

    for family, change in (("gpt2", bare), ("bert", old)):
        file = their_file(tmp_path / f"{family}.safetensors", family, change)
        ours = Arrays(params(family))
        source = Safetensors(file, names=family).fitted(ours.tensors)
        for name in ours.tensors:
            np.testing.assert_array_equal(read(source, name), read(ours, name))


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path):
    def spoil(tensors):
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.embed_tokens.weight"] = np.zeros((12, 16), np.float32)
        return tensors

    file = their_file(tmp_path / "x.safetensors", "llama", spoil)
    with pytest.raises(WeightsError) as error:
        Safetensors(file, names="llama").fitted(Arrays(params("llama")).tensors)
    assert str(error.value) == (
        f"The weights of {file} do not fit the model, which has 30 of them: 2 missing, "
        "1 left over, 1 of another shape or kind. Nothing was read.\n"
        "  missing    model.layers.1.mlp.up_proj.weight (for blocks/1/ff/up/kernel) "
        "float32[24,16]\n"
        "  missing    model.norm.weight (for norm/scale) float32[16]\n"
        "  left over  model.layers.3.mlp.up_proj.weight float32[2,2]\n"
        "  differs    model.embed_tokens.weight (for embed/embedding) is "
        "float32[12,16], the model's is float32[11,16]\n"
        "Build the model in the size that these weights have."
    )


def test_a_head_that_is_not_the_embedding_is_not_dropped(tmp_path: Path):
    def untie(tensors):
        return tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}

    file = their_file(tmp_path / "x.safetensors", "gpt2", untie)
    with pytest.raises(WeightsError) as error:
        Safetensors(file, names="gpt2").fitted(Arrays(params("gpt2")).tensors)
    assert "  left over  lm_head.weight float32[11,16]\n" in str(error.value)
    assert str(error.value).endswith(
        "lm_head.weight is not the same as transformer.wte.weight, so it is of use: "
        "build the model with a head of its own (tied=False)."
    )

    def tie(tensors):
        del tensors["lm_head.weight"]
        return tensors

    file = their_file(tmp_path / "y.safetensors", "llama", tie)
    with pytest.raises(WeightsError) as error:
        Safetensors(file, names="llama").fitted(Arrays(params("llama")).tensors)
    assert str(error.value).endswith(
        "These weights have no lm_head.weight, as those do that use "
        "model.embed_tokens.weight for it: build the model so (tied=True)."
    )


def test_the_wrong_map_and_no_map_are_told(tmp_path: Path):
    ours = Arrays(params("llama"))
    file = tmp_path / "x.safetensors"
    write_safetensors(file, ours, "llama")
    with pytest.raises(WeightsError, match="Hugging Face's llama: say names='llama'"):
        Safetensors(file).fitted(ours.tensors)
    with pytest.raises(WeightsError, match="'lama'. Did you mean 'llama'"):
        Safetensors(file, names="lama").fitted(ours.tensors)
    with pytest.raises(WeightsError) as error:
        write_safetensors(tmp_path / "y.safetensors", ours, "gpt2")
    assert str(error.value).startswith(
        "the name map 'gpt2' has no name for 4 of the model's 30 parameters:\n"
    )
    assert "\n  blocks/2/ff/gate/kernel float32[16,24]\n" in str(error.value)
    assert "\n  head/kernel float32[16,11]\n" in str(error.value)
    lone = Arrays({"blocks/0/attention/query/bias": np.zeros(4, np.float32)})
    with pytest.raises(WeightsError, match="is made of several parameters, and the"):
        write_safetensors(tmp_path / "y.safetensors", lone, "gpt2")
    flat = Arrays({"patch/kernel": np.zeros((50, 4), np.float32)})
    with pytest.raises(WeightsError, match="cannot turn patch/kernel float32"):
        write_safetensors(tmp_path / "y.safetensors", flat, "vit")


def test_an_own_map_is_a_table_or_a_function(tmp_path: Path):
    ours = Arrays(
        {
            "layers/0/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
            "layers/1/kernel": np.ones((2, 3), np.float32),
            "bias": np.zeros(3, np.float32),
        }
    )
    table = {
        "layers/*/kernel": Named(name="net.*.w", axes="o i -> i o"),
        "bias": "net.b",
    }

    def function(path: str) -> Named | str:
        words = path.split("/")
        if words[0] == "bias":
            return "net.b"
        return Named(name=f"net.{words[1]}.w", axes="o i -> i o")

    files = []
    for i, names in enumerate((table, function, NameMap(table=table))):
        files.append(tmp_path / f"{i}.safetensors")
        write_safetensors(files[-1], ours, names)
        back = Safetensors(files[-1], names=names).fitted(ours.tensors)
        for name in ours.tensors:
            np.testing.assert_array_equal(read(back, name), read(ours, name))
    assert len({file.read_bytes() for file in files}) == 1
    assert {*Safetensors(files[0]).tensors} == {"net.0.w", "net.1.w", "net.b"}
