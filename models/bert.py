"""BERT (NNX): bidirectional encoder with a masked-token head.

    tokens_BT, mask_BT, token_types_BT -> logits_BTV, in the compute dtype

Norms stand after what they follow; the decoder is the embedding table plus a bias.

B batch, T position, D width, V vocabulary, K kinds of token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import TransformerConfig
from models.layers import (
    FeedForward,
    SelfAttention,
    embed_tokens,
    embedding_init,
    make_dropout,
    make_norm,
    take_positions,
    tied_logits,
)
from models.stack import make_blocks, run_blocks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig(TransformerConfig):
    """A BERT."""

    vocab_size: int
    """Rows of the embedding table, which is the decoder as well."""

    max_length: int = 512
    """Learned positions: the longest sequence."""

    num_token_types: int | None = 2
    """Kinds of segment that tokens may belong to; None builds no table for them."""

    norm_eps: float = 1e-12
    """Added to the variance inside the norms."""

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        rows = self.vocab_size + self.max_length + (self.num_token_types or 0)
        head = self.width * (self.width + 1) + 2 * self.width + self.vocab_size
        embedding = (rows + 2) * self.width
        return embedding + self.depth * self.block_params + head


class Block(nnx.Module):
    """One layer of the encoder."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, causal=False, rngs=rngs)
        self.attention_norm = make_norm(config, rngs)
        self.ff = FeedForward(config, rngs=rngs)
        self.ff_norm = make_norm(config, rngs)
        self.dropout = make_dropout(config, rngs)

    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None) -> jax.Array:
        y_BTD = self.attention(x_BTD, mask_BT)
        x_BTD = self.attention_norm(x_BTD + self.dropout(y_BTD))
        return self.ff_norm(x_BTD + self.dropout(self.ff(x_BTD)))


class Bert(nnx.Module):
    """Masked language model."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.embed = nnx.Embed(
            config.vocab_size, width, embedding_init=embedding_init, rngs=rngs
        )
        self.positions = nnx.Param(
            embedding_init(rngs.params(), (config.max_length, width))
        )
        self.token_types = (
            None
            if config.num_token_types is None
            else nnx.Embed(
                config.num_token_types, width, embedding_init=embedding_init, rngs=rngs
            )
        )
        self.embed_norm = make_norm(config, rngs)
        self.dropout = make_dropout(config, rngs)
        self.blocks = make_blocks(
            lambda rngs: Block(config, rngs=rngs),
            config.depth,
            stacked=config.scan_layers,
            rngs=rngs,
        )
        self.transform = nnx.Linear(width, width, dtype=config.dtype, rngs=rngs)
        self.norm = make_norm(config, rngs)
        self.logits_bias = nnx.Param(jnp.zeros((config.vocab_size,), jnp.float32))
        self.config = config

    def __call__(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array | None = None,
        token_types_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Logits; ``mask_BT`` is true at real tokens, types are 0 if not given."""
        dtype, table_VD = self.config.dtype, self.embed.embedding[...]
        x_BTD = embed_tokens(table_VD, tokens_BT, dtype)
        x_BTD += take_positions(self.positions[...], tokens_BT.shape[1], dtype)
        if self.token_types is not None:
            if token_types_BT is None:
                token_types_BT = jnp.zeros_like(tokens_BT)
            types_KD = self.token_types.embedding[...]
            x_BTD += embed_tokens(types_KD, token_types_BT, dtype)
        elif token_types_BT is not None:
            raise ValueError(
                "token_types were given to a model built with num_token_types=None, "
                "which has no table for them. Leave them out or set num_token_types."
            )
        x_BTD = self.dropout(self.embed_norm(x_BTD))
        x_BTD = run_blocks(self.blocks, x_BTD, mask_BT)
        x_BTD = self.norm(nnx.gelu(self.transform(x_BTD)))
        logits_BTV = tied_logits(table_VD, x_BTD)
        return logits_BTV + self.logits_bias[None, None].astype(dtype)
