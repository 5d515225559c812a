"""One layer's equations as functions: two preludes and a body.

    params          -> param prelude (casts, transposes)    -> h
    batch, consts   -> batch prelude (masks, positions)     -> k
    h, k, keys, live values at its first border -> body -> live values at its last

The preludes are free of live values: they run again wherever they are needed, so that
neither a weight, cast or transposed, nor a mask is ever kept between forward and
backward. Random draws are part of the body.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from hexijax.layers import jaxprs
from hexijax.layers.equations import Equations, Source

_FREE_OF_LIVE = {Source.NOTHING, Source.BATCH}
_DRAWN = {Source.KEYS, Source.KEYS | Source.BATCH}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A layer's live equations, with the random draws they read."""

    reads: tuple[Any, ...]
    """Variables: from the preludes, the key data, and live ones from before."""

    makes: tuple[Any, ...]
    """Live variables that later layers or the outputs read."""

    eqns: tuple[Any, ...]


def body(equations: Equations, start: int, stop: int, outputs: Iterable[Any]) -> Body:
    """The layer of the equations [start, stop).

    Args:
        equations: the whole program.
        start: index of the layer's first equation.
        stop: index of the next layer's first equation.
        outputs: what the layer must return: its last border, or the loss's outputs.
    """
    live = [i for i in equations.live if start <= i < stop]
    outputs = jaxprs.variables(outputs)
    read = [v for i in live for v in jaxprs.variables(equations.eqns[i].invars)]
    drawn = equations.slice_of([*read, *outputs], _DRAWN)
    eqns = [equations.eqns[i] for i in sorted({*live, *drawn})]
    made = {v for eqn in eqns for v in eqn.outvars}
    return Body(
        reads=tuple(jaxprs.free_variables(eqns, ())),
        makes=tuple(v for v in dict.fromkeys(outputs) if v in made),
        eqns=tuple(eqns),
    )


def param_prelude(equations: Equations, targets: Iterable[Any]) -> jaxprs.Piece:
    """What ``targets`` need of parameters alone: (params, consts) -> parameter-only.

    Targets that depend on anything else are passed over.
    """
    wanted = [v for v in targets if equations.sources[v] == Source.PARAMS]
    kinds = {Source.PARAMS, Source.NOTHING}
    return _prelude(equations, wanted, kinds)


def batch_prelude(equations: Equations, targets: Iterable[Any]) -> jaxprs.Piece:
    """What ``targets`` need of the batch, or of nothing: (batch, consts) -> those."""
    wanted = [v for v in targets if equations.sources[v] in _FREE_OF_LIVE]
    return _prelude(equations, wanted, _FREE_OF_LIVE)


def _prelude(
    equations: Equations, wanted: Sequence[Any], kinds: set[Source]
) -> jaxprs.Piece:
    wanted = list(dict.fromkeys(wanted))
    eqns = [equations.eqns[i] for i in equations.slice_of(wanted, kinds)]
    reads = jaxprs.free_variables(eqns, wanted)
    return jaxprs.Piece.of(equations.closed, reads, wanted, eqns)
