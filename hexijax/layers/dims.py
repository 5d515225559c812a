"""Follows one dim of the inputs, as the sample dim, through every equation.

    state of each input -> flow -> state of each output

A value is the ``Same`` whatever the sample; runs ``Along`` the followed dim, each part
of it made from that part of the inputs alone; is ``Summed`` over it, linearly; or is
``Mixed``: parts met in another way. What no rule here knows is ``Unknown``.

A followed dim may be the outer factor of a larger one: (B, T, D) reshaped to (B*T, D).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hexijax import compat
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


def flow(
    jaxpr: Any, inputs: Sequence[State], parts: int, consts: Sequence[State] = ()
) -> list[State]:
    """States of a program's outputs.

    Args:
        jaxpr: the program.
        inputs: a state for each of its inputs.
        parts: size of the followed dim.
        consts: a state for each of its constants; the ``Same`` if none are given.
    """
    env: dict[Any, State] = dict.fromkeys(jaxpr.constvars, Same())
    env |= dict(zip(jaxpr.constvars, consts, strict=False))
    env |= dict(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        states = step(eqn, [state_of(atom, env) for atom in eqn.invars], parts)
        env.update(zip(eqn.outvars, states, strict=True))
    return [state_of(atom, env) for atom in jaxpr.outvars]


def state_of(atom: Any, env: dict[Any, State]) -> State:
    """The state of a variable or a literal."""
    if not jaxprs.is_literal(atom):
        return env[atom]
    whole = frozenset(range(atom.aval.ndim))
    return Same(whole, is_zero=atom.aval.ndim == 0 and bool(atom.val == 0))


def step(eqn: Any, ins: Sequence[State], parts: int) -> list[State]:
    """States of one equation's outputs."""
    bad = [s for s in ins if isinstance(s, Mixed)]
    bad = bad or [s for s in ins if isinstance(s, Unknown)]
    if bad:
        return [bad[0]] * len(eqn.outvars)
    name = eqn.primitive.name
    nested = _NESTED.get(name)
    if nested is not None:
        return nested(eqn, ins, parts)
    if all(isinstance(s, Same) for s in ins):
        return [_same(eqn, ins)] * len(eqn.outvars)
    if any(isinstance(s, Summed) for s in ins):
        return [_summed(eqn, ins)] * len(eqn.outvars)
    rule = _RULES.get(name)
    if rule is None:
        if not is_elementwise(eqn):
            return [Unknown(eqn)] * len(eqn.outvars)
        rule = _elementwise
    made = rule(eqn, ins, parts)
    return made if isinstance(made, list) else [made] * len(eqn.outvars)


# Values that do not depend on the followed dim: along which dims are they uniform?


def _same(eqn: Any, ins: Sequence[Any]) -> Same:
    name, params = eqn.primitive.name, eqn.params
    rank = len(getattr(eqn.outvars[0].aval, "shape", ()))
    dims = frozenset(range(rank))
    if not ins:
        return Same(dims - {params["dimension"]} if name == "iota" else frozenset())
    first, shape = ins[0].uniform, eqn.invars[0].aval.shape
    zero = ins[0].is_zero and name in _KEEPS_ZERO
    if is_elementwise(eqn):
        each = [
            dims if v.aval.ndim == 0 else s.uniform | _ones(v.aval)
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
    return Same(_ones(eqn.outvars[0].aval))


_KEEPS_ZERO = jaxprs.words(
    """broadcast_in_dim convert_element_type copy expand_dims neg reduce_sum reshape
    slice squeeze transpose"""
)


def _ones(aval: Any) -> frozenset[int]:
    return frozenset(i for i, n in enumerate(getattr(aval, "shape", ())) if n == 1)


# Sums over the followed dim: what is linear keeps them.

_LINEAR = jaxprs.words(
    """broadcast_in_dim concatenate convert_element_type copy expand_dims neg pad
    reduce_precision reduce_sum reshape rev slice squeeze transpose real imag
    copy_p cumsum sharding_constraint optimization_barrier name stop_gradient
   """
)


def _summed(eqn: Any, ins: Sequence[State]) -> State:
    name = eqn.primitive.name
    sums = [isinstance(s, Summed) for s in ins]
    if any(isinstance(s, Along) for s in ins):
        return Mixed(eqn, "combines each sample with a sum over samples")
    if name in _LINEAR:
        return Summed()
    if name in {"add", "sub", "add_any"}:
        zeros = (s.is_zero for s in ins if isinstance(s, Same))
        if all(sums) or all(zeros):
            return Summed()
        return Mixed(eqn, "adds a term that no sample owns, once a microbatch")
    one_sum = sum(sums) == 1
    if name in {"mul", "dot_general"} and one_sum:
        return Summed()
    if name == "div" and sums == [True, False]:
        return Summed()
    if name == "select_n" and not sums[0]:
        zeros = (s.is_zero for s in ins[1:] if isinstance(s, Same))
        if all(zeros):
            return Summed()
    return Mixed(eqn, "is not linear in a sum over samples")


# Values along the followed dim.


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


def _meets(eqn: Any, at: int, s: State, dim: int) -> bool:
    """Whether operand ``at`` may meet the followed dim at ``dim`` of its own."""
    shape = eqn.invars[at].aval.shape
    if isinstance(s, Along):
        return s.dim == dim
    assert isinstance(s, Same)
    return not shape or shape[dim] == 1 or dim in s.uniform


def _elementwise(eqn: Any, ins: Sequence[State], parts: int) -> State | list[State]:
    if eqn.primitive.name == "optimization_barrier":
        return list(ins)
    dims = {s.dim for s in ins if isinstance(s, Along)}
    if len(dims) > 1:
        return Mixed(eqn, "combines every sample with every other")
    (dim,) = dims
    if all(_meets(eqn, i, s, dim) for i, s in enumerate(ins)):
        return Along(dim)
    return _by_place(eqn)


def _by_place(eqn: Any) -> State:
    """Something that differs from sample to sample met the followed dim."""
    if jaxprs.is_float(eqn.outvars[0].aval):
        return Mixed(eqn, "depends on the place of a sample in its microbatch")
    return Unknown(eqn)  # places as integers may only serve to pick each sample's own


def _dim(state: State) -> int:
    """Where a value runs along the followed dim, which its caller has made sure of."""
    assert isinstance(state, Along), state
    return state.dim


def _broadcast(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return Along(int(eqn.params["broadcast_dimensions"][_dim(ins[0])]))


def _reshape(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if eqn.params.get("dimensions") is not None:
        return Unknown(eqn)
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dim = reshaped_dim(old, new, _dim(ins[0]), parts)
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


def _transpose(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return Along(list(eqn.params["permutation"]).index(_dim(ins[0])))


def _squeeze(eqn: Any, ins: Sequence[State], parts: int) -> State:
    dim, gone = _dim(ins[0]), eqn.params["dimensions"]
    return Unknown(eqn) if dim in gone else Along(dim - sum(1 for d in gone if d < dim))


def _expand(eqn: Any, ins: Sequence[State], parts: int) -> State:
    dim = _dim(ins[0])
    for d in sorted(eqn.params["dimensions"]):
        dim += 1 if d <= dim else 0
    return Along(dim)


def _reduce(eqn: Any, ins: Sequence[State], parts: int) -> State:
    axes = eqn.params["axes"]
    dim = _dim(ins[0])
    if dim not in axes:
        return Along(dim - sum(1 for d in axes if d < dim))
    if eqn.primitive.name == "reduce_sum":
        return Summed()
    return Mixed(eqn, "reduces over samples")


def _dim_of(param: str, how: str) -> Any:
    """Rule of an operation along one dim that must not be the followed one."""

    def rule(eqn: Any, ins: Sequence[State], parts: int) -> State:
        dims = {s.dim for s in ins if isinstance(s, Along)}
        if len(dims) > 1:
            return Mixed(eqn, "combines every sample with every other")
        (dim,) = dims
        own = eqn.params[param]
        if own == dim:
            return Mixed(eqn, how)
        fits = all(_meets(eqn, i, s, dim) for i, s in enumerate(ins))
        return Along(dim) if fits else _by_place(eqn)

    return rule


def _rev(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if _dim(ins[0]) in eqn.params["dimensions"]:
        return Mixed(eqn, "reorders samples")
    return ins[0]


def _slice(eqn: Any, ins: Sequence[State], parts: int) -> State:
    dim = _dim(ins[0])
    whole = eqn.outvars[0].aval.shape[dim] == eqn.invars[0].aval.shape[dim]
    return ins[0] if whole else Mixed(eqn, "takes some samples of the microbatch")


def _pad(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if not isinstance(ins[0], Along) or not isinstance(ins[1], Same):
        return Unknown(eqn)
    low_high_inner = eqn.params["padding_config"][_dim(ins[0])]
    return ins[0] if not any(low_high_inner) else Unknown(eqn)


def _dynamic_slice(eqn: Any, ins: Sequence[State], parts: int) -> State:
    if not all(isinstance(s, Same) for s in ins[1:]):
        return Unknown(eqn)
    return _slice(eqn, ins, parts)


def _dynamic_update_slice(eqn: Any, ins: Sequence[State], parts: int) -> State:
    operand, update, *starts = ins
    if not all(isinstance(s, Same) for s in starts):
        return Unknown(eqn)
    dim = next(s.dim for s in (operand, update) if isinstance(s, Along))
    whole = eqn.invars[0].aval.shape[dim] == eqn.invars[1].aval.shape[dim]
    fits = _meets(eqn, 0, operand, dim) and _meets(eqn, 1, update, dim)
    return Along(dim) if whole and fits else Unknown(eqn)


def _split(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return Unknown(eqn) if eqn.params["axis"] == _dim(ins[0]) else ins[0]


def _top_k(eqn: Any, ins: Sequence[State], parts: int) -> State:
    last = eqn.invars[0].aval.ndim - 1
    return Mixed(eqn, "ranks samples") if _dim(ins[0]) == last else ins[0]


def _keys(eqn: Any, ins: Sequence[State], parts: int) -> State:
    return ins[0]


def _dot(eqn: Any, ins: Sequence[State], parts: int) -> State:
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
    dim, other = _dim(ins[i]), ins[1 - i]
    for dims, out in ((contract, None), (batch, 0)):
        if dim in dims[i]:
            at = list(dims[i]).index(dim)
            partner = dims[1 - i][at]
            if not _meets(eqn, 1 - i, other, partner):
                if isinstance(other, Same):
                    return _by_place(eqn)
                return Mixed(eqn, "compares samples")
            return Summed() if out is None else Along(at)
    if len(followed) == 2:
        return Mixed(eqn, "multiplies every sample with every other")
    return Along(starts[i] + free[i].index(dim))


def _conv(eqn: Any, ins: Sequence[State], parts: int) -> State:
    numbers = eqn.params["dimension_numbers"]
    images, kernel = ins
    plain = isinstance(kernel, Same) and eqn.params["batch_group_count"] == 1
    if plain and isinstance(images, Along) and images.dim == numbers.lhs_spec[0]:
        return Along(int(numbers.out_spec[0]))
    return Unknown(eqn)


def _gather(eqn: Any, ins: Sequence[State], parts: int) -> State:
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
        if partner is not None and _meets(eqn, 0, operand, partner):
            return Along(rows[indices.dim])
        return Unknown(eqn)
    dim = _dim(operand)
    if dim in pairs:
        fits = _meets(eqn, 1, indices, pairs[dim])
        return Along(rows[pairs[dim]]) if fits else _by_place(eqn)
    gone = {*numbers.collapsed_slice_dims, *pairs}
    whole = eqn.params["slice_sizes"][dim] == eqn.invars[0].aval.shape[dim]
    if dim in gone or not whole:
        return Mixed(eqn, "picks samples of the microbatch")
    kept = [d for d in range(eqn.invars[0].aval.ndim) if d not in gone]
    return Along(int(numbers.offset_dims[kept.index(dim)]))


def _scatter(eqn: Any, ins: Sequence[State], parts: int) -> State:
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
            fits = all(_meets(eqn, at, s, d) for at, s, d in places)
            return Along(int(o)) if fits else _by_place(eqn)
    return Unknown(eqn)


_RULES: dict[str, Any] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "rev": _rev,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "split": _split,
    "top_k": _top_k,
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "sort": _dim_of("dimension", "sorts samples"),
    "concatenate": _dim_of("dimension", "joins samples"),
    **dict.fromkeys(
        ("random_wrap", "random_unwrap", "random_split", "random_bits", "random_clone"),
        _keys,
    ),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul"), _scatter),
    **dict.fromkeys(
        jaxprs.words(
            """reduce_sum reduce_max reduce_min reduce_prod
            reduce_and reduce_or reduce_xor argmax argmin"""
        ),
        _reduce,
    ),
    **dict.fromkeys(
        jaxprs.words("""cumsum cumprod cummax cummin cumlogsumexp"""),
        _dim_of("axis", "accumulates over samples"),
    ),
}


# Equations that hold programs.


def _call(eqn: Any, ins: Sequence[State], parts: int) -> list[State]:
    inner = next(
        compat.as_closed(eqn.params[k])
        for k in ("jaxpr", "call_jaxpr", "fun_jaxpr")
        if k in eqn.params
    )
    return flow(inner.jaxpr, ins, parts)


def _join(a: State, b: State) -> State:
    """What is known of a value that is either of two."""
    for s in (a, b):
        if isinstance(s, Mixed | Unknown):
            return s
    if isinstance(a, Same) and isinstance(b, Same):
        return Same(a.uniform & b.uniform, a.is_zero and b.is_zero)
    if isinstance(a, Same):
        a, b = b, a
    if a == b:
        return a
    if isinstance(b, Same):
        fits = b.is_zero if isinstance(a, Summed) else True
        return a if fits else Unknown(None)
    return Unknown(None)


def _cond(eqn: Any, ins: Sequence[State], parts: int) -> list[State]:
    if not isinstance(ins[0], Same):
        return [Unknown(eqn)] * len(eqn.outvars)
    branches = [
        flow(compat.as_closed(b).jaxpr, ins[1:], parts) for b in eqn.params["branches"]
    ]
    made = branches[0]
    for other in branches[1:]:
        made = [_located(_join(a, b), eqn) for a, b in zip(made, other, strict=True)]
    return made


def _located(s: State, eqn: Any) -> State:
    return Unknown(eqn) if isinstance(s, Unknown) and s.eqn is None else s


def _scan(eqn: Any, ins: Sequence[State], parts: int) -> list[State]:
    scan = compat.Scan.of(eqn)
    first_row = scan.num_consts + scan.num_carry
    rows: list[State] = []
    for s in ins[first_row:]:
        if isinstance(s, Along):
            if s.dim == 0:
                return [Unknown(eqn)] * len(eqn.outvars)
            s = Along(s.dim - 1)
        elif isinstance(s, Same):
            s = Same(frozenset(d - 1 for d in s.uniform if d))
        rows.append(s)
    carry = list(ins[scan.num_consts : first_row])
    while True:
        states = [*ins[: scan.num_consts], *carry, *rows]
        made = flow(scan.body.jaxpr, states, parts)
        after = [
            _located(_join(a, b), eqn)
            for a, b in zip(carry, made[: scan.num_carry], strict=True)
        ]
        if after == carry:
            break
        carry = after
    out = [
        Along(s.dim + 1)
        if isinstance(s, Along)
        else Same()
        if isinstance(s, Same)
        else s
        for s in made[scan.num_carry :]
    ]
    return [*carry, *out]


def _while(eqn: Any, ins: Sequence[State], parts: int) -> list[State]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition = compat.as_closed(eqn.params["cond_jaxpr"]).jaxpr
    body = compat.as_closed(eqn.params["body_jaxpr"]).jaxpr
    in_cond, in_body = ins[:num_cond], ins[num_cond : num_cond + num_body]
    carry = list(ins[num_cond + num_body :])
    while True:
        (again,) = flow(condition, [*in_cond, *carry], parts)
        if not isinstance(again, Same):
            return [Unknown(eqn)] * len(eqn.outvars)
        made = flow(body, [*in_body, *carry], parts)
        after = [_located(_join(a, b), eqn) for a, b in zip(carry, made, strict=True)]
        if after == carry:
            return carry
        carry = after


_NESTED: dict[str, Any] = {
    "scan": _scan,
    "cond": _cond,
    "while": _while,
    **dict.fromkeys(
        jaxprs.words(
            """jit pjit closed_call core_call checkpoint remat remat2 custom_jvp_call
            custom_vjp_call custom_vjp_call_jaxpr custom_lin"""
        ),
        _call,
    ),
}
