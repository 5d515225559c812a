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

from models.layers import embed_tokens
from models.llama import Llama, LlamaConfig, rope_table
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


def stage_times(
    config: LlamaConfig,
    spans: list[tuple[int, int]],
    tokens: np.ndarray,
    device: jax.Device,
    repeats: int,
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each run of blocks, each as one plain program.

    The first run holds the embedding, the last the head and the loss. Backward is the
    time of forward, backward and the addition to fp32 accumulators, less the forward's.
    """
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    graph, shapes, rest = nnx.split(abstract, nnx.Param, ...)
    with jax.default_device(device):
        weights = jax.tree.map(
            lambda s: jnp.full(s.shape, 0.01, config.dtype if s.ndim > 1 else s.dtype),
            shapes,
        )
        x = jnp.ones((*tokens[:, 1:].shape, config.width), config.dtype)
        tokens_BT = jnp.asarray(tokens)
    times = []
    for start, stop in spans:
        last = stop == config.depth

        def run(weights: Any, x: jax.Array, start=start, stop=stop, last=last) -> Any:
            model = nnx.merge(graph, weights, rest)
            inputs = tokens_BT[:, :-1]
            rope = rope_table(inputs.shape[1], config.head_dim, config.rope_theta)
            if start == 0:
                x = embed_tokens(model.embed.embedding[...], inputs, config.dtype)
            for block in list(model.blocks)[start:stop]:
                x = block(x, *rope)
            if last:
                logits = model.head(model.norm(x))
                return next_token_loss(logits, tokens_BT[:, 1:])[0].sum()
            return x

        def both(weights: Any, x: jax.Array, acc: Any, run=run) -> Any:
            out, vjp = jax.vjp(run, weights, x)
            d_weights, d_x = vjp(jnp.ones_like(out))
            add = jax.tree.map(lambda a, d: a + d.astype(jnp.float32), acc, d_weights)
            return add, d_x

        forward = jax.jit(run)
        used = _only_used(run, weights, x)
        with jax.default_device(device):
            acc = jax.tree.map(
                lambda w, u: jnp.zeros(w.shape if u else (), jnp.float32), weights, used
            )
        # Accumulators of other stages' weights are scalars: no traffic.
        narrow = jax.jit(
            lambda w, x, acc, both=both, used=used: _narrow(both, w, x, acc, used),
            donate_argnums=2,
        )
        jax.block_until_ready(forward(weights, x))
        acc, _ = narrow(weights, x, acc)
        f, _, _ = median_s(lambda: jax.block_until_ready(forward(weights, x)), repeats)
        total = []
        for _ in range(repeats):
            began = time.perf_counter()
            acc, d_x = narrow(weights, x, acc)
            jax.block_until_ready(d_x)
            total.append(time.perf_counter() - began)
        times.append((f, statistics.median(total) - f))
    return times


def _only_used(run: Callable[..., Any], weights: Any, x: jax.Array) -> Any:
    """Which weights a run of blocks reads."""
    leaves, tree = jax.tree.flatten(weights)
    closed = jax.make_jaxpr(run)(weights, x)
    read = {v for eqn in closed.jaxpr.eqns for v in eqn.invars if not hasattr(v, "val")}
    used = [v in read for v in closed.jaxpr.invars[: len(leaves)]]
    return jax.tree.unflatten(tree, used)


def _narrow(both: Callable[..., Any], w: Any, x: jax.Array, acc: Any, used: Any) -> Any:
    full = jax.tree.map(
        lambda a, weight, u: a if u else jnp.zeros(weight.shape, jnp.float32), acc, w, used
    )
    out, d_x = both(w, x, full)
    kept = jax.tree.map(lambda a, o, u: o if u else a, acc, out, used)
    return kept, d_x
