"""transformers' Flax GPT-2, its code unchanged, over two kinds of device.

Run:     hexijax run experiments/hf_gpt2.py
         --set data=PATH takes your own text files, or tokens in a .npy file
Needs:   the extra `thirdparty`; eight forced CPU devices, which the cluster file
         declares as two kinds: no GPU, no download, 2 cores, 2 minutes
Expect:  a loss near 2.8 nats a byte after 160 steps (bigrams of this text give 2.43);
         measured with JAX 0.10.2 on 2 busy cores: 80 s of processor time in all

The model is made from a configuration: byte tokens, random weights. To go on from
pretrained ones, give `init` the `params` of `FlaxGPT2LMHeadModel.from_pretrained`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import adamw
from hexijax.data import open_data
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.layers.loss import linen_loss
from models.losses import next_token_loss


def experiment(
    *,
    data: str | None = None,
    width: int = 64,
    depth: int = 6,
    length: int = 64,
    dropout: float = 0.1,
    steps: int = 160,
    peak_rate: float = 4e-3,
) -> Experiment:
    """A small GPT-2 of transformers.

    Args:
        data: a text file, folder or glob, or a .npy file of tokens; none: the sources
            of Python's standard library.
        width: features of the residual stream.
        depth: blocks.
        length: tokens of a sequence.
        dropout: rate of all of GPT-2's dropouts.
        steps: optimizer steps.
        peak_rate: largest learning rate, after a warm-up and before a cosine decay.
    """
    try:
        from transformers import FlaxGPT2LMHeadModel, GPT2Config
    except ImportError as error:
        raise UserError(
            "experiments/hf_gpt2.py trains transformers' Flax GPT-2, and there is no "
            f"transformers with it here ({error}). Install it: pip install -e "
            "'.[thirdparty]'."
        ) from error
    config = GPT2Config(
        vocab_size=256,
        n_positions=length,
        n_embd=width,
        n_layer=depth,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )

    def build(dtype: str = "float32") -> Any:
        model = FlaxGPT2LMHeadModel(config, dtype=jnp.dtype(dtype), _do_init=False)
        return model.module

    def score(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        ids = batch["inputs"]
        places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        out = model(ids, jnp.ones_like(ids), places, deterministic=False)
        return next_token_loss(out.logits, batch["targets"])

    shape = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return Experiment(
        name="hf_gpt2",
        loss=linen_loss(build, score, example={"inputs": shape, "targets": shape}),
        optimizer=adamw(peak_rate, steps),
        clip_norm=1.0,
        data=open_data(data, length, vocab_size=256),
        batch_size=24,
        tokens_per_sample=length,
        steps=steps,
        cluster="clusters/quickstart.toml",
    )
