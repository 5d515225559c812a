"""Which dim of each weight is split over the ``model`` axis: column, then row.

    matrix product of an unsplit activation -> split the weight's output dim (column)
    of one split along the contracted dim   -> split the contracted dim (row)

Biases follow their product's output, norm scales and positions stay whole, tables split
over the vocabulary. A hint for speed only: whatever is split, the numbers are the same,
because the compiler adds what communication the split needs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hexijax import compat
from hexijax.layers import dims, jaxprs
from hexijax.layers.dims import Along, Same, State
from hexijax.layers.equations import Equations, Source

_PARTS = 2
"""The smallest split: what cannot be halved is not split."""

_UNSPLIT = Same()


@dataclasses.dataclass(frozen=True, slots=True)
class _Origin:
    """A value that is a parameter in another form."""

    param: Any
    """The parameter's variable."""
    dims: tuple[int | None, ...]
    """For each dim, the parameter's dim of which it is all or the outer factor."""


def tensor_dims(equations: Equations, starts: Sequence[int]) -> Mapping[Any, int]:
    """The dim to split of each parameter that should be; activations are whole at
    ``starts``, the layers' first equations."""
    walk = _Walk({v for v, source in equations.sources.items() if source.is_live})
    origins = {v: _Origin(v, tuple(range(v.aval.ndim))) for v in equations.params}
    states: dict[Any, State] = {}
    borders = set(starts)
    for i, eqn in enumerate(equations.eqns):
        if i in borders:
            states = {}
        if equations.sources[eqn.outvars[0]] == Source.PARAMS:
            walk.rename(eqn, origins)
        else:
            walk.step(eqn, origins, states)
    return walk.found


class _Walk:
    """The dims found so far; the first use of a parameter decides."""

    def __init__(self, live: set[Any]) -> None:
        self.found: dict[Any, int] = {}
        self._live = live

    def rename(self, eqn: Any, origins: dict[Any, _Origin]) -> None:
        """Follows parameters through a cast, a transpose, a reshape."""
        sources = [v for v in jaxprs.variables(eqn.invars) if v in origins]
        if len(sources) == 1:
            origin = origins[sources[0]]
            places = _renamed(eqn, origin.dims)
            if places is not None:
                origins[eqn.outvars[0]] = _Origin(origin.param, places)

    def step(
        self, eqn: Any, origins: dict[Any, _Origin], states: dict[Any, State]
    ) -> None:
        """One equation on activations."""
        name = eqn.primitive.name
        ins = [
            _UNSPLIT if jaxprs.is_literal(v) else states.get(v, _UNSPLIT)
            for v in eqn.invars
        ]
        given = [None if jaxprs.is_literal(v) else origins.get(v) for v in eqn.invars]
        inner = _callee(eqn)
        if inner is not None:
            made = self._inside(inner, given, ins)
        elif name == "dot_general" and sum(map(bool, given)) == 1:
            made = [self._product(eqn, given, ins)]
        elif name == "gather" and given[0] is not None:
            self._assign(given[0], given[0].dims[0])
            made = [_UNSPLIT]
        else:
            split = next((s for s in ins if isinstance(s, Along)), None)
            if split is None:
                return
            if dims.is_elementwise(eqn):
                if self._meets_whole(eqn, given, ins, split):
                    return
                for origin in filter(None, given):
                    if len(origin.dims) > split.dim:
                        self._assign(origin, origin.dims[split.dim])
                whole = frozenset(range(eqn.outvars[0].aval.ndim))
                ins = [s if isinstance(s, Along) else Same(whole) for s in ins]
            made = dims.step(eqn, ins, _PARTS)
        for v, s in zip(eqn.outvars, made, strict=True):
            if isinstance(s, Along):
                states[v] = s

    def _inside(
        self, inner: Any, given: Sequence[_Origin | None], ins: Sequence[State]
    ) -> list[State]:
        """An equation that holds a program: parameters may be changed in there, too."""
        origins = {v: o for v, o in zip(inner.invars, given, strict=True) if o}
        pairs = zip(inner.invars, ins, strict=True)
        states: dict[Any, State] = {v: s for v, s in pairs if isinstance(s, Along)}
        self._live.update(v for v in inner.invars if v not in origins)
        for eqn in inner.eqns:
            reads = jaxprs.variables(eqn.invars)
            if reads and all(v in origins for v in reads) and len(reads) == 1:
                self.rename(eqn, origins)
            else:
                self._live.update(eqn.outvars)
                self.step(eqn, origins, states)
        return [
            _UNSPLIT if jaxprs.is_literal(v) else states.get(v, _UNSPLIT)
            for v in inner.outvars
        ]

    def _meets_whole(
        self,
        eqn: Any,
        given: Sequence[_Origin | None],
        ins: Sequence[State],
        split: Along,
    ) -> bool:
        """Whether a whole activation (a residual) is added: then the sum is whole."""
        return any(
            origin is None
            and not isinstance(s, Along)
            and v in self._live
            and v.aval.ndim > split.dim
            and v.aval.shape[split.dim] > 1
            for v, origin, s in zip(eqn.invars, given, ins, strict=True)
            if not jaxprs.is_literal(v)
        )

    def _product(
        self, eqn: Any, given: Sequence[_Origin | None], ins: Sequence[State]
    ) -> State:
        at = 0 if given[0] else 1
        origin, activation = given[at], ins[1 - at]
        assert origin is not None
        contract, batch = eqn.params["dimension_numbers"]
        rank = eqn.invars[at].aval.ndim
        free = [d for d in range(rank) if d not in contract[at] and d not in batch[at]]
        if isinstance(activation, Along):
            for dims_ in (contract, batch):
                if activation.dim in dims_[1 - at]:
                    mine = dims_[at][list(dims_[1 - at]).index(activation.dim)]
                    self._assign(origin, origin.dims[mine])
                    return (
                        _UNSPLIT
                        if dims_ is contract
                        else Along(list(dims_[1 - at]).index(activation.dim))
                    )
            ins = [Same(), Same()]
            ins[1 - at] = activation
            made = dims.step(eqn, ins, _PARTS)[0]
            return made if isinstance(made, Along) else _UNSPLIT
        shape = eqn.invars[at].aval.shape
        column = next((d for d in free if shape[d] >= _PARTS), None)
        if column is None or origin.dims[column] is None:
            return _UNSPLIT
        assigned = self._assign(origin, origin.dims[column])
        if not assigned or shape[column] % _PARTS:
            return _UNSPLIT
        others = eqn.outvars[0].aval.ndim - len(free) if at else len(batch[0])
        return Along(others + free.index(column))

    def _assign(self, origin: _Origin, dim: int | None) -> bool:
        """Splits a parameter along ``dim``, unless it is split along another."""
        if dim is None or origin.param.aval.shape[dim] < _PARTS:
            return False
        return self.found.setdefault(origin.param, dim) == dim


def _renamed(eqn: Any, places: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    name, params = eqn.primitive.name, eqn.params
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name in ("convert_element_type", "copy", "copy_p", "mul", "reduce_precision"):
        return places if len(old) == len(new) else None
    if name == "transpose":
        return tuple(places[d] for d in params["permutation"])
    if name == "squeeze":
        gone = params["dimensions"]
        return tuple(p for d, p in enumerate(places) if d not in gone)
    if name == "broadcast_in_dim":
        made: list[int | None] = [None] * len(new)
        for d, to in enumerate(params["broadcast_dimensions"]):
            made[to] = places[d] if old[d] == new[to] else None
        return tuple(made)
    if name == "slice":
        pairs = zip(places, old, new, strict=True)
        return tuple(p if a == b else None for p, a, b in pairs)
    if name == "reshape":
        made = [None] * len(new)
        for d, place in enumerate(places):
            if old[d] >= _PARTS:
                to = dims.reshaped_dim(old, new, d, _PARTS)
                if to is not None and made[to] is None:
                    made[to] = place
        return tuple(made)
    return None


def _callee(eqn: Any) -> Any:
    """The inner program of an equation whose inputs are the program's own."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params and eqn.primitive.name not in ("scan", "while", "cond"):
            return compat.as_closed(eqn.params[key]).jaxpr
    return None
