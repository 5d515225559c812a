"""One flat program: jit equations inlined, scans over stacked layers unrolled.

    loss -> make_jaxpr -> flatten_program -> one list of equations, one input a leaf

A scan over stacked layers becomes its iterations, and each stacked parameter becomes
one input a row, so that layers can be cut apart between iterations. Remat, other scans
and custom derivatives stay single equations. The program is evaluated while JAX traces
it anew; nothing is computed.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from hexijax import compat
from hexijax.layers import hoist, jaxprs

MAX_ROWS = 1024
"""Longer scans run over something else than layers."""

_ROWWISE = frozenset({"convert_element_type", "copy", "copy_p"})
"""Equations that act on every row of their only input alike."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """A parameter that some scan reads row by row."""

    length: int
    """Rows: the iterations of the scan."""

    scan: int
    """Parameters of one scan share this number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """A stacked array while it is still in pieces, each of shape [1, ...]."""

    rows: tuple[Any, ...]

    def whole(self) -> Any:
        """The stacked array."""
        return jnp.concatenate(self.rows)


def find_stacks(jaxpr: Any, num_params: int) -> dict[int, Stack]:
    """Which of the first ``num_params`` inputs hold layers stacked along dim 0.

    The scan must have a carry (the activation), at least one row must be a matrix, and
    the rows must outweigh the parameters that every iteration reads whole: this tells
    a scan over layers from one over time.
    """
    found: dict[int, Stack] = {}
    scans = itertools.count()

    def walk(jaxpr: Any, origin: dict[Any, int]) -> None:
        def source(atom: Any) -> int | None:
            return None if jaxprs.is_literal(atom) else origin.get(atom)

        for eqn in jaxpr.eqns:
            sources = [source(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            if name in jaxprs.INLINED:
                inner = _callee(eqn).jaxpr
                pairs = zip(inner.invars, sources, strict=True)
                inside = {v: s for v, s in pairs if s is not None}
                walk(inner, inside)
                for out, atom in zip(eqn.outvars, inner.outvars, strict=True):
                    if not jaxprs.is_literal(atom) and atom in inside:
                        origin[out] = inside[atom]
            elif name in _ROWWISE and sources[0] is not None:
                origin[eqn.outvars[0]] = sources[0]
            elif name == "scan":
                scan = compat.Scan.of(eqn)
                first_row = scan.num_consts + scan.num_carry
                consts = _sizes(eqn, sources, 0, scan.num_consts)
                rows = _sizes(eqn, sources, first_row, len(sources))
                matrix = any(eqn.invars[at].aval.ndim >= 3 for at in rows)
                over_layers = scan.num_carry > 0 and scan.length <= MAX_ROWS and matrix
                if over_layers and sum(rows.values()) >= sum(consts.values()):
                    number = next(scans)
                    for at in rows:
                        param = sources[at]
                        assert param is not None  # _sizes lists parameters only
                        stack = Stack(length=scan.length, scan=number)
                        found.setdefault(param, stack)

    walk(jaxpr, {v: i for i, v in enumerate(jaxpr.invars[:num_params])})
    return found


def _sizes(eqn: Any, sources: Sequence[Any], start: int, stop: int) -> dict[int, int]:
    """Elements of the operands in a range that are parameters, by position."""
    at = [i for i in range(start, stop) if sources[i] is not None]
    return {i: eqn.invars[i].aval.size for i in at}


def flatten_program(
    closed: core.ClosedJaxpr, stacks: dict[int, Stack]
) -> core.ClosedJaxpr:
    """The same program in one list of equations.

    Each stacked input becomes its rows, in place; the program's constants become its
    last inputs (their values stay ``closed.consts``).
    """
    num_args = len(closed.jaxpr.invars)

    def run(args: list[Any], consts: list[Any]) -> list[Any]:
        return [_whole(x) for x in _evaluate(closed.jaxpr, consts, args)]

    def rows(index: int) -> Any:
        aval = closed.jaxpr.invars[index].aval
        if index not in stacks:
            return jaxprs.struct(aval)
        row = jax.ShapeDtypeStruct((1, *aval.shape[1:]), aval.dtype)
        return Rows((row,) * stacks[index].length)

    args = [rows(i) for i in range(num_args)]
    consts = [jaxprs.struct(jax.typeof(c)) for c in closed.consts]
    return jax.make_jaxpr(run)(args, consts)


jax.tree_util.register_pytree_node(
    Rows, lambda r: (r.rows, None), lambda _, rows: Rows(tuple(rows))
)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Rows) else value


def _callee(eqn: Any) -> core.ClosedJaxpr:
    return compat.as_closed(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"])


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if jaxprs.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        in_rows = [isinstance(x, Rows) for x in inputs]
        if eqn.primitive.name in jaxprs.INLINED:
            inner = _callee(eqn)
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        elif eqn.primitive.name == "scan" and any(in_rows):
            outputs = _unroll(compat.Scan.of(eqn), inputs)
        elif eqn.primitive.name in _ROWWISE and in_rows[0]:
            outputs = [_map_rows(eqn, inputs[0])]
        else:
            inputs = [_whole(x) for x in inputs]
            if eqn.primitive.name in hoist.REMAT:
                eqn, inputs = hoist.hoist_casts(eqn, inputs)
            outputs = compat.evaluate_equation(eqn, *inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _map_rows(eqn: Any, stacked: Rows) -> Rows:
    def one(row: Any) -> Any:
        return compat.evaluate_equation(eqn, row)[0]

    return Rows(tuple(map(one, stacked.rows)))


def _unroll(scan: compat.Scan, inputs: Sequence[Any]) -> list[Any]:
    first_row = scan.num_consts + scan.num_carry
    consts = [_whole(x) for x in inputs[: scan.num_consts]]
    carry = [_whole(x) for x in inputs[scan.num_consts : first_row]]
    iterations: Sequence[int] = range(scan.length)
    if scan.reverse:
        iterations = iterations[::-1]
    stacked: dict[int, list[Any]] = {}
    for i in iterations:
        row = [_row(x, i) for x in inputs[first_row:]]
        outputs = _evaluate(scan.body.jaxpr, scan.body.consts, [*consts, *carry, *row])
        outputs = [_whole(x) for x in outputs]
        carry, made = outputs[: scan.num_carry], outputs[scan.num_carry :]
        stacked[i] = [lax.expand_dims(x, (0,)) for x in made]
    columns = zip(*(stacked[i] for i in range(scan.length)), strict=True)
    return [*carry, *(Rows(tuple(column)) for column in columns)]


def _row(value: Any, index: int) -> Any:
    if isinstance(value, Rows):
        return lax.squeeze(value.rows[index], (0,))
    return lax.index_in_dim(value, index, keepdims=False)
