"""GPT and Llama: causality, heads, rotary positions; and GPT in NNX against Linen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gpt import GPT, GPTConfig
from models.linen_gpt import LinenGPT
from models.llama import Llama, LlamaConfig, rope_table, rotate

SHAPE = {"vocab_size": 32, "width": 16, "depth": 2, "num_heads": 4, "ff_width": 24}
GPT_CONFIG = GPTConfig(max_length=8, **SHAPE)
LLAMA_CONFIG = LlamaConfig(num_kv_heads=2, **SHAPE)
TOKENS_BT = jax.random.randint(jax.random.key(1), (2, 6), 0, 32)


@pytest.mark.parametrize(
    ("model_class", "config"), [(GPT, GPT_CONFIG), (Llama, LLAMA_CONFIG)]
)
def test_a_later_token_changes_no_earlier_logits(model_class, config):
    model = model_class(config, rngs=nnx.Rngs(0))
    before = model(TOKENS_BT)
    after = model(TOKENS_BT.at[:, 4].add(1))
    np.testing.assert_allclose(after[:, :4], before[:, :4], atol=1e-6)
    assert not np.allclose(after[:, 4:], before[:, 4:], atol=1e-3)


def test_a_sequence_beyond_the_learned_positions_is_refused():
    model = GPT(GPT_CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="has 9 tokens and the model 8 learned"):
        model(jnp.zeros((1, 9), jnp.int32))


def test_a_tied_head_is_the_embedding_table():
    tied = Llama(dataclasses.replace(LLAMA_CONFIG, tied=True), rngs=nnx.Rngs(0))
    untied = Llama(LLAMA_CONFIG, rngs=nnx.Rngs(1))
    params = nnx.to_pure_dict(nnx.state(tied))
    head = {"kernel": params["embed"]["embedding"].T}
    nnx.update(untied, params | {"head": head})
    np.testing.assert_allclose(untied(TOKENS_BT), tied(TOKENS_BT), atol=1e-5)


def test_grouped_queries_equal_repeated_key_heads():
    grouped = Llama(LLAMA_CONFIG, rngs=nnx.Rngs(0))
    full = Llama(dataclasses.replace(LLAMA_CONFIG, num_kv_heads=4), rngs=nnx.Rngs(1))

    def repeat(kernel_DK: jax.Array) -> jax.Array:
        kernel_DKH = kernel_DK.reshape(16, 2, 4)
        return jnp.repeat(kernel_DKH, 2, axis=1).reshape(16, 16)

    params = nnx.to_pure_dict(nnx.state(grouped))
    for block in params["blocks"].values():
        for name in ("key", "value"):
            kernel = block["attention"][name]["kernel"]
            block["attention"][name]["kernel"] = repeat(kernel)
    nnx.update(full, params)
    np.testing.assert_allclose(full(TOKENS_BT), grouped(TOKENS_BT), atol=1e-5)


def test_rotation_keeps_length_and_sees_distance_only():
    cos_TR, sin_TR = rope_table(8, 4, 10_000.0)
    x_BTNH = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (4,)), (1, 8, 1, 4))
    y_TH = rotate(x_BTNH, cos_TR, sin_TR)[0, :, 0]
    np.testing.assert_allclose(y_TH[0], x_BTNH[0, 0, 0])
    np.testing.assert_allclose(
        jnp.linalg.norm(y_TH, axis=1),
        jnp.linalg.norm(x_BTNH[0, :, 0], axis=1),
        rtol=1e-6,
    )
    np.testing.assert_allclose(y_TH[2] @ y_TH[5], y_TH[4] @ y_TH[7], rtol=1e-5)


def test_rotation_of_half_precision_happens_in_float32():
    cos_TR, sin_TR = rope_table(8, 4, 10_000.0)
    x_BTNH = jax.random.normal(jax.random.key(0), (2, 8, 3, 4), jnp.bfloat16)
    exact = rotate(x_BTNH.astype(jnp.float32), cos_TR, sin_TR).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotate(x_BTNH, cos_TR, sin_TR), exact)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ({"width": 12}, "heads of 3 features .width 12 over 4 heads."),
    ],
)
def test_heads_that_cannot_be_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA_CONFIG, **changes)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linen_and_nnx_compute_the_same(scan_layers: bool, dtype: str):
    config = dataclasses.replace(GPT_CONFIG, scan_layers=scan_layers, dtype=dtype)
    nnx_model, linen_model = GPT(config, rngs=nnx.Rngs(0)), LinenGPT(config)
    params = nnx.to_pure_dict(nnx.state(nnx_model))
    if not scan_layers:
        blocks = params.pop("blocks")
        params |= {f"blocks_{i}": block for i, block in blocks.items()}
    expected = jax.eval_shape(linen_model.init, jax.random.key(0), TOKENS_BT)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
    logits_BTV = linen_model.apply({"params": params}, TOKENS_BT)
    assert logits_BTV.dtype == dtype
    np.testing.assert_allclose(
        logits_BTV.astype(jnp.float32),
        nnx_model(TOKENS_BT).astype(jnp.float32),
        atol=1e-5 if dtype == "float32" else 2e-2,
    )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_linen_dropout_draws_from_its_stream(scan_layers: bool):
    config = dataclasses.replace(GPT_CONFIG, dropout_rate=0.5, scan_layers=scan_layers)
    model = LinenGPT(config)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, TOKENS_BT)
    one, other = (
        model.apply(params, TOKENS_BT, rngs={"dropout": jax.random.key(seed)})
        for seed in range(2)
    )
    assert not np.allclose(one, other)
    LinenGPT(config, deterministic=True).apply(params, TOKENS_BT)
