"""transformers' Flax models at tiny sizes, as losses over the laws' batches.

Nothing is downloaded: they are made from their configurations. Attention dropout and
all other dropout are the configuration's own; ``train`` turns them on.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import transformers

from hexijax.layers.loss import ModelLoss, linen_loss
from tests.laws.law_models import LENGTH, VOCAB, tokens

DEPTH, WIDTH, HEADS = 3, 16, 4

GPT2 = transformers.GPT2Config(
    vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS
)
_SHAPE = {
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
}
BERT = transformers.BertConfig(**_SHAPE)
LLAMA = transformers.LlamaConfig(**_SHAPE, num_key_value_heads=2)

MODELS: Mapping[str, tuple[Any, Any]] = {
    "gpt2": (transformers.FlaxGPT2LMHeadModel, GPT2),
    "bert": (transformers.FlaxBertForMaskedLM, BERT),
    "llama": (transformers.FlaxLlamaForCausalLM, LLAMA),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Foreign:
    """One of them; stands where the laws want a ``Shape``."""

    family: str
    """``gpt2``, ``bert`` or ``llama``."""

    train: bool = False
    """With dropout."""

    def trains(self, name: str) -> bool:
        """Whether a parameter does: all do."""
        del name
        return True

    @property
    def model(self) -> Any:
        """transformers' own class, without parameters."""
        build, config = MODELS[self.family]
        return build(config, input_shape=(1, LENGTH), _do_init=False)

    def loss(self) -> ModelLoss:
        """The model as a loss."""
        score = self._masked if self.family == "bert" else self._next

        def build(dtype: str = "float32") -> Any:
            model, config = MODELS[self.family]
            return model(config, dtype=jnp.dtype(dtype), _do_init=False).module

        return linen_loss(build, score, example=tokens(1))

    def _next(self, model: Any, batch: Mapping[str, Any]) -> Any:
        ids, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        places = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        attended = jnp.ones(ids.shape, jnp.int32)
        out = model(ids, attended, places, deterministic=not self.train)
        return summed(out.logits, targets, batch["weights"])

    def _masked(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Tokens of the higher weight are hidden; the last place is padding."""
        ids = batch["tokens"][:, :-1]
        hidden = batch["weights"] > 1
        places = jnp.broadcast_to(jnp.arange(LENGTH), ids.shape)
        out = model(
            jnp.where(hidden, 0, ids),
            (places < LENGTH - 1).astype(jnp.int32),
            jnp.zeros_like(ids),
            places,
            None,
            deterministic=not self.train,
        )
        return summed(out.logits, ids, hidden.astype(jnp.float32))


def summed(logits: Any, targets: Any, weights: Any) -> Any:
    """Cross-entropy and its weight by sample, and how often the best token is right."""
    best = logits.max(-1, keepdims=True)
    sums = jnp.log(jnp.exp(logits - best).sum(-1)) + best[..., 0]
    at = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    right = (logits.argmax(-1) == targets).astype(jnp.float32)
    counts = jnp.full(len(targets), float(LENGTH))
    metrics = {"accuracy": (right.sum(1), counts)}
    return ((sums - at) * weights).sum(1), weights.sum(1), metrics


def logits(model: Any, params: Any, ids: np.ndarray) -> np.ndarray:
    """What transformers' model itself says."""
    return np.asarray(model(ids, params=params).logits)
