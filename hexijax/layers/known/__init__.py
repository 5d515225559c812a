"""Chains of well-known models without a trace: no JAX, no module, any size.

    gpt(depth=24, width=2048, ...) | known("llama-2-13b", length=4096) -> Chain

For planning where nobody has the model at hand. Each figure is a sum of products of
sizes (``terms``), the same that a trace of this repository's modules comes to.
"""

from hexijax.layers.known.chains import bert, gpt, llama, vit
from hexijax.layers.known.sizes import NAMES, known

__all__ = ["NAMES", "bert", "gpt", "known", "llama", "vit"]
