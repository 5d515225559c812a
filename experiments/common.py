"""What the language model experiments share: a next-token loss, an optimizer, data."""

import dataclasses
from collections.abc import Callable

import optax
from flax import nnx

from hexijax.data import RandomTokens, Text, TextBytes, TokenFile, open_data
from hexijax.layers.loss import ModelLoss, nnx_loss
from models.config import TransformerConfig
from models.losses import next_token_loss


def next_token(
    model: Callable[..., nnx.Module], config: TransformerConfig
) -> ModelLoss:
    """The loss of a decoder, in whatever dtype and attention a stage asks for."""

    def build(
        rngs: nnx.Rngs, dtype: str = "float32", attention: str | None = None
    ) -> nnx.Module:
        return model(
            dataclasses.replace(config, dtype=dtype, attention=attention), rngs=rngs
        )

    return nnx_loss(
        build,
        lambda model, batch: next_token_loss(model(batch["inputs"]), batch["targets"]),
    )


def adamw(peak_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with a warm-up over a twentieth of the steps, then a cosine decay."""
    warmup_steps = min(max(1, steps // 20), steps - 1)  # none, of a single step
    rate = optax.warmup_cosine_decay_schedule(
        0.0, peak_rate, warmup_steps=warmup_steps, decay_steps=steps
    )
    return optax.adamw(rate, b2=0.95, weight_decay=0.1)


def tokens(
    path: str | None, length: int, vocab_size: int
) -> TextBytes | Text | TokenFile | RandomTokens:
    """The tokens of a file; without one, random ones."""
    if path is None:
        return RandomTokens(vocab_size, length)
    return open_data(path, length, vocab_size=vocab_size)
