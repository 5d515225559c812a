"""Llama in plain JAX, as one would write it for one card: the peer of our runtime.

    batch -> jit(gradient of one microbatch, added up) -> jit(AdamW) -> bf16 weights

No hexijax: one ``jit`` a microbatch over the whole model, donated fp32 accumulators,
fp32 master weights cast once a step. ``stage_times`` times runs of layers alone, forward
and backward, for the ideal of a pipeline.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss


def median_s(f: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """(median, least, most) seconds of ``f``, which must wait for its result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times), max(times)


@dataclasses.dataclass
class PlainLlama:
    """Trains on one device: ``microbatches`` of ``microbatch_size`` a step."""

    config: LlamaConfig
    optimizer: optax.GradientTransformation
    microbatch_size: int
    microbatches: int
    device: jax.Device
    remat: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        abstract = nnx.eval_shape(lambda: Llama(self.config, rngs=nnx.Rngs(0)))
        self.graph, self.shapes, self.rest = nnx.split(abstract, nnx.Param, ...)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            model = nnx.merge(self.graph, params, self.rest)
            return next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])[0].sum()

        def add(params: Any, tokens: jax.Array, sums: Any, weight: jax.Array) -> Any:
            value, grads = jax.value_and_grad(
                lambda p: loss(p, tokens) / weight
            )(params)
            total, acc = sums
            acc = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), acc, grads)
            return total + value, acc

        def update(master: Any, moments: Any, sums: Any) -> Any:
            total, grads = sums
            updates, moments = self.optimizer.update(grads, moments, master)
            master = optax.apply_updates(master, updates)
            zero = jax.tree.map(jnp.zeros_like, grads)
            return master, moments, self.cast(master), (jnp.zeros(()), zero), total

        self._add = jax.jit(add, donate_argnums=2)
        self._update = jax.jit(update, donate_argnums=(0, 1, 2))

    def cast(self, master: Any) -> Any:
        """Matrices in the compute dtype; vectors stay float32, as the model uses them."""
        return jax.tree.map(
            lambda p: p.astype(self.config.dtype) if p.ndim > 1 else p, master
        )

    def init(self) -> None:
        """Random weights on the device."""

        def make(key: jax.Array) -> Any:
            leaves, tree = jax.tree.flatten(self.shapes)
            keys = jax.random.split(key, len(leaves))
            made = [
                0.02 * jax.random.normal(k, x.shape, x.dtype)
                if len(x.shape) > 1
                else jnp.ones(x.shape, x.dtype)
                for k, x in zip(keys, leaves, strict=True)
            ]
            master = jax.tree.unflatten(tree, made)
            zero = jax.tree.map(jnp.zeros_like, master)
            moments = self.optimizer.init(master)
            return master, moments, self.cast(master), (jnp.zeros(()), zero)

        with jax.default_device(self.device):
            self.master, self.moments, self.weights, self.sums = jax.jit(make)(
                jax.random.key(0)
            )

    def step(self, batch: np.ndarray) -> jax.Array:
        """One step on ``[samples, length + 1]`` tokens; returns the loss, not waited for."""
        weight = np.float32(batch.shape[0] * (batch.shape[1] - 1))
        size = self.microbatch_size
        for i in range(self.microbatches):
            tokens = jax.device_put(batch[i * size : (i + 1) * size], self.device)
            self.sums = self._add(self.weights, tokens, self.sums, weight)
        out = self._update(self.master, self.moments, self.sums)
        self.master, self.moments, self.weights, self.sums, total = out
        return total
