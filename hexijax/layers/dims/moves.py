"""Values along the followed dim, where one operand or equal places meet.

A rule takes the equation, the states of its inputs (at least one runs along the dim)
and the size of the dim.
"""

import math
from collections.abc import Sequence
from typing import Any

from hexijax.layers.dims.states import (
    Along,
    Mixed,
    Same,
    State,
    Summed,
    Unknown,
    by_place,
    dim_of,
    meets,
)


def elementwise(eqn: Any, ins: Sequence[State], parts: int) -> State | list[State]:
    if eqn.primitive.name == "optimization_barrier":
        return list(ins)
    dims = {s.dim for s in ins if isinstance(s, Along)}
    if len(dims) > 1:
        return Mixed(eqn, "combines every sample with every other")
    (dim,) = dims
    if all(meets(eqn, i, s, dim) for i, s in enumerate(ins)):
        return Along(dim)
    return by_place(eqn)


def broadcast(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return Along(int(eqn.params["broadcast_dimensions"][dim_of(ins[0])]))


def reshape(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if eqn.params.get("dimensions") is not None:
        return Unknown(eqn)
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dim = reshaped_dim(old, new, dim_of(ins[0]), parts)
    return Unknown(eqn) if dim is None else Along(dim)


def reshaped_dim(
    old: Sequence[int], new: Sequence[int], dim: int, parts: int
) -> int | None:
    """Where the outermost ``parts`` of a dim lie after a reshape; None: torn apart."""
    before = math.prod(old[:dim])
    for i, n in enumerate(new):
        if math.prod(new[:i]) == before and n % parts == 0 and n >= parts:
            return i
    return None


def transpose(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return Along(list(eqn.params["permutation"]).index(dim_of(ins[0])))


def squeeze(eqn: Any, ins: Sequence[State], parts: int) -> State:
    dim, gone = dim_of(ins[0]), eqn.params["dimensions"]
    return Unknown(eqn) if dim in gone else Along(dim - sum(1 for d in gone if d < dim))


def expand(eqn: Any, ins: Sequence[State], parts: int) -> State:
    dim = dim_of(ins[0])
    for d in sorted(eqn.params["dimensions"]):
        dim += 1 if d <= dim else 0
    return Along(dim)


def reduce(eqn: Any, ins: Sequence[State], parts: int) -> State:
    axes = eqn.params["axes"]
    dim = dim_of(ins[0])
    if dim not in axes:
        return Along(dim - sum(1 for d in axes if d < dim))
    if eqn.primitive.name == "reduce_sum":
        return Summed()
    return Mixed(eqn, "reduces over samples")


def window(eqn: Any, ins: Sequence[State], parts: int) -> State:
    """Pooling: what a window of one place takes stays where it is."""
    if not isinstance(ins[0], Along) or any(isinstance(s, Along) for s in ins[1:]):
        return Unknown(eqn)
    dim = ins[0].dim
    names = ("window_dimensions", "window_strides", "window_dilation", "base_dilation")
    alone = all(eqn.params[name][dim] == 1 for name in names)
    if alone and not any(eqn.params["padding"][dim]):
        return ins[0]
    return Mixed(eqn, "reduces over samples")


def along_own(param: str, how: str) -> Any:
    """Rule of an operation along one dim that must not be the followed one."""

    def rule(eqn: Any, ins: Sequence[State], parts: int) -> State:
        dims = {s.dim for s in ins if isinstance(s, Along)}
        if len(dims) > 1:
            return Mixed(eqn, "combines every sample with every other")
        (dim,) = dims
        own = eqn.params[param]
        if own == dim:
            return Mixed(eqn, how)
        fits = all(meets(eqn, i, s, dim) for i, s in enumerate(ins))
        return Along(dim) if fits else by_place(eqn)

    return rule


def rev(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if dim_of(ins[0]) in eqn.params["dimensions"]:
        return Mixed(eqn, "reorders samples")
    return ins[0]


def slice(eqn: Any, ins: Sequence[State], parts: int) -> State:
    dim = dim_of(ins[0])
    whole = eqn.outvars[0].aval.shape[dim] == eqn.invars[0].aval.shape[dim]
    return ins[0] if whole else Mixed(eqn, "takes some samples of the microbatch")


def pad(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if not isinstance(ins[0], Along) or not isinstance(ins[1], Same):
        return Unknown(eqn)
    low_high_inner = eqn.params["padding_config"][dim_of(ins[0])]
    return ins[0] if not any(low_high_inner) else Unknown(eqn)


def dynamic_slice(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if not all(isinstance(s, Same) for s in ins[1:]):
        return Unknown(eqn)
    return slice(eqn, ins, parts)


def dynamic_update_slice(eqn: Any, ins: Sequence[State], parts: int) -> State:
    operand, update, *starts = ins
    if not all(isinstance(s, Same) for s in starts):
        return Unknown(eqn)
    dim = next(s.dim for s in (operand, update) if isinstance(s, Along))
    whole = eqn.invars[0].aval.shape[dim] == eqn.invars[1].aval.shape[dim]
    fits = meets(eqn, 0, operand, dim) and meets(eqn, 1, update, dim)
    return Along(dim) if whole and fits else Unknown(eqn)


def split(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return Unknown(eqn) if eqn.params["axis"] == dim_of(ins[0]) else ins[0]


def top_k(eqn: Any, ins: Sequence[State], parts: int) -> State:
    last = eqn.invars[0].aval.ndim - 1
    return Mixed(eqn, "ranks samples") if dim_of(ins[0]) == last else ins[0]


def keys(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return ins[0]
