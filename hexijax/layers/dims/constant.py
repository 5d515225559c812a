"""Values that do not depend on the followed dim: along which dims are they uniform?"""

import math
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
    if name in _KEEPS_ZERO and all(n == 1 or d in first for d, n in enumerate(shape)):
        return Same(dims, zero)
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
    if name in _REDUCING:
        gone = params["axes"] if "axes" in params else params["dimensions"]
        kept = [d for d in range(len(shape)) if d not in gone]
        return Same(frozenset(i for i, d in enumerate(kept) if d in first), zero)
    if name in _KEEPS_DIMS:
        return Same(first, zero)
    if name in _ACCUMULATING:
        return Same(first - {params["axis"]}, zero)
    if name == "expand_dims":
        new = set(params["dimensions"])
        kept = [d for d in range(rank) if d not in new]
        return Same(
            frozenset(new | {d for i, d in enumerate(kept) if i in first}), zero
        )
    if name == "reshape":
        return Same(_reshaped(shape, eqn.outvars[0].aval.shape, first), zero)
    if name == "concatenate":
        each = [s.uniform | ones(v.aval) for v, s in zip(eqn.invars, ins, strict=True)]
        return Same(dims.intersection(*each) - {params["dimension"]})
    if name == "sort":
        return Same(dims.intersection(*(s.uniform for s in ins)))
    if name == "pad":
        untouched = {
            d for d, add in enumerate(params["padding_config"]) if not any(add)
        }
        return Same(first & untouched)
    if name == "dot_general":
        return Same(_multiplied(eqn, ins))
    if name == "gather":
        return Same(_gathered(eqn, *ins))
    return Same(ones(eqn.outvars[0].aval))


_REDUCING = jaxprs.words(
    """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    squeeze"""
)

_KEEPS_DIMS = jaxprs.words("""dynamic_slice rev slice split""")
"""What is equal along a dim stays so."""

_ACCUMULATING = jaxprs.words("""cumlogsumexp cummax cummin cumprod cumsum""")


def _reshaped(
    old: Sequence[int], new: Sequence[int], uniform: frozenset[int]
) -> frozenset[int]:
    """Uniform dims that a reshape leaves whole."""

    def before(shape: Sequence[int], dim: int) -> int:
        return math.prod(shape[:dim])

    whole = {(before(old, d), old[d]) for d in uniform}
    return frozenset(
        i for i, n in enumerate(new) if n == 1 or (before(new, i), n) in whole
    )


def _gathered(eqn: Any, operand: Any, indices: Any) -> frozenset[int]:
    """Uniform rows: equal indices into equal operands."""
    numbers = eqn.params["dimension_numbers"]
    rank = eqn.outvars[0].aval.ndim
    rows = [d for d in range(rank) if d not in numbers.offset_dims]
    batching = zip(
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
        strict=True,
    )
    varies = {i for o, i in batching if o not in operand.uniform}
    return frozenset(
        row for i, row in enumerate(rows) if i in indices.uniform and i not in varies
    )


def _multiplied(eqn: Any, ins: Sequence[Any]) -> frozenset[int]:
    """Uniform dims of a product: batch dims of both, then each one's free dims."""
    contract, batch = eqn.params["dimension_numbers"]
    left, right = (
        s.uniform | ones(v.aval) for v, s in zip(eqn.invars, ins, strict=True)
    )
    equal = [a in left and b in right for a, b in zip(*batch, strict=True)]
    for i, uniform in enumerate((left, right)):
        own = {*contract[i], *batch[i]}
        free = (d for d in range(eqn.invars[i].aval.ndim) if d not in own)
        equal += [d in uniform for d in free]
    return frozenset(i for i, e in enumerate(equal) if e)


_KEEPS_ZERO = jaxprs.words(
    """broadcast_in_dim convert_element_type copy expand_dims neg reduce_sum reshape
    slice split squeeze transpose"""
)
