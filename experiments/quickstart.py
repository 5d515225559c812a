"""A byte-level Llama on the standard library's sources, over two kinds of device.

Run:     hexijax run experiments/quickstart.py
         --set data=PATH takes your own text files, or tokens in a .npy file
Needs:   eight forced CPU devices, which the cluster file declares as two kinds: no GPU,
         no download, 2 cores, 2 minutes
Expect:  a loss near 2.06 nats a byte after 160 steps (bigrams of this text give 2.43);
         measured with JAX 0.10.2 on 2 cores: 142 s of processor time in all

The plan beside this file is uneven in every way at once: a replica of three stages
without and one of two stages with tensor parallelism, other layers in each stage, and
other numbers of microbatches. `--plan single` gives the same losses on one device: the
first 20 within 4e-6.
"""

import dataclasses

import optax
from flax import nnx

from hexijax.data import open_data
from hexijax.experiment import Experiment
from hexijax.layers.loss import nnx_loss
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss


def experiment(
    *,
    data: str | None = None,
    tokenizer: str = "bytes",
    vocab_size: int = 256,
    width: int = 128,
    depth: int = 6,
    length: int = 64,
    steps: int = 160,
    peak_rate: float = 5e-3,
) -> Experiment:
    """The quickstart.

    Args:
        data: a text file, folder or glob, or a .npy file of tokens; none: the sources
            of Python's standard library.
        tokenizer: a tokenizer.json, or a name on Hugging Face's hub; bytes: none.
        vocab_size: tokens the model knows; 256 for bytes.
        width: features of the residual stream.
        depth: blocks.
        length: tokens of a sequence.
        steps: optimizer steps.
        peak_rate: largest learning rate, after a warm-up and before a cosine decay.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        width=width,
        depth=depth,
        num_heads=4,
        num_kv_heads=2,
        ff_width=2 * width,
        max_length=length,
    )

    def build(rngs: nnx.Rngs, dtype: str = "float32") -> Llama:
        return Llama(dataclasses.replace(config, dtype=dtype), rngs=rngs)

    warmup_steps = min(max(1, steps // 20), steps - 1)  # none, of a single step
    rate = optax.warmup_cosine_decay_schedule(
        0.0, peak_rate, warmup_steps=warmup_steps, decay_steps=steps
    )
    return Experiment(
        name="quickstart",
        loss=nnx_loss(
            build,
            lambda model, batch: next_token_loss(
                model(batch["inputs"]), batch["targets"]
            ),
        ),
        optimizer=optax.adamw(rate, weight_decay=0.01),
        clip_norm=1.0,
        data=open_data(data, length, vocab_size=vocab_size, tokenizer=tokenizer),
        batch_size=32,
        tokens_per_sample=length,
        steps=steps,
        cluster="clusters/quickstart.toml",
        plan="quickstart_plan.txt",
    )
