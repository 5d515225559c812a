"""Values that do not depend on the followed dim: along which dims are they uniform?"""

from collections.abc import Sequence
from typing import Any

from hexijax.layers import jaxprs
from hexijax.layers.dims.states import Same, is_elementwise, ones


def constant(eqn: Any, ins: Sequence[Any]) -> Same:
    name, params = eqn.primitive.name, eqn.params
    rank = len(getattr(eqn.outvars[0].aval, "shape", ()))
    dims = frozenset(range(rank))
    if not ins:
        return Same(dims - {params["dimension"]} if name == "iota" else frozenset())
    first, shape = ins[0].uniform, eqn.invars[0].aval.shape
    zero = ins[0].is_zero and name in _KEEPS_ZERO
    if is_elementwise(eqn):
        each = [
            dims if v.aval.ndim == 0 else s.uniform | ones(v.aval)
            for v, s in zip(eqn.invars, ins, strict=True)
        ]
        return Same(dims.intersection(*each), zero)
    if name == "broadcast_in_dim":
        varies = {
            to
            for d, to in enumerate(params["broadcast_dimensions"])
            if d not in first and shape[d] > 1
        }
        return Same(dims - varies, zero)
    if name == "transpose":
        old = params["permutation"]
        return Same(frozenset(i for i, d in enumerate(old) if d in first), zero)
    if name in ("reduce_sum", "reduce_max", "reduce_min", "squeeze"):
        gone = params["axes"] if "axes" in params else params["dimensions"]
        kept = [d for d in range(len(shape)) if d not in gone]
        return Same(frozenset(i for i, d in enumerate(kept) if d in first), zero)
    if name == "gather":
        window = params["dimension_numbers"].offset_dims
        rows = [d for d in range(rank) if d not in window]
        indices = ins[1].uniform
        return Same(frozenset(row for i, row in enumerate(rows) if i in indices))
    if name in _KEEPS_ZERO and all(n == 1 or d in first for d, n in enumerate(shape)):
        return Same(dims, zero)
    return Same(ones(eqn.outvars[0].aval))


_KEEPS_ZERO = jaxprs.words(
    """broadcast_in_dim convert_element_type copy expand_dims neg reduce_sum reshape
    slice squeeze transpose"""
)
