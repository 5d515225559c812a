"""Losses against plain float64 NumPy; sums per sample; what the backward pass keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import (
    classification_loss,
    cross_entropy,
    masked_token_loss,
    next_token_loss,
)

RNG = np.random.default_rng(0)
LOGITS_BTV = jnp.asarray(10 * RNG.standard_normal((3, 5, 11)), jnp.float32)
TARGETS_BT = jnp.asarray(RNG.integers(0, 11, (3, 5)), jnp.int32)
WEIGHTS_BT = jnp.asarray(RNG.integers(0, 3, (3, 5)), jnp.float32)


def naive(logits: jax.Array, targets: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy and its gradient by the textbook, in float64."""
    exponentials = np.exp(np.asarray(logits, np.float64))
    softmax = exponentials / exponentials.sum(axis=-1, keepdims=True)
    onehot = np.eye(logits.shape[-1])[np.asarray(targets)]
    return -np.log((softmax * onehot).sum(axis=-1)), softmax - onehot


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_and_its_gradient_match_float64(dtype: jnp.dtype):
    logits_BTV = LOGITS_BTV.astype(dtype)
    loss_BT, gradient_BTV = naive(logits_BTV, TARGETS_BT)
    got, pullback = jax.vjp(lambda x: cross_entropy(x, TARGETS_BT), logits_BTV)
    (got_gradient,) = pullback(WEIGHTS_BT)
    assert got.dtype == jnp.float32
    assert got_gradient.dtype == dtype
    np.testing.assert_allclose(got, loss_BT, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        got_gradient.astype(jnp.float32),
        gradient_BTV * WEIGHTS_BT[..., None],
        atol=1e-5 if dtype == jnp.float32 else 1e-2,
    )


def test_large_logits_do_not_overflow():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    np.testing.assert_allclose(cross_entropy(logits, jnp.array([0])), [0.0])
    np.testing.assert_allclose(cross_entropy(logits, jnp.array([2])), [1e4])


def test_sums_and_weights_are_per_sample():
    loss_BT, _ = naive(LOGITS_BTV, TARGETS_BT)
    sum_B, weight_B = next_token_loss(LOGITS_BTV, TARGETS_BT)
    np.testing.assert_allclose(sum_B, loss_BT.sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(weight_B, [5.0, 5.0, 5.0])

    sum_B, weight_B = next_token_loss(LOGITS_BTV, TARGETS_BT, WEIGHTS_BT)
    np.testing.assert_allclose(sum_B, (loss_BT * WEIGHTS_BT).sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(weight_B, WEIGHTS_BT.sum(axis=1))


def test_masked_tokens_are_the_only_ones_counted():
    masked_BT = WEIGHTS_BT > 0
    sum_B, weight_B = masked_token_loss(LOGITS_BTV, TARGETS_BT, masked_BT)
    loss_BT, _ = naive(LOGITS_BTV, TARGETS_BT)
    np.testing.assert_allclose(sum_B, (loss_BT * masked_BT).sum(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(weight_B, masked_BT.sum(axis=1))
    assert sum_B.dtype == weight_B.dtype == jnp.float32


def test_labels_count_once_a_sample_and_padding_not_at_all():
    logits_BV, labels_B = LOGITS_BTV[:, 0], TARGETS_BT[:, 0]
    loss_B, _ = naive(logits_BV, labels_B)
    sum_B, weight_B = classification_loss(logits_BV, labels_B)
    np.testing.assert_allclose(sum_B, loss_B, rtol=1e-5)
    np.testing.assert_array_equal(weight_B, [1.0, 1.0, 1.0])

    sum_B, weight_B = classification_loss(logits_BV, labels_B, jnp.array([1, 1, 0]))
    np.testing.assert_allclose(sum_B, loss_B * [1, 1, 0], rtol=1e-5)
    np.testing.assert_array_equal(weight_B, [1.0, 1.0, 0.0])


def test_no_float32_array_of_the_logits_size_is_kept():
    logits_BTV = LOGITS_BTV.astype(jnp.bfloat16)
    _, pullback = jax.vjp(lambda x: next_token_loss(x, TARGETS_BT), logits_BTV)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size == logits_BTV.size]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]
