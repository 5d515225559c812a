"""GPT-2 style decoder (NNX): learned positions, LayerNorm, GELU, biases, tied head.

    tokens_BT -> logits_BTV, in the compute dtype

The loss upcasts logits, not the model: float32 logits would double the largest array.

B batch, T position, D width, V vocabulary.
"""

import dataclasses

import jax
from flax import nnx

from models.config import TransformerConfig
from models.layers import (
    PreNormBlock,
    embed_tokens,
    embedding_init,
    make_dropout,
    make_norm,
    take_positions,
    tied_logits,
)
from models.stack import make_blocks, run_blocks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(TransformerConfig):
    """A GPT, in NNX or in Linen."""

    vocab_size: int
    """Rows of the embedding table, which is the head as well."""

    max_length: int
    """Learned positions: the longest sequence."""

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        tables = (self.vocab_size + self.max_length) * self.width
        return tables + self.depth * self.block_params + 2 * self.width


class GPT(nnx.Module):
    """Decoder-only language model."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(
            config.vocab_size, config.width, embedding_init=embedding_init, rngs=rngs
        )
        self.positions = nnx.Param(
            embedding_init(rngs.params(), (config.max_length, config.width))
        )
        self.dropout = make_dropout(config, rngs)
        self.blocks = make_blocks(
            lambda rngs: PreNormBlock(config, causal=True, rngs=rngs),
            config.depth,
            stacked=config.scan_layers,
            rngs=rngs,
        )
        self.norm = make_norm(config, rngs)
        self.config = config

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        dtype, table_VD = self.config.dtype, self.embed.embedding[...]
        x_BTD = embed_tokens(table_VD, tokens_BT, dtype)
        x_BTD += take_positions(self.positions[...], tokens_BT.shape[1], dtype)
        x_BTD = run_blocks(self.blocks, self.dropout(x_BTD))
        return tied_logits(table_VD, self.norm(x_BTD))
