"""Follows one dim of the inputs, as the sample dim, through every equation.

    state of each input -> flow -> state of each output

A value is the ``Same`` whatever the sample; runs ``Along`` the followed dim, each part
of it made from that part of the inputs alone; is ``Summed`` over it, linearly; or is
``Mixed``: parts met in another way. What no rule here knows is ``Unknown``.

A followed dim may be the outer factor of a larger one: (B, T, D) reshaped to (B*T, D).
"""

from collections.abc import Sequence
from typing import Any

from hexijax import compat
from hexijax.layers import jaxprs
from hexijax.layers.dims import moves, products
from hexijax.layers.dims.constant import constant
from hexijax.layers.dims.linear import summed
from hexijax.layers.dims.states import (
    Along,
    Mixed,
    Same,
    State,
    Summed,
    Unknown,
    is_elementwise,
)


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
        return [constant(eqn, ins)] * len(eqn.outvars)
    if any(isinstance(s, Summed) for s in ins):
        return [summed(eqn, ins)] * len(eqn.outvars)
    rule = _RULES.get(name)
    if rule is None:
        if not is_elementwise(eqn):
            return [Unknown(eqn)] * len(eqn.outvars)
        rule = moves.elementwise
    made = rule(eqn, ins, parts)
    return made if isinstance(made, list) else [made] * len(eqn.outvars)


_RULES: dict[str, Any] = {
    "broadcast_in_dim": moves.broadcast,
    "reshape": moves.reshape,
    "transpose": moves.transpose,
    "squeeze": moves.squeeze,
    "expand_dims": moves.expand,
    "rev": moves.rev,
    "slice": moves.slice,
    "pad": moves.pad,
    "dynamic_slice": moves.dynamic_slice,
    "dynamic_update_slice": moves.dynamic_update_slice,
    "split": moves.split,
    "top_k": moves.top_k,
    "dot_general": products.dot,
    "conv_general_dilated": products.conv,
    "gather": products.gather,
    **dict.fromkeys(
        jaxprs.words(
            """reduce_window reduce_window_sum reduce_window_max reduce_window_min"""
        ),
        moves.window,
    ),
    "sort": moves.along_own("dimension", "sorts samples"),
    "concatenate": moves.along_own("dimension", "joins samples"),
    **dict.fromkeys(
        ("random_wrap", "random_unwrap", "random_split", "random_bits", "random_clone"),
        moves.keys,
    ),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter_mul"), products.scatter
    ),
    **dict.fromkeys(
        jaxprs.words(
            """reduce_sum reduce_max reduce_min reduce_prod
            reduce_and reduce_or reduce_xor argmax argmin"""
        ),
        moves.reduce,
    ),
    **dict.fromkeys(
        jaxprs.words("""cumsum cumprod cummax cummin cumlogsumexp"""),
        moves.along_own("axis", "accumulates over samples"),
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
