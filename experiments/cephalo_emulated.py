"""Llama of 1.35 B parameters on four equal cards made unlike: 1 : 0.54 : 0.28 : 1.

Run:     hexijax plan experiments/cephalo_emulated.py
         hexijax simulate experiments/cephalo_emulated.py
         small, on forced CPU devices that stand for the cards:
         hexijax run experiments/cephalo_emulated.py --emulate --set small=true
         all of it measured, beside its bound and PyTorch's FSDP2, cards slowed for the
         time of the run:
         python -m experiments.bench_emulated --out runs/emulated
         of one card, as three kinds in turn:
         python -m experiments.bench_emulated_card --out runs/emulated_card
Needs:   nothing to plan or to run it small; 4 (or one) Hopper cards with NVIDIA MPS to
         measure
Expect:  docs/performance.md
"""

import dataclasses

from experiments import llama_1b
from experiments.common import next_token, tokens
from hexijax.experiment import Experiment
from models.llama import Llama, LlamaConfig
from models.sizes import get_config


def experiment(*, small: bool = False, steps: int = 50) -> Experiment:
    """The Llama of `llama_1b`, 256 sequences of 2048 tokens, on the emulated cluster.

    Args:
        small: four layers of width 64 instead, 32 sequences of 32 tokens.
        steps: optimizer steps.
    """
    base = dataclasses.replace(
        llama_1b.experiment(steps=steps),
        name="llama_emulated",
        batch_size=256,
        cluster="clusters/emulated.toml",
    )
    if not small:
        return base
    config = get_config("llama", "1.35B", max_length=32)
    assert isinstance(config, LlamaConfig)
    config = dataclasses.replace(
        config,
        depth=4,
        width=64,
        num_heads=4,
        num_kv_heads=4,
        ff_width=128,
        vocab_size=256,
    )
    return dataclasses.replace(
        base,
        name="llama_emulated_small",
        loss=next_token(Llama, config),
        data=tokens(None, 32, config.vocab_size),
        batch_size=32,
        tokens_per_sample=32,
    )
