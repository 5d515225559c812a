"""Llama on two equal cards of which one was made smaller: 1 : 0.54, 80 and 40 GiB.

Run:     hexijax plan experiments/emulated_two.py
         hexijax run experiments/emulated_two.py --emulate --set small=true
         measured, beside the best even plans and PyTorch's FSDP2:
         python -m experiments.bench_emulated --setting 1-0.54
             --parts check alone ours symmetric fsdp --out runs/emulated_two
Needs:   nothing to plan or to run it small; two Hopper cards with NVIDIA MPS, CuPy and
         PyTorch to measure, about eight minutes
Expect:  docs/performance.md for 1.35 B; the larger model is not measured yet
"""

from experiments.emulated_four import mixed
from hexijax.experiment import Experiment


def experiment(
    *, size: str = "1.35B", small: bool = False, steps: int = 50
) -> Experiment:
    """64 sequences of 2048 tokens a card; half of them of the larger model.

    Args:
        size: 1.35B or 2.7B.
        small: four layers of width 64 instead, 16 sequences of 32 tokens.
        steps: optimizer steps.
    """
    return mixed("1-0.54", size=size, small=small, steps=steps)
