"""Llama on four equal cards of which some were made smaller: 80, 40 and 24 GiB.

Run:     hexijax plan experiments/emulated_four.py --set mix=1-0.54-0.54-0.28
         hexijax run experiments/emulated_four.py --emulate --set small=true
         measured, beside the best even plans and PyTorch's FSDP2:
         python -m experiments.bench_emulated --setting 1-1-0.54-0.28
             --parts check alone ours symmetric fsdp --out runs/emulated_four
         the larger model: --setting 1-1-0.54-0.28-2.7B
         on cards without a solver: plans are made elsewhere from what was measured,
         --measured FILE --plans FOLDER --plan-only, then run there with --plans FOLDER
Needs:   nothing to plan or to run it small; four Hopper cards with NVIDIA MPS, CuPy and
         PyTorch to measure, about ten minutes a mix
Expect:  not measured yet
"""

import dataclasses
from typing import Literal

from experiments import cephalo_emulated, llama_1b
from experiments.emulated.cards import MIXES
from hexijax.errors import UserError
from hexijax.experiment import Experiment


def experiment(
    *,
    mix: Literal["1-1-0.54-0.28", "1-0.54-0.54-0.28", "1-1-1-0.28"] = "1-1-0.54-0.28",
    size: str = "1.35B",
    small: bool = False,
    steps: int = 50,
) -> Experiment:
    """64 sequences of 2048 tokens a card; half of them of the larger model.

    Args:
        mix: speeds of the cards beside a whole one.
        size: 1.35B or 2.7B.
        small: four layers of width 64 instead, 32 sequences of 32 tokens.
        steps: optimizer steps.
    """
    return mixed(mix, size=size, small=small, steps=steps)


def mixed(mix: str, *, size: str, small: bool, steps: int) -> Experiment:
    """The same for any of ``MIXES``."""
    sequences = {"1.35B": 64, "2.7B": 32}
    if size not in sequences:
        raise UserError(
            f"size is {size!r}; the cards' microbatches were chosen for "
            f"{' and '.join(sequences)}. Name one of these."
        )
    cards = len(MIXES[mix])
    like = (
        cephalo_emulated.experiment(small=True, steps=steps)
        if small
        else llama_1b.experiment(size=size, steps=steps)
    )
    return dataclasses.replace(
        like,
        name=f"emulated_{size.lower()}_{mix}",
        batch_size=(8 if small else sequences[size]) * cards,
        clip_norm=None,
        cluster=f"clusters/emulated/{mix}.toml",
    )
