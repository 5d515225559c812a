"""Losses as sums over one sample: (sum_B, weight_B), never a mean.

Whoever trains adds both over the global batch and divides once, so that a loss does not
depend on how the batch was cut, and a padding sample is one of weight zero.

Logits come in the dtype the model computes in. Everything after them is float32, but no
float32 array of their size is kept: the backward pass needs the logits as they are and
one normaliser a position.

B batch, T position, V vocabulary or classes.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp

SampleLoss: TypeAlias = tuple[jax.Array, jax.Array]
"""Per-sample sums of the loss and of its weights, both float32 of shape (B,)."""


def next_token_loss(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array | None = None
) -> SampleLoss:
    """Cross-entropy of ``targets_BT``, which the caller has shifted by one already."""
    if weights_BT is None:
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32)
    weights_BT = weights_BT.astype(jnp.float32)
    loss_BT = cross_entropy(logits_BTV, targets_BT)
    return (loss_BT * weights_BT).sum(axis=1), weights_BT.sum(axis=1)


def masked_token_loss(
    logits_BTV: jax.Array, targets_BT: jax.Array, masked_BT: jax.Array
) -> SampleLoss:
    """Cross-entropy at the positions where ``masked_BT`` is true."""
    return next_token_loss(logits_BTV, targets_BT, masked_BT)


def classification_loss(
    logits_BV: jax.Array, labels_B: jax.Array, weights_B: jax.Array | None = None
) -> SampleLoss:
    """Cross-entropy of one label a sample."""
    if weights_B is None:
        weights_B = jnp.ones(labels_B.shape, jnp.float32)
    weights_B = weights_B.astype(jnp.float32)
    return cross_entropy(logits_BV, labels_B) * weights_B, weights_B


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] over the last dim, in float32.

    Differentiating ``logsumexp`` itself would keep its float32 exponentials, twice the
    bytes of bfloat16 logits, and a gather would scatter into as many zeros.
    """
    return _forward(logits, targets)[0]


def _forward(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    logits32 = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits32, axis=-1)
    # A masked sum and no gather: it shares the pass of logsumexp and splits over V.
    target_logit = jnp.where(_is_target(logits, targets), logits32, 0.0).sum(axis=-1)
    return normaliser - target_logit, (logits, targets, normaliser)


def _backward(
    residuals: tuple[jax.Array, jax.Array, jax.Array], d_loss: jax.Array
) -> tuple[jax.Array, None]:
    logits, targets, normaliser = residuals
    softmax = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    d_logits = jnp.where(_is_target(logits, targets), softmax - 1.0, softmax)
    return (d_logits * d_loss[..., None]).astype(logits.dtype), None


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    return classes == targets[..., None]


cross_entropy.defvjp(_forward, _backward)
