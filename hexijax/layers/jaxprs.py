"""Small tools for jaxprs: variables, slices, pieces as functions, canonical text."""

import dataclasses
import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hexijax import compat

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Call primitives that mean nothing but 'run these equations'."""


def words(text: str) -> frozenset[str]:
    """A set of names, written as one text."""
    return frozenset(text.split())


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are variables; literals carry their value."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def is_literal(atom: Any) -> bool:
    """Whether an atom is a constant written into the equation."""
    return isinstance(atom, core.Literal)


def num_bytes(aval: Any) -> int:
    """Bytes of an array of this type; a typed key counts its key data."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return int(aval.size) * 8
    return int(aval.size) * aval.dtype.itemsize


def is_float(aval: Any) -> bool:
    """Whether a value of this type has a cotangent."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def needed(eqns: Sequence[Any], targets: Iterable[Any]) -> list[int]:
    """Indices of the equations that ``targets`` depend on, ascending."""
    wanted = set(targets)
    kept: list[int] = []
    for i in reversed(range(len(eqns))):
        if not wanted.isdisjoint(eqns[i].outvars):
            kept.append(i)
            wanted.update(variables(eqns[i].invars))
    return kept[::-1]


def free_variables(eqns: Sequence[Any], outvars: Iterable[Any]) -> list[Any]:
    """What a run of equations reads and does not make, in the order of first use."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = [v for eqn in eqns for v in variables(eqn.invars)] + variables(outvars)
    return [v for v in dict.fromkeys(read) if v not in made]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Some equations of a larger program, as a function of its own."""

    invars: tuple[Any, ...]
    """Variables of the larger program that it reads: the order of its arguments."""

    outvars: tuple[Any, ...]
    """Those it makes: the order of its results."""

    closed: core.ClosedJaxpr
    """The function; it may take arguments of another dtype than ``invars`` have."""

    @classmethod
    def of(
        cls,
        like: core.ClosedJaxpr,
        invars: Sequence[Any],
        outvars: Sequence[Any],
        eqns: Sequence[Any],
    ) -> "Piece":
        """The equations ``eqns`` of ``like``."""
        closed = compat.closed_jaxpr(like, invars=invars, outvars=outvars, eqns=eqns)
        return cls(tuple(invars), tuple(outvars), closed)

    def __call__(self, *args: Any) -> list[Any]:
        return list(core.jaxpr_as_fun(self.closed)(*args))


def forwarded(jaxpr: Any) -> list[int | None]:
    """For each output, the input it is identical to, seen through call equations."""
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for v, at in zip(eqn.outvars, _handed_through(eqn), strict=True):
            source = None if at is None else eqn.invars[at]
            if not is_literal(source) and source in position:
                position[v] = position[source]
    return [None if is_literal(v) else position.get(v) for v in jaxpr.outvars]


def _handed_through(eqn: Any) -> list[int | None]:
    """For each output of an equation, the operand that it is."""
    if eqn.primitive.name in _FORWARDING:
        inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        return forwarded(compat.as_closed(inner).jaxpr)
    if eqn.primitive.name != "scan":
        return [None] * len(eqn.outvars)
    scan = compat.Scan.of(eqn)
    first_row = scan.num_consts + scan.num_carry
    kept = forwarded(scan.body.jaxpr)
    # A carry that no iteration changes, and rows that come out as they went in.
    carry = [
        at if at == scan.num_consts + i else None
        for i, at in enumerate(kept[: scan.num_carry])
    ]
    rows = [
        at if at is not None and at >= first_row else None
        for at in kept[scan.num_carry :]
    ]
    return [*carry, *rows]


_FORWARDING = INLINED | {"checkpoint", "remat", "remat2"}


def canonical_text(closed: core.ClosedJaxpr, *, literals: bool = True) -> str:
    """Text that is equal for programs that compute the same on the same shapes.

    Variables are numbered in order, functions named without their address. It costs
    microseconds an equation, where JAX's own printer costs milliseconds. Without
    ``literals``, programs are equal that differ in numbers alone.
    """
    return "\n".join(_lines(closed, literals))


def digest(*texts: str) -> str:
    """Sixteen hex digits of some texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _lines(closed: core.ClosedJaxpr, literals: bool) -> list[str]:
    jaxpr = closed.jaxpr
    number: dict[Any, int] = {}

    def name(atom: Any) -> str:
        if is_literal(atom):
            return f"{repr(atom.val) if literals else ''}:{_type(atom.aval)}"
        if atom not in number:
            number[atom] = len(number)
        return str(number[atom])

    lines = [" ".join(f"{name(v)}:{_type(v.aval)}" for v in compat.all_invars(closed))]
    if literals:
        lines += [value_text(const) for const in closed.consts]
    for eqn in jaxpr.eqns:
        outs = " ".join(f"{name(v)}:{_type(v.aval)}" for v in eqn.outvars)
        params = " ".join(
            f"{k}={_param(v, literals)}" for k, v in sorted(eqn.params.items())
        )
        ins = " ".join(map(name, eqn.invars))
        lines.append(f"{outs} = {eqn.primitive.name}[{params}] {ins}")
    return [*lines, " ".join(map(name, jaxpr.outvars))]


def _type(aval: Any) -> str:
    weak = "~" if getattr(aval, "weak_type", False) else ""
    return f"{getattr(aval, 'dtype', aval)}{weak}{list(getattr(aval, 'shape', ()))}"


def _param(value: Any, literals: bool) -> str:
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        return "{" + "; ".join(_lines(compat.as_closed(value), literals)) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_param(v, literals) for v in value) + ")"
    if isinstance(value, np.ndarray | jax.Array):
        return value_text(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", str(value))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")


def value_text(array: Any) -> str:
    """Dtype, shape and a digest of the contents of an array."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    raw = np.asarray(array)
    return f"{raw.dtype}{raw.shape}{hashlib.sha256(raw.tobytes()).hexdigest()[:16]}"


def without_dead(eqns: Sequence[Any], outvars: Collection[Any]) -> list[Any]:
    """The equations that the outputs depend on; effects of the others are lost."""
    return [eqns[i] for i in needed(eqns, variables(outvars))]
