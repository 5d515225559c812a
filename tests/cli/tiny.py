"""A run of seconds: the embedding, two blocks and head of a small model.

Run:     hexijax run tests/cli/tiny.py
Needs:   eight forced CPU devices
Expect:  a falling loss
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from hexijax.data import RandomTokens
from hexijax.experiment import Experiment
from hexijax.layers.loss import nnx_loss
from models.losses import next_token_loss


class Block(nnx.Module):
    """A residual matrix."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.silu(self.linear(x))


class Model(nnx.Module):
    """Tokens to logits, position by position."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def experiment(
    *,
    width: int = 8,
    rate: float = 0.1,
    steps: int = 4,
    broken: bool = False,
    weights: str = "",
) -> Experiment:
    """It.

    Args:
        width: features.
        rate: of SGD with momentum.
        steps: optimizer steps.
        broken: the loss is NaN.
        weights: to begin with; empty: made from the seed.
    """

    def by_sample(model: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        loss, weight = next_token_loss(model(batch["inputs"]), batch["targets"])
        return (loss * jnp.nan if broken else loss), weight

    return Experiment(
        loss=nnx_loss(lambda rngs: Model(width, rngs), by_sample),
        init=weights or None,
        optimizer=optax.sgd(rate, momentum=0.9),
        data=RandomTokens(16, 4),
        batch_size=8,
        tokens_per_sample=4,
        steps=steps,
        cluster="../../experiments/clusters/quickstart.toml",
        plan="tiny_plan.txt",
    )
