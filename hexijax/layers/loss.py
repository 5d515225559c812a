"""Losses: the one form hexijax trains, and helpers that make it of Flax modules.

    loss(params, batch, keys) -> (sum, weight) or (sum, weight, metrics)

``batch`` is a dict of arrays whose dim 0 is the sample (B of them), ``keys`` one typed
key a sample. ``sum`` and ``weight`` are numbers by sample, (B,), or already summed, ().
The loss people see is all sums over all weights. A metric is such a sum, divided by the
same weight, or a pair (sum, weight) of its own.

    loss = nnx_loss(lambda dtype: GPT(config, dtype=dtype, rngs=nnx.Rngs(0)), by_sample)

``by_sample(model, batch)`` gets the callable module and returns the form above. Where a
model draws random numbers (dropout), it is called on one sample at a time under `vmap`,
with that sample's key: the draw then does not depend on the microbatch around it.
"""

from hexijax.layers.linen_model import LinenLoss, linen_loss
from hexijax.layers.model_loss import LossFunction, ModelError, ModelLoss, per_sample
from hexijax.layers.nnx_model import NnxLoss, nnx_loss

__all__ = [
    "LinenLoss",
    "LossFunction",
    "ModelError",
    "ModelLoss",
    "NnxLoss",
    "linen_loss",
    "nnx_loss",
    "per_sample",
]
