"""Which batch arrays pick rows of a parameter, and how many rows there are.

    flat program -> picked_rows -> {"inputs": Picked("embed/embedding", 50257)}

JAX does not refuse a token that an embedding has no row for: it takes the last row, or
NaN. With this, batches are looked at before they are trained on. Found by following
integers from the batch through what only moves them to the first `gather`.
"""

import dataclasses
from typing import Any

from hexijax.layers import jaxprs
from hexijax.layers.equations import Equations

_MOVES = {
    "broadcast_in_dim",
    "clamp",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
}
"""Primitives that keep each number, or bring it nearer to the rows there are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Picked:
    """A parameter that a batch array picks rows of."""

    leaf: str
    """Its name."""

    rows: int
    """Its rows."""


def picked_rows(equations: Equations) -> dict[str, Picked]:
    """By batch array; of several parameters, the one with the fewest rows."""
    origin: dict[Any, str] = {
        v: name for v, name in equations.batch.items() if v.aval.dtype.kind in "iu"
    }
    leaves: dict[Any, str] = {v: leaf.name for v, leaf in equations.params.items()}
    shifted: dict[Any, str] = {}  # negative numbers count from the end: x + rows
    found: dict[str, Picked] = {}
    for eqn in equations.eqns:
        name, ins = eqn.primitive.name, jaxprs.variables(eqn.invars)
        froms = {origin[v] for v in ins if v in origin}
        (out, *others) = eqn.outvars
        if name == "gather":
            table, indices = eqn.invars[:2]
            rows = _rows(eqn)
            if rows and not jaxprs.is_literal(indices):
                batch = origin.get(indices)
                leaf = None if jaxprs.is_literal(table) else leaves.get(table)
                if batch and leaf:
                    here = Picked(leaf, rows)
                    found[batch] = min(found.get(batch, here), here, key=_fewest)
            continue
        if name == "add" and len(ins) == 1 and ins[0] in origin:
            shifted[out] = origin[ins[0]]
        if others or len(froms) != 1:
            if name in _MOVES and len(ins) == 1 and ins[0] in leaves:
                leaves[out] = leaves[ins[0]]
            continue
        (batch,) = froms
        wrapped = name == "select_n" and all(
            batch in (origin.get(v), shifted.get(v)) for v in ins[1:]
        )
        if name in _MOVES or wrapped:
            origin[out] = batch
    return found


def _rows(eqn: Any) -> int | None:
    """Rows of the table, where single rows of its dim 0 are taken."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    whole = (1, *shape[1:]) == tuple(eqn.params["slice_sizes"])
    return shape[0] if whole and tuple(numbers.start_index_map) == (0,) else None


def _fewest(picked: Picked) -> int:
    return picked.rows
