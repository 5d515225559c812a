"""GPTs of 2 to 22 B parameters on one card, as AutoHete has them.

Run:     XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=110 hexijax run experiments/offload_gpt.py
         hexijax plan experiments/offload_gpt.py --set size=12B  (plan only: its state
         is more than a host of 128 GB holds)
Needs:   one H100 of 80 GB and 128 GB of host memory
Expect:  docs/offload.md
"""

import dataclasses

from experiments.common import adamw, next_token, tokens
from hexijax.experiment import Experiment
from models.gpt import GPT, GPTConfig
from models.sizes import get_config

SHAPES = {
    "2B": (24, 2560, 20),
    "4B": (21, 4096, 32),
    "6B": (30, 4096, 32),
    "12B": (40, 5120, 40),
    "22B": (48, 6144, 48),
}
"""Blocks, width and heads. 21 blocks are AutoHete's of 4 B (arXiv 2503.01890); the
widths, and the other sizes' blocks, are what gives the parameters they are called
after."""


def config_of(size: str, length: int) -> GPTConfig:
    """The model of a size."""
    depth, width, heads = SHAPES[size]
    config = get_config("gpt", "2B")
    assert isinstance(config, GPTConfig)
    return dataclasses.replace(
        config,
        depth=depth,
        width=width,
        num_heads=heads,
        ff_width=4 * width,
        max_length=length,
    )


def experiment(
    *,
    size: str = "4B",
    data: str | None = None,
    length: int = 1024,
    steps: int = 50,
    peak_rate: float = 1e-4,
) -> Experiment:
    """A GPT by size.

    Args:
        size: 2B, 4B, 6B, 12B or 22B.
        data: a .npy file of tokens, or text; none: random tokens.
        length: tokens of a sequence.
        steps: optimizer steps.
        peak_rate: largest learning rate, after a warm-up and before a cosine decay.
    """
    config = config_of(size, length)
    return Experiment(
        name=f"offload_gpt_{size.lower()}",
        loss=next_token(GPT, config),
        optimizer=adamw(peak_rate, steps),
        dtype="bfloat16",
        data=tokens(data, length, config.vocab_size),
        batch_size=8,
        tokens_per_sample=length,
        steps=steps,
        cluster="clusters/h100.toml",
    )
