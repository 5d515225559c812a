"""GPT-2.7B on four small cards of three generations, after Cephalo (arXiv 2411.01075).

Run:     hexijax plan experiments/cephalo_gpt.py
         hexijax compare experiments/cephalo_gpt.py
         small, on forced CPU devices that stand for the cards:
         hexijax run experiments/cephalo_gpt.py --emulate --set small=true --set steps=4
Needs:   nothing to plan or to run it small; 2x L4, one A6000 and one P40 to train it
Expect:  a plan in which each card computes as fast as it is and stores as it has room;
         it has not run on these cards
"""

import dataclasses

from experiments.common import adamw, next_token, tokens
from hexijax.experiment import Experiment
from models.gpt import GPT, GPTConfig
from models.sizes import get_config


def experiment(
    *,
    size: str = "2.7B",
    small: bool = False,
    data: str | None = None,
    length: int = 512,
    steps: int = 50,
) -> Experiment:
    """A GPT by size.

    Args:
        size: a name in models/sizes.py: 125M, 1.3B, 2.7B, ...
        small: four layers of width 64 instead, 16 sequences of 32 tokens.
        data: a .npy file of tokens, or text; none: random tokens.
        length: tokens of a sequence.
        steps: optimizer steps.
    """
    length = 32 if small else length
    config = get_config("gpt", size, max_length=length)
    assert isinstance(config, GPTConfig)
    if small:
        config = dataclasses.replace(
            config, depth=4, width=64, num_heads=4, ff_width=256, vocab_size=256
        )
    return Experiment(
        name="gpt_small" if small else f"gpt_{size.lower()}",
        loss=next_token(GPT, config),
        optimizer=adamw(1.6e-4, steps),
        clip_norm=1.0,
        dtype="float16",
        data=tokens(data, length, config.vocab_size),
        batch_size=16 if small else 256,
        tokens_per_sample=length,
        steps=steps,
        cluster="clusters/cephalo.toml",
    )
