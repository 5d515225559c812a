"""A backward in two: what hands cotangents back, and what adds to the gradients.

    Trace -> flat backward -> Split: input part, what it hands on, weight part

The input part has the equations that cotangents at the first border need, the weight
part has the rest. Between them go the values that the rest reads: what the forward kept
and cotangents on their way, most of them operands of a weight's matrix product. Cheap
equations at the seam stand on the side that leaves fewer bytes to hand on: a norm's
scale hands on its gradient, not the activations it is a sum over. What follows from
parameters or the batch alone is computed by both parts, as forward and backward do.

What remat recomputes is computed once, by the input part, which hands on what the
weight part reads of it: a layer that kept little for long keeps more for a while.
Equations that hold programs (a scan over time) stay whole, in the input part.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from hexijax import compat
from hexijax.layers import hoist, jaxprs
from hexijax.layers.code import Trace

LIGHT = jaxprs.words(
    "add add_any and broadcast_in_dim convert_element_type div eq exp ge gt integer_pow"
    " le log logistic lt max min mul ne neg not or reduce_max reduce_sum reshape rsqrt"
    " select_n sign sqrt square squeeze sub tanh transpose"
)
"""Primitives that cost about what reading their inputs costs: they may change sides."""

ACT, RES, COT = "act", "res", "cot"
"""Where a value comes from that travels on as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Both parts as programs, and what travels from one to the other."""

    input: jaxprs.Piece
    """(residuals, seeds, constants) -> (d_act, made)."""

    weight: jaxprs.Piece
    """(again, passed, made, constants) -> d_h."""

    again: tuple[int, ...]
    """Residuals that follow from parameters or batch: the weight part has its own."""

    passed: tuple[tuple[str, int], ...]
    """What travels on as it is, no copy made: the first border's arrays, kept residuals
    and cotangents, by their position among their kind."""

    consts: tuple[Any, ...]

    @property
    def residuals(self) -> tuple[int, ...]:
        """Kept residuals that travel on."""
        return tuple(i for kind, i in self.passed if kind == RES)

    @property
    def handed(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of all that travels."""
        first, stop = len(self.again), len(self.weight.invars) - len(self.consts)
        return tuple(jaxprs.struct(v.aval) for v in self.weight.invars[first:stop])

    def hand_on(
        self,
        act: Sequence[Any],
        residuals: Iterable[Any],
        cotangents: Sequence[Any],
        made: Iterable[Any],
    ) -> tuple[Any, ...]:
        """What the weight part is given, of ``residuals`` (those of ``self.residuals``)
        and the rest: the same arrays, in its order."""
        kept = iter(residuals)
        passed = (
            next(kept) if kind == RES else (act if kind == ACT else cotangents)[i]
            for kind, i in self.passed
        )
        return (*passed, *made)

    @classmethod
    def of(cls, trace: Trace, *, num_h: int, num_act: int, is_last: bool) -> "Split":
        """Cuts a trace's backward.

        Args:
          trace: both directions of a segment.
          num_h: results of the backward that belong to the weight part.
          num_act: arrays at the first border, the forward's last arguments.
          is_last: the seed is a number, and handed on as a value of the input part.
        """
        first_act = len(trace.forward.jaxpr.invars) - num_act
        sides = {i for i, at in trace.given.items() if at < first_act}
        free = sides | set(trace.derived)
        flat = _flat(trace.backward)
        jaxpr = flat.jaxpr
        num_residuals = len(trace.given) + len(trace.derived) + len(trace.kept)
        position = {v: i for i, v in enumerate(jaxpr.invars)}

        def origin(v: Any) -> tuple[str, int] | None:
            """Of a value that travels as it is."""
            i = position.get(v)
            if i is None or (is_last and i >= num_residuals):
                return None
            if i >= num_residuals:
                return COT, i - num_residuals
            if i in trace.given:
                return ACT, trace.given[i] - first_act
            return RES, trace.kept.index(i)

        costless = {v for v, i in position.items() if i in free} | {*jaxpr.constvars}
        d_h, d_act = jaxpr.outvars[:num_h], jaxpr.outvars[num_h:]
        early, late, d_h = _parts(jaxpr.eqns, d_h, d_act, costless)
        reads = jaxprs.free_variables(late, d_h)
        again = [v for v in reads if position.get(v) in free]
        rest = [v for v in reads if v not in costless]
        passed = {v: at for v in rest if (at := origin(v))}
        made = [v for v in rest if v not in passed]
        constants = list(jaxpr.constvars)
        given = [*again, *passed, *made, *constants]
        invars = [*jaxpr.invars, *constants]
        return cls(
            input=jaxprs.Piece.of(flat, invars, [*d_act, *made], early),
            weight=jaxprs.Piece.of(flat, given, d_h, late),
            again=tuple(position[v] for v in again),
            passed=tuple(passed.values()),
            consts=tuple(flat.consts),
        )


def _parts(
    eqns: Sequence[Any],
    d_h: Sequence[Any],
    d_act: Sequence[Any],
    costless: Collection[Any],
) -> tuple[list[Any], list[Any], list[Any]]:
    """Equations of the input and of the weight part, and the latter's results."""
    here = set(jaxprs.needed(eqns, jaxprs.variables(d_act)))
    late = [i for i in jaxprs.needed(eqns, jaxprs.variables(d_h)) if i not in here]
    # What stands behind a barrier of the input part is the same value before it.
    before = {
        out: atom
        for i in sorted(here)
        if eqns[i].primitive.name == "optimization_barrier"
        for out, atom in zip(eqns[i].outvars, eqns[i].invars, strict=True)
    }

    def same(atom: Any) -> Any:
        while not jaxprs.is_literal(atom) and atom in before:
            atom = before[atom]
        return atom

    read = {i: eqns[i].replace(invars=[*map(same, eqns[i].invars)]) for i in late}
    d_h = [*map(same, d_h)]
    moved = _cheaper_early(read, jaxprs.variables(d_h), costless)
    early = {i: eqns[i] for i in here} | {i: read[i] for i in moved}
    return (
        [early[i] for i in sorted(early)],
        [read[i] for i in late if i not in moved],
        d_h,
    )


def _cheaper_early(
    eqns: Mapping[int, Any], results: Iterable[Any], costless: Collection[Any]
) -> set[int]:
    """Of the equations of the weight part, those that hand on less when moved.

    Light equations behind no other kind, in groups that share what they read: a group
    moves where its results are smaller than what it alone would have handed on.
    """
    behind: set[Any] = set()
    light: dict[int, Any] = {}
    for i, eqn in eqns.items():
        reads = jaxprs.variables(eqn.invars)
        if eqn.primitive.name in LIGHT and behind.isdisjoint(reads):
            light[i] = eqn
        else:
            behind.update(eqn.outvars)
    made = {v: i for i, eqn in light.items() for v in eqn.outvars}
    needed = set(results).union(
        *(jaxprs.variables(eqn.invars) for i, eqn in eqns.items() if i not in light)
    )
    groups = _Groups(light)
    reader: dict[Any, int] = {}
    for i, eqn in light.items():
        for v in jaxprs.variables(eqn.invars):
            if v in made:
                groups.join(i, made[v])
            elif v not in needed and v not in costless:
                groups.join(i, reader.setdefault(v, i))
    left: dict[int, int] = {}
    for v in reader:
        root = groups.root(reader[v])
        left[root] = left.get(root, 0) + jaxprs.num_bytes(v.aval)
    for v in needed & made.keys():
        root = groups.root(made[v])
        left[root] = left.get(root, 0) - jaxprs.num_bytes(v.aval)
    return {i for i in light if left.get(groups.root(i), 0) > 0}


class _Groups:
    """Union-find over numbers."""

    def __init__(self, items: Iterable[int]) -> None:
        self._parent = {i: i for i in items}

    def root(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item

    def join(self, one: int, other: int) -> None:
        self._parent[self.root(one)] = self.root(other)


def _flat(closed: Any) -> Any:
    """The same program with calls and remat equations written out."""
    args = [jaxprs.struct(v.aval) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(_evaluator(closed))(*args)


def _evaluator(closed: Any) -> Callable[..., list[Any]]:
    def run(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if jaxprs.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in hoist.REMAT:
                outputs = _evaluator(_callee(eqn))(*_held_back(eqn, inputs))
            elif eqn.primitive.name in jaxprs.INLINED:
                outputs = _evaluator(_callee(eqn))(*inputs)
            else:
                outputs = compat.evaluate_equation(eqn, *inputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return run


def _callee(eqn: Any) -> Any:
    return compat.as_closed(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"])


def _held_back(eqn: Any, inputs: list[Any]) -> list[Any]:
    """As JAX lowers remat: nothing is recomputed before its cotangents are there."""
    held = eqn.params["prevent_cse"]
    held = [held] * len(inputs) if isinstance(held, bool) else list(held)
    if not eqn.params["differentiated"] or not any(held):
        return inputs
    behind = iter(
        lax.optimization_barrier(
            [x for x, keep in zip(inputs, held, strict=True) if keep]
        )
    )
    return [next(behind) if keep else x for x, keep in zip(inputs, held, strict=True)]
