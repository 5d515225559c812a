"""What a program moves through memory once a compiler has fused it.

    equations -> Fusion -> bytes moved between products; what stays in memory

Products, attention, gathers and sorts are kernels of their own: their operands and
results are in memory. What stands between them is fused: a kernel for each value that
must be in memory, which reads the nearest values before it that are. Views and layouts
are free. This is what XLA does, as far as it does not depend on sizes.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from hexijax.layers import jaxprs
from hexijax.layers.products import inner_programs

_LOOPS = jaxprs.words("scan while cond")
_PRODUCTS = jaxprs.words("dot_general conv_general_dilated")
_VIEWS = jaxprs.words("""reshape squeeze expand_dims transpose copy copy_p name
    stop_gradient""")
_SORTS = jaxprs.words("sort top_k approx_top_k cumsum cumprod cummax cummin")


@dataclasses.dataclass(slots=True)
class Fusion:
    """A program under fusion, filled while it is walked."""

    moved_bytes: int = 0
    """Read and written by kernels other than products."""

    behind: dict[Any, frozenset[Any]] = dataclasses.field(default_factory=dict)
    """For each value, the values in memory that it can be computed from."""

    _view_of: dict[Any, Any] = dataclasses.field(default_factory=dict)

    _read: set[frozenset[Any]] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, closed: Any, free: Collection[Any] = ()) -> "Fusion":
        """``closed`` alone; its outputs at the positions ``free`` need no kernel."""
        fusion = cls()
        jaxpr = closed.jaxpr
        for v in (*jaxpr.constvars, *jaxpr.invars):
            fusion.behind[v] = frozenset([v])
        fusion._walk(jaxpr.eqns)
        for i, v in enumerate(jaxpr.outvars):
            if i not in free:
                fusion._store([v])
        return fusion

    def stored(self, values: Iterable[Any]) -> dict[Any, int]:
        """The values in memory that ``values`` follow from, with their bytes."""
        found = (v for x in jaxprs.variables(values) for v in self._of(x))
        return {v: jaxprs.num_bytes(v.aval) for v in found}

    def _walk(self, eqns: Iterable[Any], times: int = 1) -> None:
        for eqn in eqns:
            name = eqn.primitive.name
            inner = inner_programs(eqn)
            if name in _LOOPS:
                self._store(eqn.invars, times)
                for program, turns in inner:
                    body = Fusion.of(program)
                    self.moved_bytes += body.moved_bytes * turns * times
                self._keep(eqn.outvars)
            elif inner and len(inner[0][0].jaxpr.invars) == len(eqn.invars):
                self._enter(inner[0][0], eqn, times)
            elif name in _PRODUCTS or "dot_product_attention" in name:
                self._store(eqn.invars, times)
                self._keep(eqn.outvars)
            elif name == "gather" or name == "dynamic_slice":
                self._count(2 * sum(map(_size, eqn.outvars)), times)
                self._keep(eqn.outvars)
            elif name.startswith("scatter") or name == "dynamic_update_slice":
                self._store(eqn.invars, times)
                self._count(2 * _size(eqn.invars[-1]), times)  # read, then written
                self._keep(eqn.outvars)
            elif name in _SORTS or not eqn.invars:
                self._store(eqn.invars, times)
                self._count(sum(map(_size, (*eqn.invars, *eqn.outvars))), times)
                self._keep(eqn.outvars)
            elif name in _VIEWS:
                self._alias(eqn.outvars[0], eqn.invars[0])
            else:
                self._fuse(eqn)
                if _leaves_the_row(eqn):
                    self._store(eqn.outvars, times)

    def _enter(self, program: Any, eqn: Any, times: int) -> None:
        """A call is its equations."""
        inner = program.jaxpr
        for v in inner.constvars:
            self.behind[v] = frozenset([v])
        for v, atom in zip(inner.invars, eqn.invars, strict=True):
            self._alias(v, atom)
        self._walk(inner.eqns, times)
        for out, atom in zip(eqn.outvars, inner.outvars, strict=True):
            self._alias(out, atom)

    def _alias(self, v: Any, atom: Any) -> None:
        self.behind.pop(v, None)
        self._view_of.pop(v, None)  # a program that is called again has the same names
        if jaxprs.is_literal(atom):
            self.behind[v] = frozenset()
        else:
            self._view_of[v] = self._root(atom)

    def _fuse(self, eqn: Any) -> None:
        read = frozenset[Any]().union(*map(self._of, eqn.invars))
        for v in eqn.outvars:
            self._view_of.pop(v, None)
            self.behind[v] = read

    def _of(self, atom: Any) -> frozenset[Any]:
        return frozenset() if jaxprs.is_literal(atom) else self.behind[self._root(atom)]

    def _root(self, v: Any) -> Any:
        """What a value is a view of; itself, if none."""
        while v in self._view_of:
            v = self._view_of[v]
        return v

    def _store(self, values: Iterable[Any], times: int = 1) -> None:
        """A kernel for each value that is not in memory; one pass for equal inputs."""
        for v in map(self._root, jaxprs.variables(values)):
            behind = self.behind[v]
            if behind == {v} or not behind:
                continue
            if behind not in self._read:
                self._read.add(behind)
                self._count(sum(map(_size, behind)), times)
            self._count(_size(v), times)
            self.behind[v] = frozenset([v])

    def _keep(self, values: Iterable[Any]) -> None:
        for v in values:
            self._view_of.pop(v, None)
            self.behind[v] = frozenset([v])

    def _count(self, num_bytes: int, times: int) -> None:
        self.moved_bytes += num_bytes * times


def _leaves_the_row(eqn: Any) -> bool:
    """Whether an equation sums over more than rows; what does not is fused through.

    A norm or a softmax is one kernel that holds a row at a time.
    """
    name = eqn.primitive.name
    if not name.startswith(("reduce_", "arg")) or name == "reduce_precision":
        return False
    axes, num_dims = eqn.params.get("axes", ()), eqn.invars[0].aval.ndim
    return tuple(axes) != tuple(range(num_dims - len(axes), num_dims))


def _size(v: Any) -> int:
    return jaxprs.num_bytes(v.aval)
