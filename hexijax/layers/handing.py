"""In which dtype the runtime hands each parameter to a segment.

Where every use of a parameter converts it to one dtype, it is handed in that dtype,
once a step, and the conversion leaves the program: a bfloat16 segment then gathers
bfloat16 weights, and its gradients are bfloat16 until they are added up.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from hexijax import compat
from hexijax.layers import jaxprs

_VIEWS = jaxprs.words("squeeze reshape transpose broadcast_in_dim expand_dims")
"""What may stand between a parameter and its conversion."""


def hand_over(
    prelude: jaxprs.Piece, params: Iterable[Any]
) -> tuple[jaxprs.Piece, dict[Any, str]]:
    """The prelude on parameters as they are handed, and the dtype of each of them."""
    jaxpr = prelude.closed.jaxpr
    readers: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for v in jaxprs.variables(eqn.invars):
            readers.setdefault(v, []).append(eqn)
    returned = set(jaxprs.variables(jaxpr.outvars))

    def first_dtype(v: Any) -> Any:
        """What all uses of a value convert it to; None: they do not agree."""
        if v in returned or v not in readers:
            return None
        dtypes = {
            eqn.outvars[0].aval.dtype
            if eqn.primitive.name == "convert_element_type"
            else first_dtype(eqn.outvars[0])
            if eqn.primitive.name in _VIEWS
            else None
            for eqn in readers[v]
        }
        (dtype, *others) = dtypes
        agreed = (
            not others
            and dtype is not None
            and jax.numpy.issubdtype(dtype, np.floating)
        )
        return dtype if agreed else None

    own = {v: v.aval.dtype for v in params}
    handed = {v: first_dtype(v) or dtype for v, dtype in own.items()}
    names: dict[Any, str] = {v: np.dtype(dtype).name for v, dtype in handed.items()}
    if handed == own:
        return prelude, names
    arguments = [
        jax.ShapeDtypeStruct(v.aval.shape, handed.get(v, v.aval.dtype))
        for v in prelude.invars
    ]
    closed = jax.make_jaxpr(lambda *args: _evaluate(jaxpr, args))(*arguments)
    return jaxprs.Piece(prelude.invars, prelude.outvars, closed), names


def _evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a prelude, without conversions to the dtype a value has already."""
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if jaxprs.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        is_cast = eqn.primitive.name == "convert_element_type"
        if is_cast and inputs[0].dtype == eqn.outvars[0].aval.dtype:
            made = inputs
        else:
            made = compat.evaluate_equation(eqn, *inputs)
        env.update(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
