"""The chain of a loss under every attention kernel a kind may run it with.

    loss, params, batch -> trace_chain -> Chain, its layers with and without fusion

Planning runs where no card is, so the model is traced with plain attention, and again
with cuDNN's if it lets itself be asked for that (`ModelLoss`) and cuDNN takes its
shapes. A layer that differs carries both figures; costs choose by kind.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from hexijax import compat
from hexijax.layers.chain import Chain, Layer
from hexijax.layers.layer import FUSED_DTYPES
from hexijax.layers.loss import ModelLoss
from hexijax.layers.trace import TracedModel, trace_model


def trace_chain(
    loss: Any,
    params: Any,
    batch: Mapping[str, Any],
    *,
    dtype: str = "float32",
    name: str = "model",
    per_microbatch: bool = False,
    tokens_per_sample: int = 1,
    frozen: Collection[str] = (),
) -> Chain:
    """Traces ``loss`` on shapes, at a microbatch of one sample.

    Args:
        loss: see `trace_model`; a `ModelLoss` is asked for ``dtype``.
        params: a tree of arrays or of their shapes.
        batch: arrays or shapes by name; dim 0 is the sample.
        dtype: compute dtype.
        name: of the model, for people.
        per_microbatch: allow a loss that is no sum over samples.
        tokens_per_sample: for people.
        frozen: names of parameters that do not train.

    Raises:
        TraceError: see `trace_model`.
    """

    def trace(loss: Any, checked: bool) -> TracedModel:
        return trace_model(
            loss,
            params,
            batch,
            microbatch_size=1,
            name=name,
            frozen=frozen,
            per_microbatch=per_microbatch,
            checked=checked,
        )

    if not isinstance(loss, ModelLoss):
        chain = trace(loss, checked=True).chain
    else:
        plain = trace(loss.variant(dtype=dtype, attention="xla"), checked=True)
        chain = plain.chain
        if dtype in FUSED_DTYPES:
            fused = loss.variant(dtype=dtype, attention="cudnn")
            with compat.cudnn_traceable():
                try:
                    other = trace(fused, checked=False)
                    other.measured.update(plain.measured)  # most layers are alike
                    traced = other.chain
                except (NotImplementedError, ValueError) as error:  # JAX raises both
                    note = f"cuDNN's attention refuses the model: {error}"
                    chain = dataclasses.replace(chain, notes=(*chain.notes, note))
                else:
                    chain = with_fused(chain, traced)
    return dataclasses.replace(chain, tokens_per_sample=tokens_per_sample)


def with_fused(chain: Chain, fused: Chain) -> Chain:
    """``chain``, each layer with its figures in ``fused`` where they differ."""

    def facts(layer: Layer) -> tuple[object, ...]:
        return layer.name, layer.groups, layer.border_bytes

    assert [*map(facts, chain.layers)] == [*map(facts, fused.layers)], "one model"
    layers = tuple(
        plain
        if plain.signature == other.signature
        else dataclasses.replace(plain, fused=other)
        for plain, other in zip(chain.layers, fused.layers, strict=True)
    )
    return dataclasses.replace(chain, layers=layers)
