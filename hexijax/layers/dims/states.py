"""What is known of a value about the followed dim, and how operands may meet on it."""

import dataclasses
from typing import Any

from hexijax.layers import jaxprs


@dataclasses.dataclass(frozen=True, slots=True)
class Same:
    """Independent of the followed dim."""

    uniform: frozenset[int] = frozenset()
    """Dims along which all entries are known to be equal."""

    is_zero: bool = False
    """Known to be zero everywhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class Along:
    """Runs along the followed dim."""

    dim: int
    """Where it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Summed:
    """A sum over the followed dim, times factors that are the ``Same``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mixed:
    """Parts met: here, and in this way."""

    eqn: Any
    how: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """No rule knows this equation."""

    eqn: Any


State = Same | Along | Summed | Mixed | Unknown


def is_elementwise(eqn: Any) -> bool:
    """Whether every output entry depends on the input entries at its place."""
    if not eqn.outvars:
        return False
    shape = getattr(eqn.outvars[0].aval, "shape", ())
    return eqn.primitive.name in _ELEMENTWISE and all(
        v.aval.ndim == 0 or v.aval.ndim == len(shape) for v in eqn.invars
    )


_ELEMENTWISE = jaxprs.words(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    bitcast_convert_type clz complex conj convert_element_type copy copy_p cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh threefry2x32 xor name random_fold_in
    sharding_constraint bessel_i0e bessel_i1e polygamma zeta nan_to_num mulhi
    optimization_barrier"""
)


def meets(eqn: Any, at: int, s: State, dim: int) -> bool:
    """Whether operand ``at`` may meet the followed dim at ``dim`` of its own."""
    shape = eqn.invars[at].aval.shape
    if isinstance(s, Along):
        return s.dim == dim
    assert isinstance(s, Same)
    return not shape or shape[dim] == 1 or dim in s.uniform


def by_place(eqn: Any) -> State:
    """Something that differs from sample to sample met the followed dim."""
    if jaxprs.is_float(eqn.outvars[0].aval):
        return Mixed(eqn, "depends on the place of a sample in its microbatch")
    return Unknown(eqn)  # places as integers may only serve to pick each sample's own


def dim_of(state: State) -> int:
    """Where a value runs along the followed dim, which its caller has made sure of."""
    assert isinstance(state, Along), state
    return state.dim


def ones(aval: Any) -> frozenset[int]:
    return frozenset(i for i, n in enumerate(getattr(aval, "shape", ())) if n == 1)
