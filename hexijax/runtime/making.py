"""First parameters from the seed, one after another.

    make(key) -> its equations -> Made[name]: those that this parameter needs

A model that no device holds whole is made on one all the same: equations run, one by
one as they would without a trace, when a parameter is asked for that needs them, each
once, and what nothing else needs is let go.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax

from hexijax import compat
from hexijax.layers import jaxprs
from hexijax.layers.names import path_name


class Made:
    """Parameters by name, each made when it is first read."""

    def __init__(
        self,
        make: Callable[[jax.Array], Any],
        key: jax.Array,
        device: jax.Device,
        reads: Mapping[str, int],
    ):
        """What ``make(key)`` returns.

        Args:
          make: a function of a key to a tree of arrays, as JAX can trace.
          key: a typed key.
          device: where equations run.
          reads: how often each parameter will be read; it is let go after the last
            time.
        """
        closed, tree = jax.make_jaxpr(make, return_shape=True)(key)
        names = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
        jaxpr = closed.jaxpr
        self._eqns, self._device = jaxpr.eqns, device
        self._output = dict(zip(names, jaxpr.outvars, strict=True))
        self._maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self._done: set[int] = set()
        self._values: dict[Any, Any] = dict(
            zip(jaxpr.constvars, closed.consts, strict=True)
        )
        self._values[jaxpr.invars[0]] = key
        wanted = [v for name, v in self._output.items() if reads.get(name)]
        self._reads = collections.Counter(
            v
            for at in jaxprs.needed(jaxpr.eqns, jaxprs.variables(wanted))
            for v in jaxprs.variables(jaxpr.eqns[at].invars)
        )
        for name, v in self._output.items():
            if not jaxprs.is_literal(v):
                self._reads[v] += reads.get(name, 0)

    def __getitem__(self, name: str) -> Any:
        target = self._output[name]
        with jax.default_device(self._device):
            self._run(target)
            return self._read(target)

    def _run(self, target: Any) -> None:
        """All equations that a variable needs and that have not run."""
        wanted, todo = [target], set[int]()
        while wanted:
            atom = wanted.pop()
            at = None if jaxprs.is_literal(atom) else self._maker.get(atom)
            if at is not None and at not in self._done and at not in todo:
                todo.add(at)
                wanted += self._eqns[at].invars
        for at in sorted(todo):
            eqn = self._eqns[at]
            inputs = [self._read(atom) for atom in eqn.invars]
            outputs = compat.evaluate_equation(eqn, *inputs)
            self._values |= {
                v: x
                for v, x in zip(eqn.outvars, outputs, strict=True)
                if self._reads[v] > 0
            }
        self._done |= todo

    def _read(self, atom: Any) -> Any:
        if jaxprs.is_literal(atom):
            return atom.val
        self._reads[atom] -= 1
        if self._reads[atom] > 0:
            return self._values[atom]
        return self._values.pop(atom)
