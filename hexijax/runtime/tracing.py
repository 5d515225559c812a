"""The model as a stage computes it: in its dtype, with its kind's attention, at one
lane's microbatch.

Experiment, Chain, dtype, attention, samples -> traced_as -> TracedModel
"""

from typing import Any

import jax
import jax.numpy as jnp

from hexijax import compat
from hexijax.cluster import DeviceProfile
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain
from hexijax.layers.trace import TracedModel, trace_model


def attention_on(device: jax.Device, profile: DeviceProfile, dtype: str) -> str:
    """Which attention a stage on such devices asks the model for."""
    if device.platform == "cpu" and dtype == "float16":
        compat.float16_products_on_cpus()
    cudnn = (
        device.platform == "gpu"
        and profile.has_cudnn_attention
        and dtype in ("bfloat16", "float16")
    )
    return "cudnn" if cudnn else "xla"


def traced_as(
    experiment: Experiment,
    abstract: Any,
    chain: Chain,
    *,
    dtype: str,
    attention: str,
    size: int,
    padded: bool,
) -> TracedModel:
    """Traces the experiment's loss.

    Args:
      experiment: whose loss.
      abstract: its parameters' shapes.
      chain: the layers; what a batch looks like.
      dtype: compute dtype.
      attention: see ``attention_on``.
      size: samples of one lane's microbatch.
      padded: some of them may be padding.
    """
    loss = experiment.loss
    if hasattr(loss, "variant"):
        loss = loss.variant(dtype=dtype, attention=attention)
    batch = {
        name: jax.ShapeDtypeStruct((size, *array.shape), jnp.dtype(array.dtype))
        for name, array in chain.batch.items()
    }
    return trace_model(
        loss,
        abstract,
        batch,
        microbatch_size=size,
        padded=padded,
        per_microbatch=experiment.per_microbatch,
        frozen=chain.frozen,
    )
