"""Llama of 5.1 B parameters on one card: 82 GB of parameters, gradients and state.

Run:     XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=110 hexijax run experiments/offload_llama.py
         a card that is mostly taken: --cluster experiments/clusters/h100_capped.toml
Needs:   one H100 of 80 GB and 128 GB of host memory
Expect:  docs/performance.md
"""

from experiments.common import adamw, next_token, tokens
from hexijax.experiment import Experiment
from models.llama import Llama, LlamaConfig
from models.sizes import get_config


def experiment(
    *,
    size: str = "5.1B",
    depth: int = 0,
    data: str | None = None,
    length: int = 2048,
    steps: int = 50,
    peak_rate: float = 3e-4,
    clip: bool = False,
) -> Experiment:
    """A Llama by size.

    Args:
        size: a name in models/sizes.py: 1.35B, 5.1B, 7B, ...
        depth: blocks; 0: the size's own.
        data: a .npy file of tokens, or text; none: random tokens.
        length: tokens of a sequence.
        steps: optimizer steps.
        peak_rate: largest learning rate, after a warm-up and before a cosine decay.
        clip: clip gradients by their norm; no update can then begin before the last
            backward is over.
    """
    config = get_config("llama", size, **({"depth": depth} if depth else {}))
    assert isinstance(config, LlamaConfig)
    return Experiment(
        name=f"offload_llama_{size.lower()}",
        loss=next_token(Llama, config),
        optimizer=adamw(peak_rate, steps),
        clip_norm=1.0 if clip else None,
        dtype="bfloat16",
        data=tokens(data, length, config.vocab_size),
        batch_size=8,
        tokens_per_sample=length,
        steps=steps,
        cluster="clusters/h100.toml",
    )
