"""Llama of 1.35 B parameters in bf16, 16 sequences of 2048 tokens a card.

Run:     hexijax run experiments/llama_1b.py
         four cards: --cluster experiments/clusters/h100_x4.toml --set batch_size=64
Needs:   one H100 of 80 GB; real tokens are optional (--set data=tokens.npy)
Expect:  not measured yet; the aim is 500 model TFLOP/s on one card, update included
"""

from experiments.common import adamw, next_token, tokens
from hexijax.experiment import Experiment
from models.llama import Llama, LlamaConfig
from models.sizes import get_config


def experiment(
    *,
    size: str = "1.35B",
    data: str | None = None,
    length: int = 2048,
    steps: int = 50,
    peak_rate: float = 3e-4,
) -> Experiment:
    """A Llama by size.

    Args:
        size: a name in models/sizes.py: 1.35B, 2.7B, 7B, ...
        data: a .npy file of tokens, or text; none: random tokens.
        length: tokens of a sequence.
        steps: optimizer steps.
        peak_rate: largest learning rate, after a warm-up and before a cosine decay.
    """
    config = get_config("llama", size, max_length=length)
    assert isinstance(config, LlamaConfig)
    return Experiment(
        name=f"llama_{size.lower()}",
        loss=next_token(Llama, config),
        optimizer=adamw(peak_rate, steps),
        clip_norm=1.0,
        dtype="bfloat16",
        data=tokens(data, length, config.vocab_size),
        batch_size=16,
        tokens_per_sample=length,
        steps=steps,
        cluster="clusters/h100.toml",
    )
