"""The GPT of models.gpt in Linen: same config, same numbers, same names of parameters.

    model.init(key, tokens_BT)["params"]; model.apply({"params": params}, tokens_BT)

``scan_layers`` stacks the blocks under ``blocks``; otherwise they are ``blocks_0``, ...
Dropout, if any, draws from the "dropout" stream.

B batch, T position, D width, N heads, H head features, V vocabulary.
"""

import jax
from flax import linen as nn

from models.attention import attend
from models.gpt import GPTConfig
from models.layers import (
    embed_tokens,
    embedding_init,
    residual_init,
    take_positions,
    tied_logits,
)


class SelfAttention(nn.Module):
    """Causal multi-head attention with biases."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        width, dtype = config.width, config.dtype
        shape_BTNH = (*x_BTD.shape[:2], config.num_heads, config.head_dim)
        y_BTNH = attend(
            nn.Dense(width, dtype=dtype, name="query")(x_BTD).reshape(shape_BTNH),
            nn.Dense(width, dtype=dtype, name="key")(x_BTD).reshape(shape_BTNH),
            nn.Dense(width, dtype=dtype, name="value")(x_BTD).reshape(shape_BTNH),
            causal=True,
            implementation=config.attention,
        )
        out = nn.Dense(
            width, dtype=dtype, kernel_init=residual_init(config.depth), name="out"
        )
        return out(y_BTNH.reshape(x_BTD.shape))


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), linear."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        x_BTF = nn.Dense(config.ff_width, dtype=config.dtype, name="up")(x_BTD)
        down = nn.Dense(
            config.width,
            dtype=config.dtype,
            kernel_init=residual_init(config.depth),
            name="down",
        )
        return down(nn.gelu(x_BTF))


class Block(nn.Module):
    """One layer of the decoder."""

    config: GPTConfig
    deterministic: bool

    def setup(self) -> None:
        config = self.config
        self.attention_norm = nn.LayerNorm(config.norm_eps, dtype=config.dtype)
        self.attention = SelfAttention(config)
        self.ff_norm = nn.LayerNorm(config.norm_eps, dtype=config.dtype)
        self.ff = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout_rate, deterministic=self.deterministic)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.ff(self.ff_norm(x_BTD)))


class LinenGPT(nn.Module):
    """Decoder-only language model."""

    config: GPTConfig
    deterministic: bool = False
    """True turns dropout off."""

    def setup(self) -> None:
        config = self.config
        self.embed = nn.Embed(
            config.vocab_size, config.width, embedding_init=embedding_init
        )
        self.positions = self.param(
            "positions", embedding_init, (config.max_length, config.width)
        )
        self.dropout = nn.Dropout(config.dropout_rate, deterministic=self.deterministic)
        if config.scan_layers:
            self.blocks = Block(config, self.deterministic)
        else:
            self.blocks = [
                Block(config, self.deterministic) for _ in range(config.depth)
            ]
        self.norm = nn.LayerNorm(config.norm_eps, dtype=config.dtype)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        dtype, table_VD = self.config.dtype, self.embed.embedding
        x_BTD = embed_tokens(table_VD, tokens_BT, dtype)
        x_BTD += take_positions(self.positions, tokens_BT.shape[1], dtype)
        x_BTD = self._run_blocks(self.dropout(x_BTD))
        return tied_logits(table_VD, self.norm(x_BTD))

    def _run_blocks(self, x_BTD: jax.Array) -> jax.Array:
        if not self.config.scan_layers:
            for block in self.blocks:
                x_BTD = block(x_BTD)
            return x_BTD
        scan = nn.scan(
            lambda block, x_BTD: (block(x_BTD), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.config.depth,
        )
        return scan(self.blocks, x_BTD)[0]
