"""The equations of a segment, and both directions of its differentiated program."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from hexijax.layers import jaxprs
from hexijax.layers.chain import Remat
from hexijax.layers.pieces import Body


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Code:
    """The equations of a segment."""

    like: core.ClosedJaxpr
    h: jaxprs.Piece
    k: jaxprs.Piece
    bodies: tuple[Body, ...]
    remat: tuple[Remat, ...]
    act: tuple[Any, ...]
    outputs: tuple[Any, ...]
    keys: Any
    params: Mapping[Any, str]
    """Leaf id of each parameter variable, as handed."""
    batch: Mapping[Any, str]
    large: Mapping[Any, str]
    """Names of the constants that are given as arguments."""
    small: Mapping[Any, Any]
    """Constants that are part of the program."""

    def lookup(
        self,
        variables: Sequence[Any],
        params: Mapping[str, Any],
        batch: Mapping[str, Any],
    ) -> list[Any]:
        """The arrays a prelude reads."""

        def one(v: Any) -> Any:
            if v in self.params:
                return params[self.params[v]]
            if v in self.small:
                return self.small[v]
            return batch[self.batch[v] if v in self.batch else self.large[v]]

        return [one(v) for v in variables]

    def wiring(self) -> list[str]:
        """Which argument each input of the preludes is, for the signature."""
        # Parameters by position, not by name: layers that differ in names are equal.
        place = {leaf: str(i) for i, leaf in enumerate(self.params.values())}
        text = []
        for v in (*self.h.invars, *self.k.invars):
            if v in self.params:
                text.append(place[self.params[v]])
            elif v in self.small:
                text.append(jaxprs.value_text(self.small[v]))
            else:
                text.append(self.batch[v] if v in self.batch else self.large[v])
        return text


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Both directions of a segment as programs, and where each residual comes from."""

    forward: core.ClosedJaxpr
    """(h, k, extra, act) -> (outputs, residuals)."""
    backward: core.ClosedJaxpr
    """(residuals, seeds) -> (d_h, d_act)."""
    num_out: int
    given: Mapping[int, int]
    """Residuals that are an input of the forward: its position."""
    derived: tuple[int, ...]
    """Residuals that follow from the preludes alone."""
    rederive: jaxprs.Piece
    kept: tuple[int, ...]
    """Residuals that travel from forward to backward."""

    @property
    def residuals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of what is kept."""
        made = self.forward.jaxpr.outvars[self.num_out :]
        return tuple(jaxprs.struct(made[i].aval) for i in self.kept)

    def rederive_inputs(self, given: Sequence[Any]) -> list[Any]:
        """What ``rederive`` reads: inputs of the forward and its constants."""
        jaxpr = self.forward.jaxpr
        values = dict(zip(jaxpr.constvars, self.forward.consts, strict=True))
        values |= dict(zip(jaxpr.invars, given, strict=True))
        return [values[v] for v in self.rederive.invars]

    @classmethod
    def of(
        cls,
        forward: core.ClosedJaxpr,
        backward: core.ClosedJaxpr,
        num_out: int,
        *,
        num_h: int,
        num_k: int,
    ) -> "Trace":
        jaxpr = forward.jaxpr
        # From the parameters alone, or from the batch alone: what needs both is an
        # activation, and computing it again would be the forward.
        sides = [
            set(jaxpr.invars[:num_h]) | set(jaxpr.constvars),
            set(jaxpr.invars[num_h : num_h + num_k]) | set(jaxpr.constvars),
        ]
        for eqn in jaxpr.eqns:
            for side in sides:
                if not eqn.effects and side.issuperset(jaxprs.variables(eqn.invars)):
                    side.update(eqn.outvars)
        free = set.union(*sides)
        residuals = jaxpr.outvars[num_out:]
        at = jaxprs.forwarded(jaxpr)[num_out:]
        given = {i: place for i, place in enumerate(at) if place is not None}
        rest = [i for i in range(len(residuals)) if i not in given]
        derived = [
            i for i in rest if jaxprs.is_literal(residuals[i]) or residuals[i] in free
        ]
        wanted = [residuals[i] for i in derived]
        eqns = [
            jaxpr.eqns[i] for i in jaxprs.needed(jaxpr.eqns, jaxprs.variables(wanted))
        ]
        reads = jaxprs.free_variables(eqns, wanted)
        rederive = jaxprs.Piece.of(forward, reads, wanted, eqns)
        return cls(
            forward=forward,
            backward=backward,
            num_out=num_out,
            given=given,
            derived=tuple(derived),
            rederive=rederive,
            kept=tuple(i for i in rest if i not in set(derived)),
        )
