"""The flat program of a loss, and what each of its values depends on.

Every value depends on a set of sources: parameters, batch arrays, random keys.

    parameters only                   a *prelude*: recomputed wherever it is read
    batch only, or nothing            recomputed wherever it is read, never sent
    keys (and batch), no parameters   the same, inside the layer that reads it
    parameters and batch or keys      *live*: computed once, sent over borders
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend import core

from hexijax.layers import jaxprs
from hexijax.layers.chain import Leaf


class Source(enum.IntFlag):
    """What a value depends on."""

    NOTHING = 0
    PARAMS = 1
    BATCH = 2
    KEYS = 4

    @property
    def is_live(self) -> bool:
        """Whether values of this kind are computed once and sent."""
        return bool(self & Source.PARAMS and self & (Source.BATCH | Source.KEYS))

    @property
    def is_drawn(self) -> bool:
        """Whether it is random and free of parameters: a dropout mask, a key."""
        return bool(self & Source.KEYS) and not self & Source.PARAMS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Equations:
    """A loss as one list of equations over named inputs and outputs."""

    closed: core.ClosedJaxpr
    """The program they come from."""

    params: Mapping[Any, Leaf]
    """Trainable inputs."""

    paths: Mapping[Any, tuple[str, ...]]
    """Where each of them sits in the model; rows of a stack as if they were listed."""

    batch: Mapping[Any, str]
    """Batch arrays."""

    keys: Any
    """Key data of the samples' keys, uint32."""

    consts: Mapping[Any, Any]
    """Arrays the loss closed over, with their values."""

    outputs: Mapping[str, Any]
    """``sum``, ``weight``, and two entries a metric."""

    @functools.cached_property
    def eqns(self) -> list[Any]:
        """The equations that the outputs need, in order."""
        return jaxprs.without_dead(self.closed.jaxpr.eqns, list(self.outputs.values()))

    @functools.cached_property
    def sources(self) -> Mapping[Any, Source]:
        """What each value depends on."""
        known = dict.fromkeys(self.params, Source.PARAMS)
        known |= dict.fromkeys(self.batch, Source.BATCH)
        known |= dict.fromkeys(self.consts, Source.NOTHING) | {self.keys: Source.KEYS}
        for eqn in self.eqns:
            source = Source.NOTHING
            for v in jaxprs.variables(eqn.invars):
                source |= known[v]
            known.update(dict.fromkeys(eqn.outvars, source))
        return known

    @functools.cached_property
    def producer(self) -> Mapping[Any, int]:
        """Index of the equation that makes each value."""
        return {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}

    @functools.cached_property
    def live(self) -> list[int]:
        """Indices of the equations that make live values."""
        of = self.sources
        return [i for i, eqn in enumerate(self.eqns) if of[eqn.outvars[0]].is_live]

    @functools.cached_property
    def _behind(self) -> dict[Any, frozenset[Any]]:
        """Parameters behind each parameter-only value."""
        behind = {v: frozenset((v,)) for v in self.params}
        for eqn in self.eqns:
            if self.sources[eqn.outvars[0]] == Source.PARAMS:
                read = self.params_read(eqn.invars, behind)
                behind.update(dict.fromkeys(eqn.outvars, read))
        return behind

    def params_read(
        self, atoms: Iterable[Any], behind: Mapping[Any, frozenset[Any]] | None = None
    ) -> frozenset[Any]:
        """Parameters that some atoms depend on through parameter-only values."""
        behind = self._behind if behind is None else behind
        none: frozenset[Any] = frozenset()
        return none.union(*(behind.get(v, none) for v in jaxprs.variables(atoms)))

    def slice_of(self, targets: Iterable[Any], kinds: set[Source]) -> list[int]:
        """Equations of some kinds that ``targets`` depend on, ascending."""
        todo = [v for v in targets if v in self.producer]
        found: set[int] = set()
        while todo:
            v = todo.pop()
            i = self.producer.get(v)
            if i is None or i in found or self.sources[v] not in kinds:
                continue
            found.add(i)
            todo.extend(jaxprs.variables(self.eqns[i].invars))
        return sorted(found)

    @functools.cached_property
    def first_use(self) -> Mapping[Any, int]:
        """Index of the first live equation that reads each parameter."""
        return {v: uses[0] for v, uses in self.uses.items()}

    @functools.cached_property
    def uses(self) -> Mapping[Any, list[int]]:
        """Indices of the live equations that read each parameter, ascending."""
        uses: dict[Any, list[int]] = {}
        for i in self.live:
            for v in self.params_read(self.eqns[i].invars):
                uses.setdefault(v, []).append(i)
        return uses

    @functools.cached_property
    def last_read(self) -> Mapping[Any, int]:
        """Index of the last live equation that reads a value; outputs are read last."""
        last: dict[Any, int] = {}
        for i in self.live:
            last.update(dict.fromkeys(jaxprs.variables(self.eqns[i].invars), i))
        outputs = jaxprs.variables(self.outputs.values())
        return last | dict.fromkeys(outputs, len(self.eqns))

    @functools.cached_property
    def crossing_bytes(self) -> list[int]:
        """Bytes of live values that cross the place before each equation."""
        change = [0] * (len(self.eqns) + 2)
        for i in self.live:
            for v in self.eqns[i].outvars:
                if v in self.last_read:
                    change[i + 1] += jaxprs.num_bytes(v.aval)
                    change[self.last_read[v] + 1] -= jaxprs.num_bytes(v.aval)
        return list(itertools.accumulate(change[:-1]))

    def border(self, cut: int) -> tuple[Any, ...]:
        """Live values made before ``cut`` and read at or after it, by time of birth."""
        made = (v for i in self.live if i < cut for v in self.eqns[i].outvars)
        return tuple(v for v in made if self.last_read.get(v, -1) >= cut)
