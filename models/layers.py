"""NNX layers that GPT, BERT and ViT share: biases, LayerNorm, GELU.

Weights are float32 and cast where they are used; LayerNorm computes in float32.

B batch, T position, D width, N heads, H head features, V vocabulary,
P learned positions.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.attention import attend
from models.config import TransformerConfig

embedding_init = nnx.initializers.normal(0.02)


def residual_init(depth: int) -> nnx.initializers.Initializer:
    """For what is added to the residual stream 2 x depth times: keeps its variance."""
    return nnx.initializers.variance_scaling(0.5 / depth, "fan_in", "normal")


def make_dropout(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Dropout that holds a random state only if it will ever draw."""
    return nnx.Dropout(config.dropout_rate, rngs=rngs if config.dropout_rate else None)


def make_norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """LayerNorm over the width."""
    return nnx.LayerNorm(
        config.width, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs
    )


def embed_tokens(
    table_VD: jax.Array, tokens_BT: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Rows of the table; cast after the lookup, so that gradients add up in float32."""
    return jnp.take(table_VD, tokens_BT, axis=0).astype(dtype)


def take_positions(table_PD: jax.Array, length: int, dtype: DTypeLike) -> jax.Array:
    """Learned embeddings of the first ``length`` positions, (1, T, D)."""
    if length > table_PD.shape[0]:
        raise ValueError(
            f"The sequence has {length} tokens and the model {table_PD.shape[0]} "
            "learned positions. Shorten the one or raise max_length."
        )
    return table_PD[None, :length].astype(dtype)


def tied_logits(table_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Logits from the embedding table, in the dtype of ``x_BTD``."""
    return jnp.einsum("BTD,VD->BTV", x_BTD, table_VD.astype(x_BTD.dtype))


class SelfAttention(nnx.Module):
    """Multi-head attention with biases."""

    def __init__(self, config: TransformerConfig, *, causal: bool, rngs: nnx.Rngs):
        width, dtype = config.width, config.dtype
        self.query = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.key = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(
            width,
            width,
            dtype=dtype,
            kernel_init=residual_init(config.depth),
            rngs=rngs,
        )
        self.config = config
        self.causal = causal

    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        config = self.config
        shape_BTNH = (*x_BTD.shape[:2], config.num_heads, config.head_dim)
        y_BTNH = attend(
            self.query(x_BTD).reshape(shape_BTNH),
            self.key(x_BTD).reshape(shape_BTNH),
            self.value(x_BTD).reshape(shape_BTNH),
            causal=self.causal,
            mask_BS=mask_BT,
            implementation=config.attention,
        )
        return self.out(y_BTNH.reshape(x_BTD.shape))


class FeedForward(nnx.Module):
    """Linear, GELU (tanh form), linear."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(
            config.width, config.ff_width, dtype=config.dtype, rngs=rngs
        )
        self.down = nnx.Linear(
            config.ff_width,
            config.width,
            dtype=config.dtype,
            kernel_init=residual_init(config.depth),
            rngs=rngs,
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x_BTD)))


class PreNormBlock(nnx.Module):
    """The block of GPT and ViT: norms stand before what they feed."""

    def __init__(self, config: TransformerConfig, *, causal: bool, rngs: nnx.Rngs):
        self.attention_norm = make_norm(config, rngs)
        self.attention = SelfAttention(config, causal=causal, rngs=rngs)
        self.ff_norm = make_norm(config, rngs)
        self.ff = FeedForward(config, rngs=rngs)
        self.dropout = make_dropout(config, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.ff(self.ff_norm(x_BTD)))
