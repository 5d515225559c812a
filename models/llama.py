"""Llama decoder (NNX): RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.

    tokens_BT -> logits_BTV, in the compute dtype

The loss upcasts logits, not the model: float32 logits would double the largest array.

B batch, T position, D width, N query heads, K key heads, H head features, V vocabulary,
F feed-forward width, R rotated pairs (H / 2).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import attend
from models.config import TransformerConfig
from models.layers import (
    embed_tokens,
    embedding_init,
    make_dropout,
    residual_init,
    tied_logits,
)
from models.stack import make_blocks, run_blocks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(TransformerConfig):
    """A Llama."""

    vocab_size: int
    """Rows of the embedding table and columns of the head."""

    num_kv_heads: int
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""

    max_length: int = 2048
    """The longest sequence meant; rotary positions need no parameters for it."""

    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""

    tied: bool = False
    """Use the embedding table as the head."""

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)  # slots: super() has no cell to read
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig.num_heads {self.num_heads} is no multiple of "
                f"num_kv_heads {self.num_kv_heads}: every key head serves as many "
                "query heads. Change one of them."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"LlamaConfig has heads of {self.head_dim} features (width "
                f"{self.width} over {self.num_heads} heads); rotary positions turn "
                "pairs of features. Change one of them so that it is even."
            )

    @property
    def kv_width(self) -> int:
        """Features of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def block_params(self) -> int:
        """Parameters of one block."""
        attention = 2 * self.width * (self.width + self.kv_width)
        return attention + 3 * self.width * self.ff_width + 2 * self.width

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        tables = (1 if self.tied else 2) * self.vocab_size * self.width
        return tables + self.depth * self.block_params + self.width


def rope_table(length: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, (T, R) in float32.

    Made from iota in each call and not kept: an array attribute that is no parameter
    is a constant of the compiled program, and a leaked tracer in an abstract build.
    """
    pairs_R = jnp.arange(head_dim // 2, dtype=jnp.float32)
    frequency_R = theta ** (-2.0 * pairs_R / head_dim)
    positions_T = jnp.arange(length, dtype=jnp.float32)
    angle_TR = positions_T[:, None] * frequency_R[None, :]
    return jnp.cos(angle_TR), jnp.sin(angle_TR)


def rotate(x_BTNH: jax.Array, cos_TR: jax.Array, sin_TR: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + H / 2) of each head, in float32; same dtype out."""
    cos_1T1R, sin_1T1R = cos_TR[None, :, None, :], sin_TR[None, :, None, :]
    a_BTNR, b_BTNR = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned_BTNH = jnp.concatenate(
        [
            a_BTNR * cos_1T1R - b_BTNR * sin_1T1R,
            b_BTNR * cos_1T1R + a_BTNR * sin_1T1R,
        ],
        axis=-1,
    )
    return turned_BTNH.astype(x_BTNH.dtype)


def make_linear(
    in_width: int,
    out_width: int,
    config: LlamaConfig,
    rngs: nnx.Rngs,
    *,
    residual: bool = False,
) -> nnx.Linear:
    """A matrix without bias; ``residual`` ones write to the residual stream."""
    kernel_init = (
        residual_init(config.depth) if residual else nnx.initializers.lecun_normal()
    )
    return nnx.Linear(
        in_width,
        out_width,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=kernel_init,
        rngs=rngs,
    )


def make_rms_norm(config: LlamaConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """RMSNorm over the width, computed in float32."""
    return nnx.RMSNorm(
        config.width, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs
    )


class GroupedQueryAttention(nnx.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        width, kv_width = config.width, config.kv_width
        self.query = make_linear(width, width, config, rngs)
        self.key = make_linear(width, kv_width, config, rngs)
        self.value = make_linear(width, kv_width, config, rngs)
        self.out = make_linear(width, width, config, rngs, residual=True)
        self.config = config

    def __call__(
        self,
        x_BTD: jax.Array,
        cos_TR: jax.Array,
        sin_TR: jax.Array,
        segments_BT: jax.Array | None = None,
    ) -> jax.Array:
        config = self.config
        head = (*x_BTD.shape[:2], -1, config.head_dim)
        y_BTNH = attend(
            rotate(self.query(x_BTD).reshape(head), cos_TR, sin_TR),
            rotate(self.key(x_BTD).reshape(head), cos_TR, sin_TR),
            self.value(x_BTD).reshape(head),
            causal=True,
            segments_BT=segments_BT,
            implementation=config.attention,
        )
        return self.out(y_BTNH.reshape(x_BTD.shape))


class SwiGLU(nnx.Module):
    """Feed-forward layer whose hidden features are gated."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.gate = make_linear(config.width, config.ff_width, config, rngs)
        self.up = make_linear(config.width, config.ff_width, config, rngs)
        self.down = make_linear(
            config.ff_width, config.width, config, rngs, residual=True
        )

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nnx.Module):
    """One layer of the decoder."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = make_rms_norm(config, rngs)
        self.attention = GroupedQueryAttention(config, rngs=rngs)
        self.ff_norm = make_rms_norm(config, rngs)
        self.ff = SwiGLU(config, rngs=rngs)
        self.dropout = make_dropout(config, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        cos_TR: jax.Array,
        sin_TR: jax.Array,
        segments_BT: jax.Array | None = None,
    ) -> jax.Array:
        x = self.attention_norm(x_BTD)
        y_BTD = self.attention(x, cos_TR, sin_TR, segments_BT)
        x_BTD = x_BTD + self.dropout(y_BTD)
        return x_BTD + self.dropout(self.ff(self.ff_norm(x_BTD)))


class Llama(nnx.Module):
    """Decoder-only language model."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            config.vocab_size, config.width, embedding_init=embedding_init, rngs=rngs
        )
        self.blocks = make_blocks(
            lambda rngs: Block(config, rngs=rngs),
            config.depth,
            stacked=config.scan_layers,
            rngs=rngs,
        )
        self.norm = make_rms_norm(config, rngs)
        self.head = (
            None
            if config.tied
            else make_linear(config.width, config.vocab_size, config, rngs)
        )
        self.config = config

    def __call__(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        """Logits of the next token at each position.

        ``segments_BT`` are numbers of the documents packed into a sequence, none of
        which sees another; rotary positions are relative, so they need not start anew.
        """
        config, table_VD = self.config, self.embed.embedding[...]
        rope = rope_table(tokens_BT.shape[1], config.head_dim, config.rope_theta)
        x_BTD = embed_tokens(table_VD, tokens_BT, config.dtype)
        shared = rope if segments_BT is None else (*rope, segments_BT)
        x_BTD = self.norm(run_blocks(self.blocks, x_BTD, *shared))
        return tied_logits(table_VD, x_BTD) if self.head is None else self.head(x_BTD)
