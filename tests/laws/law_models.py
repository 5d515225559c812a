"""Small models of every shape the intake must take, as losses with their batches."""

import dataclasses
import fnmatch
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hexijax.layers.loss import ModelLoss, linen_loss, nnx_loss
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss

VOCAB, LENGTH, WIDTH, DEPTH = 32, 8, 16, 4


def tokens(batch_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A global batch whose samples differ in weight."""
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, VOCAB, (batch_size, LENGTH + 1)).astype(np.int32),
        "weights": rng.integers(0, 2, (batch_size, LENGTH)).astype(np.float32) + 0.5,
    }


def score(model: Any, batch: Any) -> Any:
    """Weighted next-token loss, and the samples' accuracy as a metric."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(inputs)
    right = (logits.argmax(-1) == targets).astype(jnp.float32).sum(-1)
    counts = jnp.full(right.shape, float(LENGTH))
    total, weight = next_token_loss(logits, targets, batch["weights"])
    return total, weight, {"accuracy": (right, counts)}


class LinenBlock(nn.Module):
    """Norm and feed-forward, wide enough to split over four devices."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        y = jnp.cumsum(nn.Dense(WIDTH)(nn.silu(y)), axis=1)
        return x + 0.3 * y


class LinenModel(nn.Module):
    """A causal model without attention; tied or not, unrolled or scanned."""

    tied: bool
    scanned: bool

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        x = embed(inputs)
        if self.scanned:
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=DEPTH,
            )
            x, _ = scan(nn.remat(LinenBlock)(name="blocks"), x, None)
        else:
            for i in range(DEPTH):
                x = LinenBlock(name=f"blocks_{i}")(x)
        x = nn.LayerNorm(name="norm")(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB, name="head")(x)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Which kind of model."""

    api: str = "nnx"
    tied: bool = True
    scanned: bool = False
    dropout: float = 0.0
    dtype: str = "float32"
    trained: tuple[str, ...] = ("*",)
    """Patterns for the paths of the parameters that train."""
    lora: bool = False
    """Whether the feed-forwards of the NNX model have adapters."""

    def trains(self, name: str) -> bool:
        """Whether a parameter does."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.trained)

    @property
    def config(self) -> GPTConfig | LlamaConfig:
        """Of the NNX model: a GPT if it is tied, else a Llama."""
        if self.tied:
            return GPTConfig(
                vocab_size=VOCAB,
                max_length=LENGTH,
                width=WIDTH,
                depth=DEPTH,
                num_heads=4,
                ff_width=4 * WIDTH,
                dropout_rate=self.dropout,
                scan_layers=self.scanned,
                dtype=self.dtype,
            )
        return LlamaConfig(
            vocab_size=VOCAB,
            width=WIDTH,
            depth=DEPTH,
            num_heads=4,
            num_kv_heads=4,
            ff_width=2 * WIDTH,
            scan_layers=self.scanned,
            dtype=self.dtype,
        )

    def loss(self) -> ModelLoss:
        """The model as a loss."""
        if self.api == "linen":
            return linen_loss(
                LinenModel(self.tied, self.scanned), score, example=tokens(1)
            )
        config: Any = self.config
        model: Any = GPT if self.tied else Llama

        def build(rngs: nnx.Rngs) -> Any:
            made = model(config, rngs=rngs)
            return adapted(made, rngs) if self.lora else made

        return nnx_loss(build, score)


def adapted(model: Any, rngs: nnx.Rngs) -> Any:
    """With a LoRA beside each block's first feed-forward matrix, none of them zero."""
    for block in model.blocks:
        up = block.ff.up
        block.ff.up = nnx.LoRA(
            up.in_features,
            4,
            up.out_features,
            base_module=up,
            b_initializer=nnx.initializers.normal(0.1),
            rngs=rngs,
        )
    return model
