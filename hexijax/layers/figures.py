"""What a layer costs, per sample: operations, bytes, and what each remat policy keeps.

Backward costs and kept bytes are read off the differentiated program. Equal layers (the
same equations on the same shapes, whatever numbers stand in them) are measured once.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hexijax.layers import count, jaxprs, pieces
from hexijax.layers.chain import Product, Remat
from hexijax.layers.equations import Equations
from hexijax.layers.fusion import Fusion
from hexijax.layers.products import find_products
from hexijax.layers.segment import KEYS

if TYPE_CHECKING:
    from hexijax.layers.trace import TracedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The costs of a layer, as `chain.Layer` has them."""

    signature: str
    batch: tuple[str, ...]
    forward_flops: float
    backward_flops: float
    products: tuple[Product, ...]
    forward_bytes: float
    backward_bytes: float
    border_bytes: int
    activation_bytes: Mapping[Remat, int]
    border_whole_bytes: int
    joined_bytes: int
    handed_bytes: int
    reads_input: tuple[Remat, ...]
    backward: bool


def layer_figures(model: "TracedModel", layer: int) -> Figures:
    """The costs of one layer."""
    layering = model.layering
    equations, body = layering.equations, layering.bodies[layer]
    reads = layering.reads(layer, layer + 1)
    h = pieces.param_prelude(equations, reads)
    k = pieces.batch_prelude(equations, reads)
    run = jaxprs.Piece.of(equations.closed, body.reads, body.makes, body.eqns)
    texts = [jaxprs.canonical_text(p.closed, literals=False) for p in (h, k, run)]
    border_in, border_out = layering.borders[layer], layering.borders[layer + 1]
    edges = [str(v.aval) for v in (*border_in, *border_out)]
    plain = model.segment(layer, layer + 1, (Remat.NONE,))
    if not (plain.hands_back or layer == 0) or len(plain.trained) < len(plain.leaves):
        edges.append(str((plain.trained_weights, plain.hands_back)))
    signature = jaxprs.digest(*texts, *edges)
    if signature not in model.measured:
        model.measured[signature] = _measure(model, layer, signature, h, k, run)
    batch = tuple(name for v, name in equations.batch.items() if v in k.invars)
    if equations.keys in body.reads:
        batch += (KEYS,)
    return dataclasses.replace(model.measured[signature], batch=batch)


def _measure(
    model: "TracedModel",
    layer: int,
    signature: str,
    h: jaxprs.Piece,
    k: jaxprs.Piece,
    run: jaxprs.Piece,
) -> Figures:
    samples = model.microbatch_size
    plain = model.segment(layer, layer + 1, (Remat.NONE,))
    prelude = count.program_cost(h.closed.jaxpr)
    parts = [count.program_cost(p.closed.jaxpr) for p in (k, run)]
    forward = functools.reduce(operator.add, parts, prelude)
    backward = count.program_cost(plain.backward_program.jaxpr)
    trace, handed = plain.differentiated, plain.code.h.outvars
    made = trace.forward.jaxpr
    fused = Fusion.of(trace.forward, range(trace.num_out, len(made.outvars)))
    # What becomes of a weight's gradient is no sample's work.
    back = Fusion.of(trace.backward, range(plain.num_gradients))
    kept = fused.stored(made.outvars[trace.num_out + i] for i in trace.kept)
    joined = sum(n for v, n in kept.items() if v not in made.invars)
    is_last = layer + 1 == len(model.layering)
    border = () if is_last else model.layering.borders[layer + 1]
    whole = [v for v in border if not jaxprs.is_float(v.aval)]
    entry = sum(jaxprs.num_bytes(v.aval) for v in model.layering.borders[layer])
    runs_back = plain.has_backward
    if not runs_back:  # what a forward has alive, as far as its layer tells
        sizes = sorted(jaxprs.num_bytes(v.aval) for e in made.eqns for v in e.outvars)
        joined = sum(sizes[-2:])

    segments = {remat: model.segment(layer, layer + 1, (remat,)) for remat in Remat}
    reading = tuple(r for r, segment in segments.items() if segment.reads_act)

    def kept_bytes(remat: Remat) -> int:
        kept = sum(map(jaxprs.num_bytes, segments[remat].residuals))
        return _each(kept + (entry if remat in reading else 0), samples)

    def handed_bytes(remat: Remat) -> int:
        if layer and not plain.hands_back:
            return 0  # such a backward is never split
        split = model.segment(layer, layer + 1, (remat,)).split
        return sum(_each(jaxprs.num_bytes(x), samples) for x in split.handed)

    return Figures(
        signature=signature,
        batch=(),
        forward_flops=forward.flops / samples,
        # The prelude is linear as a rule: its transpose costs what it costs.
        backward_flops=(backward.flops + runs_back * prelude.flops) / samples,
        products=find_products(
            made,
            dict(zip(made.invars[: len(handed)], plain.trained_weights, strict=True)),
            samples,
            backward=runs_back,
        ),
        forward_bytes=fused.moved_bytes / samples,
        backward_bytes=back.moved_bytes / samples,
        border_bytes=_each(sum(jaxprs.num_bytes(v.aval) for v in border), samples),
        activation_bytes={remat: kept_bytes(remat) for remat in Remat},
        handed_bytes=max(map(handed_bytes, Remat)),
        border_whole_bytes=_each(sum(jaxprs.num_bytes(v.aval) for v in whole), samples),
        joined_bytes=_each(joined + entry, samples),
        reads_input=reading,
        backward=runs_back,
    )


def _each(num_bytes: int, samples: int) -> int:
    """Bytes of one sample, rounded up: a microbatch must not be promised too little."""
    return -(-num_bytes // samples)


def compute_dtype(equations: Equations) -> str:
    """Dtype of most operations in matrix products."""
    cost = functools.reduce(
        operator.add, map(count.equation_cost, equations.eqns), count.NOTHING
    )
    by_dtype = cost.matmul_flops
    return max(by_dtype, key=lambda dtype: by_dtype[dtype], default="float32")
