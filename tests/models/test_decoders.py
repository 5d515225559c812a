"""GPT and Llama: causality, heads, rotary positions; and GPT in NNX against Linen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import build, run

from models.config import TransformerConfig
from models.gpt import GPT, GPTConfig
from models.linen_gpt import LinenGPT
from models.llama import Llama, LlamaConfig, rope_table, rotate

SHAPE = {"vocab_size": 32, "width": 16, "depth": 2, "num_heads": 4, "ff_width": 24}
GPT_CONFIG = GPTConfig(max_length=8, **SHAPE)
LLAMA_CONFIG = LlamaConfig(num_kv_heads=2, **SHAPE)
RNG = np.random.default_rng(0)
TOKENS_BT = jnp.asarray(RNG.integers(0, 32, (3, 5)))


@pytest.mark.parametrize(
    ("model_class", "config"), [(GPT, GPT_CONFIG), (Llama, LLAMA_CONFIG)]
)
def test_a_later_token_changes_no_earlier_logits(
    model_class: type[nnx.Module], config: TransformerConfig
):
    model = build(model_class, config)
    before = run(model, TOKENS_BT)
    after = run(model, TOKENS_BT.at[:, 3].set(TOKENS_BT[:, 3] + 1))
    np.testing.assert_allclose(after[:, :3], before[:, :3], atol=1e-6)
    for later in (3, 4):
        assert not np.allclose(after[:, later], before[:, later], atol=1e-3)


def test_a_sequence_beyond_the_learned_positions_is_refused():
    model = build(GPT, GPT_CONFIG)
    with pytest.raises(ValueError, match="has 9 tokens and the model 8 learned"):
        model(jnp.zeros((1, 9), jnp.int32))


def test_a_tied_head_is_the_embedding_table():
    tied = build(Llama, dataclasses.replace(LLAMA_CONFIG, tied=True))
    untied = build(Llama, LLAMA_CONFIG)
    params = nnx.to_pure_dict(nnx.state(tied))
    head = {"kernel": params["embed"]["embedding"].T}
    nnx.update(untied, params | {"head": head})
    np.testing.assert_allclose(run(untied, TOKENS_BT), run(tied, TOKENS_BT), atol=1e-5)


def test_grouped_queries_equal_repeated_key_heads():
    grouped = build(Llama, LLAMA_CONFIG)
    full = build(Llama, dataclasses.replace(LLAMA_CONFIG, num_kv_heads=4))

    def repeat(kernel_DK: jax.Array) -> jax.Array:
        kernel_DKH = kernel_DK.reshape(16, 2, 4)
        return jnp.repeat(kernel_DKH, 2, axis=1).reshape(16, 16)

    params = nnx.to_pure_dict(nnx.state(grouped))
    for block in params["blocks"].values():
        for name in ("key", "value"):
            kernel = block["attention"][name]["kernel"]
            block["attention"][name]["kernel"] = repeat(kernel)
    nnx.update(full, params)
    np.testing.assert_allclose(run(full, TOKENS_BT), run(grouped, TOKENS_BT), atol=1e-5)


def test_rotation_keeps_length_and_sees_distance_only():
    cos_TR, sin_TR = rope_table(8, 4, 10_000.0)
    x_BTNH = jnp.broadcast_to(jnp.array([0.3, -1.2, 0.8, 0.5]), (1, 8, 1, 4))
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
    x_BTNH = jnp.asarray(RNG.normal(size=(2, 8, 3, 4)), jnp.bfloat16)
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


def linen_params(model: GPT) -> dict:
    """Parameters of an NNX GPT as the Linen GPT names them."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if not model.config.scan_layers:
        blocks = params.pop("blocks")
        params |= {f"blocks_{i}": block for i, block in blocks.items()}
    return params


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linen_and_nnx_compute_the_same(scan_layers: bool, dtype: str):
    config = dataclasses.replace(GPT_CONFIG, scan_layers=scan_layers, dtype=dtype)
    model, linen_model = build(GPT, config), LinenGPT(config)
    params = linen_params(model)
    expected = jax.eval_shape(linen_model.init, jax.random.key(0), TOKENS_BT)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(expected)} == {jnp.dtype("float32")}
    logits_BTV = jax.jit(linen_model.apply)({"params": params}, TOKENS_BT)
    assert logits_BTV.dtype == dtype
    np.testing.assert_allclose(
        logits_BTV.astype(jnp.float32),
        run(model, TOKENS_BT).astype(jnp.float32),
        atol=1e-5 if dtype == "float32" else 0.1,
    )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_linen_dropout_draws_from_its_stream(scan_layers: bool):
    config = dataclasses.replace(GPT_CONFIG, dropout_rate=0.5, scan_layers=scan_layers)
    variables = {"params": linen_params(build(GPT, config))}
    apply = jax.jit(LinenGPT(config).apply)
    one, other = (
        apply(variables, TOKENS_BT, rngs={"dropout": key})
        for key in jax.random.wrap_key_data(jnp.array([[0, 1], [0, 2]], jnp.uint32))
    )
    assert not np.allclose(one, other)
    LinenGPT(config, deterministic=True).apply(variables, TOKENS_BT)
