"""GPT-2.7B on four small cards of three generations, after Cephalo (arXiv 2411.01075).

Run:     hexijax plan experiments/cephalo_gpt.py
Needs:   nothing to plan; 2x L4, one A6000 and one P40 to run
Expect:  a plan; it has not run on these cards
"""

from experiments.common import adamw, next_token, tokens
from hexijax.experiment import Experiment
from models.gpt import GPT, GPTConfig
from models.sizes import get_config


def experiment(
    *,
    size: str = "2.7B",
    data: str | None = None,
    length: int = 512,
    steps: int = 50,
) -> Experiment:
    """A GPT by size.

    Args:
        size: a name in models/sizes.py: 125M, 1.3B, 2.7B, ...
        data: a .npy file of tokens, or text; none: random tokens.
        length: tokens of a sequence.
        steps: optimizer steps.
    """
    config = get_config("gpt", size, max_length=length)
    assert isinstance(config, GPTConfig)
    return Experiment(
        name=f"gpt_{size.lower()}",
        loss=next_token(GPT, config),
        optimizer=adamw(1.6e-4, steps),
        clip_norm=1.0,
        dtype="float16",
        data=tokens(data, length, config.vocab_size),
        batch_size=256,
        tokens_per_sample=length,
        steps=steps,
        cluster="clusters/cephalo.toml",
    )
