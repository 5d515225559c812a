"""What every model keeps: dtypes, samples apart, stacked blocks, abstract builds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import build, run

from models.abstract import abstract, count_params
from models.bert import Bert, BertConfig
from models.config import TransformerConfig
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.stack import make_blocks
from models.vit import ViT, ViTConfig

SHAPE = {"width": 16, "depth": 2, "num_heads": 4, "ff_width": 24}
RNG = np.random.default_rng(0)
TOKENS_BT = jnp.asarray(RNG.integers(0, 32, (3, 5)))
IMAGES_BHWC = jnp.asarray(RNG.normal(size=(3, 8, 8, 2)), jnp.float32)
FAMILIES = {
    "gpt": (GPT, GPTConfig(vocab_size=32, max_length=8, **SHAPE), TOKENS_BT),
    "llama": (Llama, LlamaConfig(vocab_size=32, num_kv_heads=2, **SHAPE), TOKENS_BT),
    "bert": (Bert, BertConfig(vocab_size=32, max_length=8, **SHAPE), TOKENS_BT),
    "vit": (
        ViT,
        ViTConfig(num_classes=7, image_size=8, patch_size=4, channels=2, **SHAPE),
        IMAGES_BHWC,
    ),
}
Family = tuple[type[nnx.Module], TransformerConfig, jax.Array]


class Dropped(nnx.Module):
    """The least block that has a parameter and a random state."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_logits_have_the_compute_dtype_and_parameters_stay_float32(family: Family):
    model_class, config, inputs = family
    exact = run(build(model_class, config), inputs)
    model = build(model_class, dataclasses.replace(config, dtype=jnp.bfloat16))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))} == {
        "float32"
    }
    logits = run(model, inputs)
    assert logits.dtype == jnp.bfloat16
    assert logits.shape == ((3, 7) if model_class is ViT else (3, 5, 32))
    np.testing.assert_allclose(logits.astype(jnp.float32), exact, atol=0.1)


def test_a_sample_does_not_see_the_others(family: Family):
    model_class, config, inputs = family
    model = build(model_class, config)
    before, after = run(model, inputs), run(model, inputs.at[0].set(inputs[1]))
    np.testing.assert_array_equal(after[1:], before[1:])
    np.testing.assert_allclose(after[0], before[1], atol=1e-5)


def test_scanned_blocks_compute_what_unrolled_blocks_do(family: Family):
    model_class, config, inputs = family
    unrolled = build(model_class, config)
    scanned = build(model_class, dataclasses.replace(config, scan_layers=True))
    params = nnx.to_pure_dict(nnx.state(unrolled))
    blocks = params["blocks"].values()
    params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    nnx.update(scanned, params)
    np.testing.assert_allclose(run(scanned, inputs), run(unrolled, inputs), atol=1e-5)


def test_dropout_joins_each_branch(family: Family, monkeypatch: pytest.MonkeyPatch):
    model_class, config, inputs = family
    rates = []
    monkeypatch.setattr(
        nnx.Dropout, "__call__", lambda dropout, x: rates.append(dropout.rate) or x
    )
    model = abstract(model_class, dataclasses.replace(config, dropout_rate=0.5))
    nnx.eval_shape(lambda model: model(inputs), model)
    joins = 2 * config.depth + (model_class is not Llama)  # embeddings join as well
    assert rates == [0.5] * joins


@pytest.mark.parametrize("scan_layers", [False, True])
def test_dropout_draws_anew_in_each_call_of_training_only(scan_layers: bool):
    config = dataclasses.replace(
        FAMILIES["gpt"][1], dropout_rate=0.5, scan_layers=scan_layers
    )
    model = build(GPT, config)
    assert not np.allclose(run(model, TOKENS_BT), run(model, TOKENS_BT))
    counts = jax.tree.leaves(nnx.state(model.blocks, nnx.RngCount))
    assert np.sum(counts) == 2 * 2 * config.depth
    model = nnx.view(model, deterministic=True)
    np.testing.assert_array_equal(run(model, TOKENS_BT), run(model, TOKENS_BT))


def test_no_random_state_without_dropout(family: Family):
    model_class, config, _ = family
    assert not jax.tree.leaves(nnx.state(abstract(model_class, config), nnx.RngState))


def test_an_abstract_build_is_the_real_one_without_its_numbers():
    config = FAMILIES["llama"][1]
    real, shapes = Llama(config, rngs=nnx.Rngs(0)), abstract(Llama, config)
    assert nnx.graphdef(shapes) == nnx.graphdef(real)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(shapes)) == (
        jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(real))
    )
    assert count_params(shapes) == count_params(real) == config.num_params


def test_stacked_blocks_start_apart_and_draw_apart():
    blocks = make_blocks(Dropped, 2, stacked=True, rngs=nnx.Rngs(0))
    first_DF, second_DF = blocks.linear.kernel[...]
    assert not np.allclose(first_DF, second_DF)
    first, second = jax.random.key_data(blocks.dropout.rngs.key[...])
    assert not np.array_equal(first, second)


def test_blocks_made_under_jit_are_those_made_without():
    def make() -> nnx.Pytree:
        return make_blocks(Dropped, 2, stacked=False, rngs=nnx.Rngs(0))

    traced, eager = nnx.jit(make)(), make()
    assert nnx.graphdef(traced) == nnx.graphdef(eager)
    for one, other in zip(traced, eager, strict=True):
        np.testing.assert_allclose(
            one.linear.kernel[...], other.linear.kernel[...], atol=1e-6
        )
        assert one.dropout.rngs.key[...] == other.dropout.rngs.key[...]
    assert not np.allclose(traced[0].linear.kernel[...], traced[1].linear.kernel[...])


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
