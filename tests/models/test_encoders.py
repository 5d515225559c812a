"""BERT and ViT: what a padding mask hides, token types, patches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import build, run

from models.bert import Bert, BertConfig
from models.vit import ViT, ViTConfig, to_patches

SHAPE = {"width": 16, "depth": 2, "num_heads": 4, "ff_width": 24}
BERT_CONFIG = BertConfig(vocab_size=32, max_length=8, **SHAPE)
RNG = np.random.default_rng(0)
TOKENS_BT = jnp.asarray(RNG.integers(0, 32, (3, 5)))


def test_bert_sees_both_ways():
    model = build(Bert, BERT_CONFIG)
    before, after = run(model, TOKENS_BT), run(model, TOKENS_BT.at[:, 4].add(1))
    assert not np.allclose(before[:, 0], after[:, 0], atol=1e-4)


def test_masked_tokens_change_nothing_else():
    model = build(Bert, BERT_CONFIG)
    mask_BT = jnp.arange(5)[None, :] < jnp.array([[3], [5], [5]])
    before = run(model, TOKENS_BT, mask_BT)
    after = run(model, TOKENS_BT.at[0, 3:].set(TOKENS_BT[1, :2]), mask_BT)
    np.testing.assert_allclose(after[0, :3], before[0, :3], atol=1e-5)
    np.testing.assert_allclose(
        before[0, :3], run(model, TOKENS_BT[:, :3])[0], atol=1e-5
    )
    np.testing.assert_allclose(before[1:], run(model, TOKENS_BT)[1:], atol=1e-5)


def test_a_wholly_masked_sample_stays_finite():
    model = build(Bert, BERT_CONFIG)
    assert jnp.isfinite(run(model, TOKENS_BT, jnp.zeros((3, 5), bool))).all()


def test_token_types_are_told_apart_and_zero_if_not_given():
    model = build(Bert, BERT_CONFIG)
    zeros_BT = jnp.zeros_like(TOKENS_BT)
    without = run(model, TOKENS_BT)
    np.testing.assert_array_equal(without, run(model, TOKENS_BT, None, zeros_BT))
    assert not np.allclose(
        without, run(model, TOKENS_BT, None, zeros_BT + 1), atol=1e-3
    )


def test_token_types_without_a_table_are_refused():
    config = dataclasses.replace(BERT_CONFIG, num_token_types=None)
    model = build(Bert, config)
    with pytest.raises(ValueError, match="built with num_token_types=None"):
        run(model, TOKENS_BT, None, jnp.zeros_like(TOKENS_BT))


def test_patches_come_in_reading_order():
    image_HWC = jnp.arange(4 * 6).reshape(4, 6, 1)
    patches = to_patches(image_HWC[None], 2)[0]
    np.testing.assert_array_equal(patches[0], [0, 1, 6, 7])
    np.testing.assert_array_equal(patches[1], [2, 3, 8, 9])
    np.testing.assert_array_equal(patches[3], [12, 13, 18, 19])


def test_a_patch_embedding_is_a_strided_convolution():
    images_BHWC = jnp.asarray(RNG.normal(size=(2, 8, 8, 3)), jnp.float32)
    kernel = jnp.asarray(RNG.normal(size=(4, 4, 3, 5)), jnp.float32)
    strided = jax.lax.conv_general_dilated(
        images_BHWC, kernel, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    dense = to_patches(images_BHWC, 4) @ kernel.reshape(-1, 5)
    np.testing.assert_allclose(dense, strided.reshape(2, 4, 5), rtol=1e-4, atol=1e-4)


def test_images_and_patches_of_the_wrong_size_are_refused():
    with pytest.raises(
        ValueError, match="image_size 224 is no multiple of patch_size 15"
    ):
        ViTConfig(patch_size=15, **SHAPE)
    model = build(ViT, ViTConfig(image_size=8, patch_size=4, **SHAPE))
    with pytest.raises(
        ValueError, match=r"Images are \(8, 4, 3\) .* takes \(8, 8, 3\)"
    ):
        model(jnp.zeros((1, 8, 4, 3)))
