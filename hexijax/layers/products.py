"""The matrix products of a program, equal shapes together.

    layer's equations -> find_products -> (Product, ...)

A product with batch dims is a sample's own (attention's scores); one without has a
right operand that all samples share, a weight, and samples are its rows. Convolutions
count as the products they are lowered to.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hexijax import compat
from hexijax.layers import jaxprs
from hexijax.layers.layer import BACKWARD_PRODUCTS, Product

ATTENTION_FORWARD, ATTENTION_BACKWARD = "attention_fwd", "attention_bwd"
"""In the names of cuDNN's primitives."""


def find_products(
    jaxpr: Any, weights: Mapping[Any, bool], samples: int, *, backward: bool = True
) -> tuple[Product, ...]:
    """Products of a forward over ``samples`` samples, per sample.

    ``weights`` are inputs that depend on parameters alone, each with whether any of
    these trains; ``backward``: whether one runs.
    """
    counted: dict[tuple[Any, ...], float] = {}
    for found, count in _walk(jaxpr, dict(weights)):
        rows, inner, columns, shared, fused, back = found
        if shared:
            rows = -(-rows // samples)
        else:
            count /= samples
        key = (rows, inner, columns, shared, fused, back if backward else 0)
        counted[key] = counted.get(key, 0.0) + count
    return tuple(
        Product(
            rows=rows,
            inner=inner,
            columns=columns,
            count=count,
            shared=shared,
            fused=fused,
            back=back,
        )
        for (rows, inner, columns, shared, fused, back), count in counted.items()
    )


def _walk(
    jaxpr: Any, weights: dict[Any, bool]
) -> Iterator[tuple[tuple[Any, ...], float]]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        reads = jaxprs.variables(eqn.invars)
        if reads and all(v in weights for v in reads):
            trained = any(weights[v] for v in reads)
            weights.update(dict.fromkeys(eqn.outvars, trained))
        if name == "dot_general":
            yield _dot(eqn, weights), 1.0 * _batch(eqn)
        elif name == "conv_general_dilated":
            yield _conv(eqn, weights), 1.0
        elif ATTENTION_FORWARD in name:
            yield _attention(eqn)
        for inner, times in inner_programs(eqn):
            inside = _passed(inner.jaxpr.invars, eqn.invars, weights)
            for key, count in _walk(inner.jaxpr, inside):
                yield key, count * times


def _passed(inner: Any, outer: Any, weights: Mapping[Any, bool]) -> dict[Any, bool]:
    """The inputs of an inner program that are weights, where they are its caller's."""
    if len(inner) != len(outer):
        return {}
    pairs = [(v, x) for v, x in zip(inner, outer, strict=True) if _is_in(x, weights)]
    return {v: weights[x] for v, x in pairs}


def _is_in(atom: Any, weights: Mapping[Any, bool]) -> bool:
    return not jaxprs.is_literal(atom) and atom in weights


def _back(operand: Any, weights: Mapping[Any, bool]) -> int:
    """Gradients that a backward makes: one beside a weight that does not train."""
    return 2 if not _is_in(operand, weights) or weights[operand] else 1


def inner_programs(eqn: Any) -> list[tuple[Any, int]]:
    """Programs that an equation holds, and how often each runs.

    Of branches the last stands for all; a loop of unknown length runs once.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        scan = compat.Scan.of(eqn)
        return [(scan.body, scan.length)]
    if name == "cond":
        return [(compat.as_closed(params["branches"][-1]), 1)]
    if name == "while":
        return [(compat.as_closed(params["body_jaxpr"]), 1)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            return [(compat.as_closed(params[key]), 1)]
    return []


def _batch(eqn: Any) -> int:
    _, (batch, _) = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[d] for d in batch)


def _dot(eqn: Any, weights: Mapping[Any, bool]) -> tuple[Any, ...]:
    left, right = eqn.invars
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    inner = math.prod(left.aval.shape[d] for d in contract)
    rows = left.aval.size // max(1, inner * _batch(eqn))
    columns = right.aval.size // max(1, inner * _batch(eqn))
    weight = right
    if _is_in(left, weights):
        rows, columns, weight = columns, rows, left
    return rows, inner, columns, not batch, False, _back(weight, weights)


def _conv(eqn: Any, weights: Mapping[Any, bool]) -> tuple[Any, ...]:
    kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
    columns = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    back = _back(eqn.invars[1], weights)
    return out.size // columns, kernel.size // columns, columns, True, False, back


def _attention(eqn: Any) -> tuple[tuple[Any, ...], float]:
    """Scores and mixing; a causal kernel skips what is masked, half of both."""
    queries, keys, heads, inner, num = attention_shape(eqn)
    half = 0.5 if "CAUSAL" in str(eqn.params["mask_type"]) else 1.0
    return (queries, inner, keys, False, True, 2), 2.0 * heads * num * half


def attention_shape(eqn: Any) -> tuple[int, int, int, int, int]:
    """Queries, keys, heads, features and batch of cuDNN's attention."""
    query, key = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    if eqn.params["layout"] == 0:  # batch, time, heads, features
        return query[1], key[1], query[2], query[3], query[0]
    return query[2], key[2], query[1], query[3], query[0]


def attention_flops(eqn: Any) -> float:
    """Operations of one of cuDNN's attention kernels."""
    (queries, inner, keys, *_), count = _attention(eqn)
    backward = ATTENTION_BACKWARD in eqn.primitive.name
    times = BACKWARD_PRODUCTS if backward else 1.0
    return 2.0 * queries * inner * keys * count * times
