"""What every model keeps: dtypes, samples apart, stacked blocks, abstract builds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.abstract import abstract, count_params
from models.bert import Bert, BertConfig
from models.config import TransformerConfig
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.vit import ViT, ViTConfig

SHAPE = {"width": 16, "depth": 2, "num_heads": 4, "ff_width": 24}
TOKENS_BT = jax.random.randint(jax.random.key(1), (3, 6), 0, 32)
IMAGES_BHWC = jax.random.normal(jax.random.key(1), (3, 8, 8, 2))
FAMILIES = {
    "gpt": (GPT, GPTConfig(vocab_size=32, max_length=8, **SHAPE), TOKENS_BT),
    "llama": (Llama, LlamaConfig(vocab_size=32, num_kv_heads=2, **SHAPE), TOKENS_BT),
    "bert": (Bert, BertConfig(vocab_size=32, max_length=8, **SHAPE), TOKENS_BT),
    "vit": (
        ViT,
        ViTConfig(num_classes=5, image_size=8, patch_size=4, channels=2, **SHAPE),
        IMAGES_BHWC,
    ),
}
Family = tuple[type[nnx.Module], TransformerConfig, jax.Array]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def build(model_class: type[nnx.Module], config: TransformerConfig) -> nnx.Module:
    return model_class(config, rngs=nnx.Rngs(0))


@nnx.jit
def run(model: nnx.Module, inputs: jax.Array) -> jax.Array:
    return model(inputs)


def stack_blocks(params: dict) -> dict:
    """Parameters of unrolled blocks as those of stacked ones."""
    blocks = params["blocks"].values()
    return params | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}


def test_logits_have_the_compute_dtype_and_parameters_stay_float32(family: Family):
    model_class, config, inputs = family
    model = build(model_class, dataclasses.replace(config, dtype=jnp.bfloat16))
    logits = run(model, inputs)
    last = 5 if model_class is ViT else 32
    assert logits.shape == (*inputs.shape[: 1 if model_class is ViT else 2], last)
    assert logits.dtype == jnp.bfloat16
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))} == {
        "float32"
    }
    exact = run(build(model_class, config), inputs)
    np.testing.assert_allclose(logits.astype(jnp.float32), exact, atol=0.1)


def test_a_sample_does_not_see_the_others(family: Family):
    model_class, config, inputs = family
    model = build(model_class, config)
    before, after = run(model, inputs), run(model, inputs.at[0].set(inputs[1]))
    np.testing.assert_array_equal(after[1:], before[1:])
    np.testing.assert_allclose(after[0], before[1], atol=1e-6)


def test_scanned_blocks_compute_what_unrolled_blocks_do(family: Family):
    model_class, config, inputs = family
    unrolled = build(model_class, config)
    scanned = build(model_class, dataclasses.replace(config, scan_layers=True))
    nnx.update(scanned, stack_blocks(nnx.to_pure_dict(nnx.state(unrolled))))
    np.testing.assert_allclose(run(scanned, inputs), run(unrolled, inputs), atol=1e-5)


def test_stacked_blocks_start_apart(family: Family):
    model_class, config, _ = family
    model = build(model_class, dataclasses.replace(config, scan_layers=True))
    for leaf in jax.tree.leaves(nnx.state(model.blocks)):
        assert leaf.shape[0] == config.depth
        assert leaf.ndim < 3 or not np.allclose(leaf[0], leaf[1])


@pytest.mark.parametrize(
    ("name", "scan_layers"), [*((name, False) for name in FAMILIES), ("gpt", True)]
)
def test_dropout_draws_anew_in_training_and_not_in_evaluation(
    name: str, scan_layers: bool
):
    model_class, config, inputs = FAMILIES[name]
    config = dataclasses.replace(config, dropout_rate=0.5, scan_layers=scan_layers)
    model = build(model_class, config)
    assert not np.allclose(run(model, inputs), run(model, inputs))
    model = nnx.view(model, deterministic=True)
    np.testing.assert_array_equal(run(model, inputs), run(model, inputs))


def test_no_random_state_without_dropout(family: Family):
    model_class, config, _ = family
    assert not jax.tree.leaves(nnx.state(abstract(model_class, config), nnx.RngState))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_an_abstract_build_is_the_real_one_without_its_numbers(
    family: Family, scan_layers: bool
):
    model_class, config, _ = family
    config = dataclasses.replace(config, scan_layers=scan_layers)
    real, shapes = build(model_class, config), abstract(model_class, config)
    assert nnx.graphdef(shapes) == nnx.graphdef(real)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(shapes)) == (
        jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(real))
    )
    assert count_params(shapes) == count_params(real) == config.num_params


def test_initialising_under_jit_gives_the_same_numbers():
    model_class, config, _ = FAMILIES["llama"]
    traced = nnx.jit(lambda: build(model_class, config))()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        nnx.state(traced),
        nnx.state(build(model_class, config)),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "GPTConfig.depth is 0; at least 1 is needed."),
        ({"num_heads": 3}, "GPTConfig.width 16 is no multiple of num_heads 3"),
        ({"dropout_rate": 1.0}, "GPTConfig.dropout_rate is 1.0; a probability below 1"),
        ({"dtype": "int32"}, "GPTConfig.dtype is int32; layers compute in a floating"),
        ({"attention": "flash"}, "GPTConfig.attention is 'flash'; known are 'xla'"),
    ],
)
def test_a_config_that_cannot_be_says_why(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FAMILIES["gpt"][1], **changes)
