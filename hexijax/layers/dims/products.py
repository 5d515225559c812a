"""Values along the followed dim, where two operands meet on dims of their own."""

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


def dot(eqn: Any, ins: Sequence[State], parts: int) -> State:
    (contract, batch) = eqn.params["dimension_numbers"]
    free = [
        [
            d
            for d in range(eqn.invars[i].aval.ndim)
            if d not in contract[i] and d not in batch[i]
        ]
        for i in (0, 1)
    ]
    starts = (len(batch[0]), len(batch[0]) + len(free[0]))
    followed = [i for i in (0, 1) if isinstance(ins[i], Along)]
    i = followed[0]
    dim, other = dim_of(ins[i]), ins[1 - i]
    for dims, out in ((contract, None), (batch, 0)):
        if dim in dims[i]:
            at = list(dims[i]).index(dim)
            partner = dims[1 - i][at]
            if not meets(eqn, 1 - i, other, partner):
                if isinstance(other, Same):
                    return by_place(eqn)
                return Mixed(eqn, "compares samples")
            return Summed() if out is None else Along(at)
    if len(followed) == 2:
        return Mixed(eqn, "multiplies every sample with every other")
    return Along(starts[i] + free[i].index(dim))


def conv(eqn: Any, ins: Sequence[State], parts: int) -> State:
    numbers = eqn.params["dimension_numbers"]
    images, kernel = ins
    plain = isinstance(kernel, Same) and eqn.params["batch_group_count"] == 1
    if plain and isinstance(images, Along) and images.dim == numbers.lhs_spec[0]:
        return Along(int(numbers.out_spec[0]))
    return Unknown(eqn)


def gather(eqn: Any, ins: Sequence[State], parts: int) -> State:
    numbers = eqn.params["dimension_numbers"]
    operand, indices = ins
    rank = eqn.outvars[0].aval.ndim
    rows = [d for d in range(rank) if d not in numbers.offset_dims]
    pairs = dict(
        zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
    )
    if isinstance(indices, Along):
        if indices.dim >= len(rows):
            return Unknown(eqn)
        partner = next((o for o, i in pairs.items() if i == indices.dim), None)
        if isinstance(operand, Same) and partner is None:
            return Along(rows[indices.dim])
        if partner is not None and meets(eqn, 0, operand, partner):
            return Along(rows[indices.dim])
        return Unknown(eqn)
    dim = dim_of(operand)
    if dim in pairs:
        fits = meets(eqn, 1, indices, pairs[dim])
        return Along(rows[pairs[dim]]) if fits else by_place(eqn)
    gone = {*numbers.collapsed_slice_dims, *pairs}
    whole = eqn.params["slice_sizes"][dim] == eqn.invars[0].aval.shape[dim]
    if dim in gone or not whole:
        return Mixed(eqn, "picks samples of the microbatch")
    kept = [d for d in range(eqn.invars[0].aval.ndim) if d not in gone]
    return Along(int(numbers.offset_dims[kept.index(dim)]))


def scatter(eqn: Any, ins: Sequence[State], parts: int) -> State:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = ins
    rank = eqn.invars[2].aval.ndim
    rows = [d for d in range(rank) if d not in numbers.update_window_dims]
    pairs = zip(
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
        strict=True,
    )
    for o, i in pairs:
        places = ((0, operand, o), (1, indices, i), (2, updates, rows[i]))
        if any(isinstance(s, Along) and s.dim == d for _, s, d in places):
            fits = all(meets(eqn, at, s, d) for at, s, d in places)
            return Along(int(o)) if fits else by_place(eqn)
    return Unknown(eqn)
