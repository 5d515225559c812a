"""Models such as Flax's own examples hold, written as their readers would.

They know nothing of hexijax. Each stands with its loss, its batch, and the layers it is
to be cut into.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hexijax.layers.loss import ModelLoss, linen_loss, nnx_loss

VOCAB, LENGTH, WIDTH = 16, 6, 8


@dataclasses.dataclass(frozen=True)
class Example:
    """A model to train."""

    loss: ModelLoss
    batch: Callable[[int], dict[str, np.ndarray]]
    layers: tuple[str, ...]
    per_microbatch: bool = False
    probed: bool = False
    """Numbers show that it is a sum: it picks each sample's last state by its place."""


def images(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(size, 8, 8, 1)).astype(np.float32),
        "label": rng.integers(0, 10, size).astype(np.int32),
    }


def sentences(size: int) -> dict[str, np.ndarray]:
    """Token 0 is padding."""
    rng = np.random.default_rng(1)
    return {
        "inputs": rng.integers(1, VOCAB, (size, LENGTH)).astype(np.int32),
        "targets": rng.integers(0, VOCAB, (size, LENGTH)).astype(np.int32),
    }


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    taken = jnp.take_along_axis(nn.log_softmax(logits), labels[..., None], -1)
    return -taken[..., 0]


def classify(model: Any, batch: Mapping[str, Any]) -> Any:
    logits = model(batch["image"])
    loss = _cross_entropy(logits, batch["label"])
    right = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
    return loss, jnp.ones_like(loss), {"accuracy": right}


def translate(model: Any, batch: Mapping[str, Any]) -> Any:
    shifted = jnp.pad(batch["targets"], ((0, 0), (1, 0)))[:, :-1]
    logits = model(batch["inputs"], shifted)
    weights = (batch["targets"] > 0).astype(jnp.float32)
    loss = _cross_entropy(logits, batch["targets"]) * weights
    return loss.sum(1), weights.sum(1)


def continued(model: Any, batch: Mapping[str, Any]) -> Any:
    loss = _cross_entropy(model(batch["inputs"]), batch["targets"])
    return loss.sum(1), jnp.full(len(loss), float(LENGTH))


# NNX.


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.linear1 = nnx.Linear(64, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 16, rngs=rngs)
        self.linear3 = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), -1)
        return self.linear3(nnx.relu(self.linear2(nnx.relu(self.linear1(x)))))


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.conv2 = nnx.Conv(4, 8, kernel_size=(3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.linear2 = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.dropout1(self.conv1(x)))
        x = nnx.avg_pool(x, (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(nnx.relu(self.dropout2(self.linear1(x))))


class DecoderBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.ln1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.ln2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.ln1(x), mask=mask))
        return x + self.dropout(self.linear2(nnx.relu(self.linear1(self.ln2(x)))))


class LanguageModel(nnx.Module):
    """Blocks as attributes with numbers, sines for positions, a tied head."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        for i in range(3):
            setattr(self, f"encoderdecoderblock_{i}", DecoderBlock(rngs=rngs))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        places = np.arange(LENGTH)[:, None] / 10.0 ** np.arange(WIDTH)
        x = self.embed(tokens) + jnp.asarray(np.sin(places), jnp.float32)[None]
        mask = nnx.combine_masks(
            nnx.make_attention_mask(tokens > 0, tokens > 0),
            nnx.make_causal_mask(tokens),
        )
        for i in range(3):
            x = getattr(self, f"encoderdecoderblock_{i}")(x, mask)
        return self.embed.attend(self.norm(x))


# Linen.


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(features=4, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=16)(x))
        return nn.Dense(features=10)(x)


class Seq2seq(nn.Module):
    """An LSTM that reads, and one that goes on from its state."""

    @nn.compact
    def __call__(self, inputs: jax.Array, decoded: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        encoder = nn.RNN(nn.LSTMCell(WIDTH), return_carry=True, name="encoder")
        decoder = nn.RNN(nn.LSTMCell(WIDTH), name="decoder")
        carry, _ = encoder(embed(inputs), seq_lengths=(inputs > 0).sum(-1))
        return nn.Dense(VOCAB, name="logits")(
            decoder(embed(decoded), initial_carry=carry)
        )


class Cross(nn.Module):
    """A block of either side; the decoder's looks at what was encoded, too."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: Any, seen: Any = None) -> jax.Array:
        def attend(x: jax.Array, y: jax.Array, mask: Any) -> jax.Array:
            attention = nn.MultiHeadDotProductAttention(
                num_heads=2, dropout_rate=0.1, deterministic=False
            )
            return attention(nn.LayerNorm()(x), y, mask=mask)

        x = x + attend(x, x, mask)
        if seen is not None:
            x = x + attend(x, seen, None)
        y = nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(y))


class Translator(nn.Module):
    """Encoder and decoder with one embedding, which is the head as well."""

    @nn.compact
    def __call__(self, inputs: jax.Array, decoded: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        seen = embed(inputs)
        mask = nn.make_attention_mask(inputs > 0, inputs > 0)
        for i in range(2):
            seen = Cross(name=f"encoderblock_{i}")(seen, mask)
        x, mask = embed(decoded), nn.make_causal_mask(decoded)
        for i in range(2):
            x = Cross(name=f"encoderdecoderblock_{i}")(x, mask, seen)
        return embed.attend(nn.LayerNorm(name="norm")(x))


class VAE(nn.Module):
    """Draws by a key that it is given."""

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array) -> Any:
        h = nn.relu(nn.Dense(16, name="fc1")(x))
        mean, logvar = nn.Dense(4, name="fc2_mean")(h), nn.Dense(4, name="fc2_var")(h)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        h = nn.relu(nn.Dense(16, name="fc3")(z))
        return nn.Dense(x.shape[-1], name="fc4")(h), mean, logvar


def elbo(model: Any, batch: Mapping[str, Any], key: jax.Array) -> Any:
    x = jax.nn.sigmoid(batch["image"].reshape(len(batch["image"]), -1))
    logits, mean, logvar = model(x, key)
    bce = (jnp.logaddexp(0.0, logits) - x * logits).sum(1)
    kld = -0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(1)
    ones = jnp.ones_like(bce)
    return bce + kld, ones, {"bce": (bce, ones), "kld": (kld, ones)}


class ResNetBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=False)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), name="conv_proj")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3), name="conv_init")(x)
        for i in range(3):
            x = ResNetBlock(4 * 2 ** (i // 2))(x)
        return nn.Dense(10)(x.mean((1, 2)))


def _linen(module: nn.Module, score: Any, batch: Any) -> ModelLoss:
    return linen_loss(module, score, example=batch(1))


EXAMPLES: dict[str, Callable[[], Example]] = {
    "nnx-mlp": lambda: Example(
        nnx_loss(MLP, classify), images, ("linear1", "linear2", "linear3")
    ),
    "nnx-cnn": lambda: Example(
        nnx_loss(CNN, classify), images, ("conv1", "conv2", "linear1", "linear2")
    ),
    "nnx-lm": lambda: Example(
        nnx_loss(LanguageModel, continued),
        sentences,
        ("embed", *(f"encoderdecoderblock_{i}" for i in range(3)), "head"),
    ),
    "linen-cnn": lambda: Example(
        _linen(LinenCNN(), classify, images),
        images,
        ("Conv_0", "Conv_1", "Dense_0", "Dense_1"),
    ),
    "linen-seq2seq": lambda: Example(
        _linen(Seq2seq(), translate, sentences),
        sentences,
        ("embed", "LSTMCell_0", "LSTMCell_1", "head"),
        probed=True,
    ),
    "linen-wmt": lambda: Example(
        _linen(Translator(), translate, sentences),
        sentences,
        (
            "embed",
            *(f"encoderblock_{i}" for i in range(2)),
            *(f"encoderdecoderblock_{i}" for i in range(2)),
            "head",
        ),
    ),
    "linen-vae": lambda: Example(
        _linen(VAE(), elbo, images), images, ("fc1", "fc3", "fc4")
    ),
    "linen-resnet": lambda: Example(
        _linen(ResNet(), classify, images),
        images,
        ("embed", *(f"ResNetBlock_{i}" for i in range(3)), "head"),
        per_microbatch=True,
    ),
}
