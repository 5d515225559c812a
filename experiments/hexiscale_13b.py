"""Llama-13B over three hosts of three kinds, after HexiScale (arXiv 2409.01143).

Run:     hexijax plan experiments/hexiscale_13b.py
Needs:   nothing to plan; 3x A800, 3x 4090 and 2x 3090 to run
Expect:  a plan; it has not run on these cards
"""

import dataclasses

from experiments import llama_1b
from hexijax.experiment import Experiment


def experiment(*, size: str = "13B", length: int = 4096) -> Experiment:
    """The Llama of `llama_1b`, larger, on a mixed cluster.

    Args:
        size: a name in models/sizes.py.
        length: tokens of a sequence.
    """
    base = llama_1b.experiment(size=size, length=length)
    return dataclasses.replace(
        base, name="hexiscale_13b", batch_size=64, cluster="clusters/hexiscale.toml"
    )
