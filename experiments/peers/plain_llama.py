"""Llama in plain JAX, as one would write it for one card: the peer of our runtime.

    batch -> jit(gradient of one microbatch, added up) -> jit(AdamW) -> bf16 weights

No hexijax: one ``jit`` a microbatch over the whole model, donated fp32 accumulators,
fp32 master weights cast once a step. ``stage_times`` times runs of layers alone,
forward and backward, for the ideal of a pipeline.
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


def burst_s(call: Callable[[], Any], repeats: int, burst: int) -> float:
    """Seconds of a call, of ``burst`` in a row; the median of ``repeats`` bursts."""
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(burst - 1):
            call()
        jax.block_until_ready(call())
        if i:  # the first warms up
            times.append((time.perf_counter() - start) / burst)
        time.sleep(0.2 * (time.perf_counter() - start))
    return statistics.median(times)


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
            value, grads = jax.value_and_grad(lambda p: loss(p, tokens) / weight)(
                params
            )
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
        """Matrices in the compute dtype; vectors in float32, as the model uses them."""
        return jax.tree.map(
            lambda p: p.astype(self.config.dtype) if p.ndim > 1 else p, master
        )

    def init(self) -> None:
        """Random weights on the device."""
        with jax.default_device(self.device):
            self.master = random_weights(self.shapes)
            self.moments = self.optimizer.init(self.master)
            self.weights = jax.jit(self.cast)(self.master)
            self.sums = jnp.zeros(()), jax.tree.map(jnp.zeros_like, self.master)

    def step(self, batch: np.ndarray) -> jax.Array:
        """One step on ``[samples, length + 1]`` tokens; the loss is not waited for."""
        weight = np.float32(batch.shape[0] * (batch.shape[1] - 1))
        size = self.microbatch_size
        for i in range(self.microbatches):
            tokens = jax.device_put(batch[i * size : (i + 1) * size], self.device)
            self.sums = self._add(self.weights, tokens, self.sums, weight)
        out = self._update(self.master, self.moments, self.sums)
        self.master, self.moments, self.weights, self.sums, total = out
        return total


def random_weights(shapes: Any) -> Any:
    """Matrices of small normal numbers, vectors of ones."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [
        0.02 * jax.random.normal(k, x.shape, x.dtype)
        if len(x.shape) > 1
        else jnp.ones(x.shape, x.dtype)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def stage_times(
    config: LlamaConfig,
    spans: list[tuple[int, int]],
    tokens: np.ndarray,
    device: jax.Device,
    repeats: int,
    burst: int,
) -> dict[str, list[tuple[float, float]]]:
    """(forward, backward) seconds of each run of blocks, in plain programs.

    The first run holds the embedding, the last the head and the loss. ``apart``: a
    forward that returns what its backward needs (matrix products kept, the rest
    recomputed) and a backward that takes it, as any pipeline must; the last run is one
    program. ``together``: a forward that keeps nothing, and forward and backward in one
    program less that forward; no pipeline can run so, it bounds them all.

    Each is timed in bursts of ``burst`` calls, with a pause between as long as a
    pipeline's bubble, on random numbers: a card draws less power on equal ones, keeps
    its clocks up and is a seventh faster than in any training step.
    """
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    graph, shapes, rest = nnx.split(abstract, nnx.Param, ...)
    with jax.default_device(device):
        weights = jax.tree.map(
            lambda w: w.astype(config.dtype) if w.ndim > 1 else w,
            random_weights(shapes),
        )
        size = (*tokens[:, 1:].shape, config.width)
        x = jax.random.normal(jax.random.key(1), size, config.dtype)
        tokens_BT = jnp.asarray(tokens)
    times: dict[str, list[tuple[float, float]]] = {"apart": [], "together": []}
    for span in spans:
        run = _run_of_blocks(config, graph, rest, tokens_BT, span)
        used = _used(run, weights, x)
        whole, tree = jax.tree.flatten(weights)
        mine = [w for w, u in zip(whole, used, strict=True) if u]

        on = _given_only(run, used, tree)
        last = span[1] == config.depth
        forward_s, both_s = _together(on, mine, x, device, repeats, burst)
        times["together"].append((forward_s, both_s - forward_s))
        if last:
            times["apart"].append((forward_s, both_s - forward_s))
        else:
            times["apart"].append(_apart(on, mine, x, device, repeats, burst))
    return times


def _given_only(
    run: Callable[..., Any], used: list[bool], tree: Any
) -> Callable[..., Any]:
    """``run`` on the weights it uses, as a list."""

    def on(mine: Any, x: jax.Array, keep: bool) -> Any:
        given = iter(mine)
        leaves = [next(given) if u else None for u in used]
        return run(jax.tree.unflatten(tree, leaves), x, keep)

    return on


def _run_of_blocks(
    config: LlamaConfig,
    graph: Any,
    rest: Any,
    tokens_BT: jax.Array,
    span: tuple[int, int],
) -> Callable[..., Any]:
    def run(weights: Any, x: jax.Array, keep: bool) -> Any:
        model = nnx.merge(graph, weights, rest)
        inputs = tokens_BT[:, :-1]
        rope = rope_table(inputs.shape[1], config.head_dim, config.rope_theta)
        if span[0] == 0:
            x = embed_tokens(model.embed.embedding[...], inputs, config.dtype)
        for block in list(model.blocks)[slice(*span)]:
            if keep:
                block_graph, state = nnx.split(block)
                x = jax.checkpoint(
                    lambda s, x, g=block_graph: nnx.merge(g, s)(x, *rope),
                    policy=_saved,
                    prevent_cse=False,
                )(state, x)
            else:
                x = block(x, *rope)
        if span[1] == config.depth:
            logits = model.head(model.norm(x))
            return next_token_loss(logits, tokens_BT[:, 1:])[0].sum()
        return x

    return run


def _saved(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == "dot_general" or "attention_fwd" in primitive.name


def _used(run: Callable[..., Any], weights: Any, x: jax.Array) -> list[bool]:
    """Which weights a run of blocks reads."""
    num_leaves = len(jax.tree.leaves(weights))
    closed = jax.make_jaxpr(lambda w, x: run(w, x, False))(weights, x)
    read = {v for eqn in closed.jaxpr.eqns for v in eqn.invars if not hasattr(v, "val")}
    return [v in read for v in closed.jaxpr.invars[:num_leaves]]


def _accumulators(mine: Any, device: jax.Device) -> list[jax.Array]:
    with jax.default_device(device):
        return [jnp.zeros(w.shape, jnp.float32) for w in mine]


def _add(acc: Any, grads: Any) -> list[jax.Array]:
    return [a + g.astype(jnp.float32) for a, g in zip(acc, grads, strict=True)]


def _together(
    on: Callable[..., Any],
    mine: Any,
    x: jax.Array,
    device: jax.Device,
    repeats: int,
    burst: int,
) -> tuple[float, float]:
    forward = jax.jit(lambda w, x: on(w, x, False))

    def both(w: Any, x: jax.Array, acc: Any) -> Any:
        out, vjp = jax.vjp(lambda w, x: on(w, x, False), w, x)
        d_w, d_x = vjp(jnp.ones_like(out))
        return _add(acc, d_w), d_x

    both = jax.jit(both, donate_argnums=2)
    acc = _accumulators(mine, device)

    def once() -> jax.Array:
        nonlocal acc
        acc, d_x = both(mine, x, acc)
        return d_x

    forward_s = burst_s(lambda: forward(mine, x), repeats, burst)
    return forward_s, burst_s(once, repeats, burst)


def _apart(
    on: Callable[..., Any],
    mine: Any,
    x: jax.Array,
    device: jax.Device,
    repeats: int,
    burst: int,
) -> tuple[float, float]:
    trace: dict[str, Any] = {}

    def forward(w: Any, x: jax.Array) -> Any:
        out, vjp = jax.vjp(lambda w, x: on(w, x, True), w, x)
        leaves, trace["tree"] = jax.tree.flatten(vjp)
        given = [*w, x]
        at = [
            next((i for i, g in enumerate(given) if leaf is g), None) for leaf in leaves
        ]
        trace["at"] = at
        return out, [leaf for leaf, i in zip(leaves, at, strict=True) if i is None]

    def backward(w: Any, x: jax.Array, kept: Any, d_out: jax.Array, acc: Any) -> Any:
        given, rest = [*w, x], iter(kept)
        leaves = [next(rest) if i is None else given[i] for i in trace["at"]]
        d_w, d_x = jax.tree.unflatten(trace["tree"], leaves)(d_out)
        return _add(acc, d_w), d_x

    forward, backward = jax.jit(forward), jax.jit(backward, donate_argnums=4)
    acc = _accumulators(mine, device)

    def pair() -> jax.Array:
        nonlocal acc
        out, kept = forward(mine, x)
        acc, d_x = backward(mine, x, kept, out, acc)
        return d_x

    forward_s = burst_s(lambda: forward(mine, x)[0], repeats, burst)
    return forward_s, burst_s(pair, repeats, burst) - forward_s
