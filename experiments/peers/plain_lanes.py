"""Llama in plain JAX over equal cards, one program for all: the peer of our runtime.

    batch -> jit(gradients of a microbatch a card, added up there)
          -> jit(sum over cards, AdamW) -> bf16 weights on every card

``PlainLlama`` as one would write it for several cards: the same sums, kept a card for
itself until the step's end, so that gradients cross the link once a step. Weights and
state are whole on every card. No hexijax.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.peers.plain_llama import random_weights
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss

CARDS = "cards"
"""The mesh's axis."""


@dataclasses.dataclass
class PlainLanes:
    """Trains on equal devices: ``microbatches`` of ``microbatch_size`` each a step."""

    config: LlamaConfig
    optimizer: optax.GradientTransformation
    microbatch_size: int
    microbatches: int
    devices: Sequence[jax.Device]

    def __post_init__(self) -> None:
        abstract = nnx.eval_shape(lambda: Llama(self.config, rngs=nnx.Rngs(0)))
        graph, self.shapes, rest = nnx.split(abstract, nnx.Param, ...)
        mesh = Mesh(np.array(self.devices), (CARDS,))
        self.whole = NamedSharding(mesh, P())
        self.by_card = NamedSharding(mesh, P(CARDS))

        def loss(weights: Any, tokens: jax.Array) -> jax.Array:
            model = nnx.merge(graph, weights, rest)
            return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])[0].sum()

        def add(weights: Any, tokens: jax.Array, sums: Any, weight: jax.Array) -> Any:
            value, grads = jax.value_and_grad(lambda w: loss(w, tokens) / weight)(
                weights
            )
            total, acc = sums
            acc = jax.tree.map(lambda a, g: a + g.astype(jnp.float32)[None], acc, grads)
            return total + value[None], acc

        def update(master: Any, moments: Any, sums: Any) -> Any:
            total, acc = sums
            grads = jax.tree.map(lambda a: a.sum(0), acc)
            updates, moments = self.optimizer.update(grads, moments, master)
            master = optax.apply_updates(master, updates)
            zero = jax.tree.map(jnp.zeros_like, sums)
            return master, moments, self.cast(master), zero, total.sum()

        specs = (P(), P(CARDS), P(CARDS), P())
        lanes = jax.shard_map(
            add, mesh=mesh, in_specs=specs, out_specs=P(CARDS), check_vma=False
        )
        self._add: Callable[..., Any] = jax.jit(lanes, donate_argnums=2)
        kept = (self.whole, self.whole, self.whole, self.by_card, self.whole)
        self._update: Callable[..., Any] = jax.jit(
            update, donate_argnums=(0, 1, 2), out_shardings=kept
        )

    def cast(self, master: Any) -> Any:
        """Matrices in the compute dtype; vectors in float32, as the model uses them."""
        return jax.tree.map(
            lambda p: p.astype(self.config.dtype) if p.ndim > 1 else p, master
        )

    def init(self) -> None:
        """Random weights, the same on every device.

        Made leaf by leaf on the first: one program that draws them all takes a minute
        to compile.
        """
        shapes, cards = self.shapes, len(self.devices)
        whole = self.whole
        with jax.default_device(self.devices[0]):
            made = random_weights(shapes)
        self.master = jax.device_put(made, whole)
        make_moments = jax.jit(self.optimizer.init, out_shardings=whole)
        self.moments = make_moments(self.master)
        self.weights = jax.jit(self.cast, out_shardings=whole)(self.master)

        def zeros() -> Any:
            acc = jax.tree.map(lambda x: jnp.zeros((cards, *x.shape)), shapes)
            return jnp.zeros(cards), acc

        self.sums = jax.jit(zeros, out_shardings=self.by_card)()

    def step(self, batch: np.ndarray) -> jax.Array:
        """One step on ``[samples, length + 1]`` tokens; the loss is not waited for."""
        weight = np.float32(batch.shape[0] * (batch.shape[1] - 1))
        size = self.microbatch_size * len(self.devices)
        for i in range(self.microbatches):
            rows = batch[i * size : (i + 1) * size]
            tokens = jax.device_put(rows, self.by_card)
            self.sums = self._add(self.weights, tokens, self.sums, weight)
        out = self._update(self.master, self.moments, self.sums)
        self.master, self.moments, self.weights, self.sums, total = out
        return total
