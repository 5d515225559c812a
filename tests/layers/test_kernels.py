"""Fused attention in the figures: what it leaves out, and what still counts."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from hexijax.layers.chain import Chain, Layer, Product, Remat
from hexijax.layers.kernels import trace_chain
from hexijax.layers.loss import nnx_loss
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss

B, T, D, F, N, V = 1, 64, 32, 48, 4, 40
H = D // N
SCORES_BYTES = N * T * T * 2  # bfloat16


def llama(heads: int) -> Any:
    def build(
        rngs: nnx.Rngs, dtype: str = "float32", attention: str | None = None
    ) -> Llama:
        config = LlamaConfig(
            vocab_size=V, width=D, depth=2, num_heads=heads, num_kv_heads=heads,
            ff_width=F, dtype=dtype, attention=attention,
        )  # fmt: skip
        return Llama(config, rngs=rngs)

    def score(model: Any, batch: Mapping[str, Any]) -> Any:
        return next_token_loss(model(batch["inputs"]), batch["inputs"])

    return nnx_loss(build, score)


@functools.cache
def llama_chain(heads: int = N, dtype: str = "bfloat16", length: int = T) -> Chain:
    return chain_of(llama(heads), dtype, length)


def chain_of(loss: Any, dtype: str = "bfloat16", length: int = T) -> Chain:
    batch = {"inputs": jax.ShapeDtypeStruct((B, length), jnp.int32)}
    return trace_chain(loss, loss.abstract_params(), batch, dtype=dtype)


def pair(chain: Chain) -> tuple[Layer, Layer]:
    """A block under plain attention and under the fused kernel."""
    plain, fused = (chain.layers_under(fused_attention=x)[1] for x in (False, True))
    return plain, fused


def test_under_fused_attention_all_bytes_grow_with_the_length_alone():
    long = llama_chain(length=2 * T)
    plain, fused = pair(llama_chain())
    long_plain, long_fused = pair(long)
    for policy in Remat:
        kept, long_kept = (x.activation_bytes[policy] for x in (fused, long_fused))
        assert long_kept == 2 * kept
    assert long_fused.joined_bytes == 2 * fused.joined_bytes
    assert long_fused.forward_bytes == pytest.approx(2 * fused.forward_bytes, rel=0.01)
    assert long_fused.backward_bytes == pytest.approx(
        2 * fused.backward_bytes, rel=0.01
    )
    # Plain attention keeps and moves four times the scores.
    for policy in (Remat.NONE, Remat.DOTS):
        grown = long_plain.activation_bytes[policy] - 2 * plain.activation_bytes[policy]
        assert grown >= 2 * SCORES_BYTES
    assert long_plain.forward_bytes >= 2 * plain.forward_bytes + 2 * SCORES_BYTES


def test_fused_attention_computes_half_of_what_is_masked():
    def by_score(fused: bool) -> tuple[float, float]:
        short, long = (
            llama_chain(length=n).layers_under(fused_attention=fused)[1]
            for n in (T, 2 * T)
        )
        square = 2.0 * T * T  # what grows with the square, over the rest
        return (
            (long.forward_flops - 2 * short.forward_flops) / square,
            (long.backward_flops - 2 * short.backward_flops) / square,
        )

    a_head = 2.0 * 2 * H  # scores and mixing, for one pair of positions
    half = N * a_head / 2
    assert by_score(fused=True) == pytest.approx((half, 2.5 * half), rel=1e-3)
    forward, backward = by_score(fused=False)
    softmax = 12 * N  # at most; element-wise
    assert N * a_head <= forward <= N * a_head + softmax
    assert 2 * N * a_head <= backward <= 2 * N * a_head + softmax


def test_products_of_a_block_are_its_matrices_and_its_attention():
    plain, fused = pair(llama_chain())
    weights = {
        Product(rows=T, inner=D, columns=D, count=4.0),
        Product(rows=T, inner=D, columns=F, count=2.0),
        Product(rows=T, inner=F, columns=D, count=1.0),
    }
    assert weights < set(plain.products)
    assert weights < set(fused.products)
    scores = 2.0 * T * T * H * N
    others = [p for p in plain.products if p not in weights]
    assert sum(p.flops for p in others) == 2 * scores
    assert not any(p.shared for p in others)
    (kernel,) = set(fused.products) - weights
    assert kernel == Product(
        rows=T, inner=H, columns=T, count=float(N), shared=False, fused=True
    )


def test_one_program_keeps_less_than_two():
    _, fused = pair(llama_chain())
    kept = fused.activation_bytes
    assert kept[Remat.FULL] < fused.joined_bytes < kept[Remat.NONE]


def test_attention_of_your_own_is_counted_in_full():
    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = nnx.List(
                nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs) for _ in range(2)
            )
            self.head = nnx.Linear(D, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    loss = nnx_loss(
        lambda rngs: Attention(rngs),
        lambda model, batch: (
            jnp.sum(model(batch["x"]), (1, 2)),
            jnp.ones(batch["x"].shape[0]),
        ),
    )
    batch = {"x": jax.ShapeDtypeStruct((B, T, D), jnp.float32)}
    chain = trace_chain(loss, loss.abstract_params(), batch, dtype="bfloat16")
    for layer in chain.layers_under(fused_attention=True)[:2]:
        assert layer.fused is None
        assert layer.activation_bytes[Remat.NONE] > N * T * T * 4


def test_what_cudnn_refuses_is_counted_plain_and_said():
    chain = llama_chain(heads=8)  # four features a head
    assert not any(layer.fused for layer in chain.layers)
    assert (
        "cuDNN's attention refuses the model: The head dim must be" in chain.notes[-1]
    )
    assert not any(layer.fused for layer in llama_chain(dtype="float32").layers)


def test_both_figures_survive_json_and_do_not_name_the_model():
    chain = llama_chain()
    again = Chain.from_json(json.loads(json.dumps(chain.to_json())))
    assert dataclasses.asdict(again) == dataclasses.asdict(chain)
    plain = [dataclasses.replace(layer, fused=None) for layer in chain.layers]
    one = dataclasses.replace(chain, layers=tuple(plain))
    assert one.fingerprint() == chain.fingerprint()
    with pytest.raises(ValueError, match="format version 1; this hexijax reads"):
        Chain.from_json({**chain.to_json(), "version": 1})
