"""Makes segments: the pieces of a run of layers, wired to parameters and batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hexijax.layers import jaxprs, pieces
from hexijax.layers.chain import Remat
from hexijax.layers.layering import Layering
from hexijax.layers.segment import KEYS, MASK, Code, Segment

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
    num_samples: int,
) -> Segment:
    """Layers [start, stop) as functions, with one remat policy a layer."""
    assert 0 <= start < stop <= len(layering), (start, stop, len(layering))
    assert len(remat) == stop - start, "one policy a layer"
    equations = layering.equations
    is_last = stop == len(layering)
    groups = layering.groups_of(start, stop)
    leaf_of = {
        v: leaf.id for g, vs in groups for v, leaf in zip(vs, g.leaves, strict=True)
    }
    reads = layering.reads(start, stop)
    h, handed = _handed(
        pieces.param_prelude(equations, reads), leaf_of, equations.closed
    )
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
        groups=tuple(group.name for group, _ in groups),
        leaves=tuple(leaf for group, _ in groups for leaf in group.leaves),
        param_dtypes=tuple(np.dtype(v.aval.dtype).name for v in handed),
        batch=tuple(batch),
        consts=tuple(large.values()),
        border_in=tuple(jaxprs.struct(v.aval) for v in act),
        border_out=tuple(jaxprs.struct(v.aval) for v in border_out),
        is_last=is_last,
        scalar_names=tuple(equations.outputs) if is_last else (),
        num_samples=num_samples,
        code=Code(
            like=equations.closed,
            h=h,
            k=k,
            bodies=layering.bodies[start:stop],
            remat=tuple(remat),
            act=act,
            outputs=outputs,
            keys=equations.keys,
            params=handed,
            batch=equations.batch,
            large=large,
            small={v: x for v, x in equations.consts.items() if v not in names},
        ),
    )


def _handed(
    h: jaxprs.Piece, leaf_of: Mapping[Any, str], like: Any
) -> tuple[jaxprs.Piece, dict[Any, str]]:
    """The prelude with parameters handed in the dtype of their first use.

    Where every use of a parameter converts it to one dtype, the runtime hands it in
    that dtype, once a step, and the conversion leaves the program.
    """
    readers: dict[Any, list[Any]] = {}
    for eqn in h.eqns:
        for v in jaxprs.variables(eqn.invars):
            readers.setdefault(v, []).append(eqn)
    stand_in, dropped = {}, []
    for v in leaf_of:
        casts = readers.get(v, [])
        dtypes = {str(eqn.params.get("new_dtype")) for eqn in casts}
        only_cast = all(eqn.primitive.name == "convert_element_type" for eqn in casts)
        to_float = all(jaxprs.is_float(eqn.outvars[0].aval) for eqn in casts)
        if len(dtypes) == 1 and only_cast and to_float and v not in h.outvars:
            stand_in[v] = casts[0].outvars[0]
            dropped.append(casts[0])
    eqns = [
        eqn.replace(
            invars=[
                v if jaxprs.is_literal(v) else stand_in.get(v, v) for v in eqn.invars
            ]
        )
        for eqn in h.eqns
        if all(eqn is not cast for cast in dropped)
    ]
    invars = [stand_in.get(v, v) for v in h.invars]
    handed = {stand_in.get(v, v): leaf for v, leaf in leaf_of.items()}
    return jaxprs.Piece(like, invars, h.outvars, eqns), handed
