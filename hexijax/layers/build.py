"""Makes segments: the pieces of a run of layers, wired to parameters and batch."""

from collections.abc import Sequence
from typing import Any

from hexijax.layers import jaxprs, pieces
from hexijax.layers.chain import Group, Remat, whole_leaf
from hexijax.layers.code import Code
from hexijax.layers.handing import hand_over
from hexijax.layers.layering import Layering
from hexijax.layers.segment import KEYS, MASK, Segment

SMALL_CONST_BYTES = 64 * 1024
"""Closed-over arrays up to this size are compiled into the program."""


def large_consts(layering: Layering) -> dict[Any, str]:
    """The closed-over arrays that segments are given as arguments, with their names."""
    consts = layering.equations.consts
    large = [v for v in consts if jaxprs.num_bytes(v.aval) > SMALL_CONST_BYTES]
    return {v: f"@const/{i}" for i, v in enumerate(large)}


def make_segment(
    layering: Layering,
    start: int,
    stop: int,
    remat: Sequence[Remat],
    groups: Sequence[Group],
    num_samples: int,
) -> Segment:
    """Layers [start, stop) as functions, with one remat policy a layer.

    ``groups`` hold the segment's leaves in the order it is handed them.
    """
    assert 0 <= start < stop <= len(layering), (start, stop, len(layering))
    assert len(remat) == stop - start, "one policy a layer"
    equations = layering.equations
    is_last = stop == len(layering)
    variables = {
        leaf.id: v
        for group, vs in layering.groups_of(start, stop)
        for v, leaf in zip(vs, group.leaves, strict=True)
    }
    leaves = tuple(leaf for group in groups for leaf in group.leaves)
    ids = [whole_leaf(leaf).id for leaf in leaves]
    assert {*ids} == variables.keys(), (leaves, variables)
    leaf_of = {variables[name]: name for name in ids}
    reads = layering.reads(start, stop)
    h, dtypes = hand_over(pieces.param_prelude(equations, reads), leaf_of)
    k = pieces.batch_prelude(equations, reads)
    read = {*h.invars, *k.invars, *reads}
    act, outputs = layering.borders[start], layering.borders[stop]
    batch = [name for v, name in equations.batch.items() if v in read]
    batch += [KEYS] if equations.keys in read else []
    batch += [MASK] if is_last and any(v.aval.ndim for v in outputs) else []
    names = large_consts(layering)
    large = {v: name for v, name in names.items() if v in read}
    border_out = () if is_last else outputs
    return Segment(
        layers=(start, stop),
        groups=tuple(group.name for group in groups),
        leaves=leaves,
        param_dtypes=tuple(dtypes[variables[name]] for name in ids),
        batch=tuple(batch),
        consts=tuple(large.values()),
        border_in=tuple(jaxprs.struct(v.aval) for v in act),
        border_out=tuple(jaxprs.struct(v.aval) for v in border_out),
        is_last=is_last,
        scalar_names=tuple(equations.outputs) if is_last else (),
        num_samples=num_samples,
        hands_back=start > layering.first_trained,
        code=Code(
            like=equations.closed,
            h=h,
            k=k,
            bodies=layering.bodies[start:stop],
            remat=tuple(remat),
            act=act,
            outputs=outputs,
            keys=equations.keys,
            params=leaf_of,
            batch=equations.batch,
            large=large,
            small={v: x for v, x in equations.consts.items() if v not in names},
        ),
    )
