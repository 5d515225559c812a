"""docs/models.md runs: each block's loss is cut into the layers it promises."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

pytest.importorskip("transformers", reason="the extra `thirdparty` is not installed")

import transformers
from transformers.models.albert.modeling_flax_albert import FlaxAlbertLayer

from hexijax.layers.loss import linen_loss
from hexijax.layers.trace import trace_model
from models.losses import masked_token_loss, next_token_loss
from tests.foreign.families import BERT, DEPTH, GPT2, LLAMA
from tests.laws.law_models import LENGTH, VOCAB, WIDTH

PAGE = Path(__file__).parents[2] / "docs/models.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
ALBERT = transformers.AlbertConfig(
    vocab_size=VOCAB,
    embedding_size=WIDTH,
    hidden_size=WIDTH,
    intermediate_size=2 * WIDTH,
    num_hidden_layers=DEPTH,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)


def batches() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (2, LENGTH + 1)).astype(np.int32)
    mask = np.ones((2, LENGTH), np.int32)
    mask[1, -3:] = 0
    yield {
        "inputs": ids[:, :-1],
        "targets": ids[:, 1:],
        "attention_mask": mask,
        "masked": rng.random((2, LENGTH)) < 0.5,
    }


def executed(block: str, config: Any, **more: Any) -> dict[str, Any]:
    """What a block leaves, run where its names are known."""
    known = {
        **vars(transformers.models.gpt2.modeling_flax_gpt2),
        "FlaxBertForMaskedLM": transformers.FlaxBertForMaskedLM,
        "FlaxLlamaForCausalLM": transformers.FlaxLlamaForCausalLM,
        "FlaxAlbertLayer": FlaxAlbertLayer,
        "checkpoint_name": checkpoint_name,
        "flax": flax,
        "jnp": jnp,
        "linen_loss": linen_loss,
        "masked_token_loss": masked_token_loss,
        "next_token_loss": next_token_loss,
        "config": config,
        "batches": batches(),
        **more,
    }
    exec(block, known)
    return known


def layers(loss: Any, params: Any) -> tuple[str, ...]:
    return trace_model(loss, params, next(batches()), microbatch_size=2).layering.names


def test_the_three_models_are_cut_into_their_blocks():
    gpt2, bert, llama, _ = BLOCKS
    found = executed(gpt2, GPT2)["loss"]
    assert found.uses_keys
    names = layers(found, found.abstract_params())
    assert names[1:-1] == tuple(f"transformer/h/{i}" for i in range(DEPTH))
    half = found.variant(dtype="bfloat16")
    assert layers(half, half.abstract_params()) == names
    found = executed(bert, BERT)["loss"]
    names = layers(found, found.abstract_params())
    assert names[1:-1] == tuple(f"bert/encoder/layer/{i}" for i in range(DEPTH))
    made = executed(llama, LLAMA)
    params = jax.eval_shape(made["init"], jax.random.key(0))
    names = layers(made["loss"], params)
    assert names[1:-1] == tuple(f"model/layers/{i}" for i in range(DEPTH))


@pytest.mark.laws
def test_padding_has_no_part_in_bert_s_loss():
    loss = executed(BLOCKS[1], BERT)["loss"]
    params = loss.init(jax.random.key(0))
    batch = next(batches())
    keys = jax.random.split(jax.random.key(1), 2)
    total, weight = jax.jit(loss)(params, batch, keys)
    other = {**batch, "inputs": batch["inputs"].copy()}
    other["inputs"][1, -3:] = 0
    again, _ = jax.jit(loss)(params, other, keys)
    np.testing.assert_allclose(total, again, rtol=1e-6)
    assert weight[1] == (batch["masked"] * batch["attention_mask"])[1].sum()


def test_a_layer_used_over_and_over_is_cut_by_marks_from_outside():
    model = transformers.FlaxAlbertForMaskedLM(ALBERT, _do_init=False)
    params = jax.eval_shape(
        lambda key: model.init_weights(key, (1, 1)), jax.random.key(0)
    )
    loss = executed(BLOCKS[3], ALBERT, model=model)["loss"]
    names = layers(loss, params)
    assert names == ("embed", *(f"turn/{i}" for i in range(DEPTH)))
