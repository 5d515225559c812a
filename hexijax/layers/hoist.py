"""Moves casts to a narrower dtype out of remat equations.

    remat(w: f32) { v: bf16 = convert w; ... } -> v = convert w; remat(v: bf16) { ... }

Models that rematerialise their blocks cast each weight in there. Outside, the cast is
part of the parameter prelude, and the runtime hands the weight in the dtype that is
computed with: half the bytes to gather and to reduce. What is kept gets no larger.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax

from hexijax import compat
from hexijax.layers import jaxprs

REMAT = jaxprs.words("checkpoint remat remat2")
"""Names of the remat primitive."""


def hoist_casts(eqn: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A remat equation and its inputs, with such casts made before it."""
    closed = compat.as_closed(eqn.params["jaxpr"])
    inner = closed.jaxpr
    readers: dict[Any, list[Any]] = {}
    for inside in inner.eqns:
        for v in jaxprs.variables(inside.invars):
            readers.setdefault(v, []).append(inside)
    returned = set(jaxprs.variables(inner.outvars))
    stand_in = {
        v: readers[v][0].outvars[0]
        for v in inner.invars
        if v not in returned and _narrowed_alike(v, readers.get(v, []))
    }
    if not stand_in:
        return eqn, list(inputs)
    outer = [
        lax.convert_element_type(x, stand_in[v].aval.dtype) if v in stand_in else x
        for v, x in zip(inner.invars, inputs, strict=True)
    ]
    made = set(stand_in.values())
    eqns = [
        eqn.replace(invars=[_swapped(v, stand_in) for v in eqn.invars])
        for eqn in inner.eqns
        if made.isdisjoint(eqn.outvars)
    ]
    invars = [stand_in.get(v, v) for v in inner.invars]
    body = compat.closed_jaxpr(closed, invars=invars, outvars=inner.outvars, eqns=eqns)
    jaxpr = body if eqn.params["jaxpr"] is closed else body.jaxpr
    return eqn.replace(params={**eqn.params, "jaxpr": jaxpr}), outer


def _swapped(atom: Any, stand_in: dict[Any, Any]) -> Any:
    return atom if jaxprs.is_literal(atom) else stand_in.get(atom, atom)


def _narrowed_alike(v: Any, readers: Sequence[Any]) -> bool:
    """Whether all readers of a float convert it to one narrower float dtype."""
    casts = [eqn for eqn in readers if eqn.primitive.name == "convert_element_type"]
    dtypes = {eqn.outvars[0].aval.dtype for eqn in casts}
    if len(casts) < len(readers) or len(dtypes) != 1 or not jaxprs.is_float(v.aval):
        return False
    (dtype,) = dtypes
    narrower = dtype.itemsize < v.aval.dtype.itemsize
    return narrower and jaxprs.is_float(casts[0].outvars[0].aval)
