"""An optax optimizer restricted to some leaves of the user's tree.

    optimizer, leaves -> GroupUpdate: the update of some leaves alone, a pure function

Which boxes it may be given alone is `reach`'s matter.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.layers.names import path_name
from hexijax.runtime.reach import owner_of


@dataclasses.dataclass(frozen=True)
class Moment:
    """One array of the optimizer's state for some leaves."""

    path: str
    """In the optimizer's state, ``0/mu/blocks/3/kernel``."""
    turn: int
    """Leaves of equal names are updated in turns, each with a state of its own."""
    owner: int | None
    """Index of the leaf it belongs to; None if to none, such as a step count."""
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class GroupUpdate:
    """The optimizer restricted to some leaves of the user's tree.

    The other leaves are left out of the tree (``None`` in their place). An optimizer
    that holds a whole tree of its own, as a static mask does, cannot take that: for it
    they stand as zero-size constants inside the program, which are never passed and
    cost nothing.
    """

    optimizer: Any
    tree: Any
    """Treedef of the user's parameters."""
    names: tuple[str, ...]
    """Global name of each user leaf, in the order of the tree."""
    ndims: tuple[int, ...]
    """Rank of each user leaf: masks may look at it."""
    whole_tree: bool
    """Whether foreign leaves must be present, though empty."""

    @classmethod
    def of(
        cls, optimizer: Any, params: Any, *, frozen: Collection[str] = ()
    ) -> "GroupUpdate":
        """For a parameter tree of arrays or shapes, of which ``frozen`` are never
        updated."""
        with_path, tree = jax.tree_util.tree_flatten_with_path(params)
        names = tuple(path_name(path) for path, _ in with_path)
        made = cls(optimizer, tree, names, tuple(x.ndim for _, x in with_path), False)
        first = next((i for i, name in enumerate(names) if name not in frozen), 0)
        mine, x = names[first : first + 1], with_path[first][1]
        probe = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        try:
            moments = jax.eval_shape(lambda p: made.init(mine, p), probe)
            jax.eval_shape(lambda p, m: made.update(mine, p, m, p), probe, moments)
        except Exception:  # whatever the optimizer raises on a tree it does not know
            return dataclasses.replace(made, whole_tree=True)
        return made

    def _tree_of(self, names: Sequence[str], arrays: Sequence[Any]) -> Any:
        given = dict(zip(names, arrays, strict=True))
        foreign = [
            jnp.zeros((0,) * max(1, n)) if self.whole_tree else None for n in self.ndims
        ]
        leaves = [given.get(n, f) for n, f in zip(self.names, foreign, strict=True)]
        return jax.tree.unflatten(self.tree, leaves)

    def _state(self, names: Sequence[str], shapes: Sequence[Any]) -> Any:
        return jax.eval_shape(
            lambda arrays: self.optimizer.init(self._tree_of(names, arrays)),
            list(shapes),
        )

    def moments(self, names: Sequence[str], shapes: Sequence[Any]) -> list[Moment]:
        """What each array that ``init`` returns is; ``names`` may repeat (rows)."""
        found: list[Moment] = []
        for turn, at in enumerate(_turns(names)):
            index = {names[i]: i for i in at}
            state = self._state(list(index), [shapes[i] for i in at])
            for path, leaf in jax.tree_util.tree_leaves_with_path(state):
                if leaf.size:
                    name = path_name(path)
                    owner = owner_of(name, index)
                    mine = None if owner is None else index[owner]
                    found.append(Moment(name, turn, mine, leaf.shape, leaf.dtype))
        return found

    def init(self, names: Sequence[str], params: Sequence[Any]) -> list[Any]:
        """The moments of these leaves."""
        made: list[Any] = []
        for at in _turns(names):
            tree = self._tree_of([names[i] for i in at], [params[i] for i in at])
            made += [x for x in jax.tree.leaves(self.optimizer.init(tree)) if x.size]
        return made

    def update(
        self,
        names: Sequence[str],
        grads: Sequence[Any],
        moments: Sequence[Any],
        params: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """(new parameters, new moments) of these leaves."""
        given = iter(moments)
        new_params = list(params)
        new_moments: list[Any] = []
        for at in _turns(names):
            mine = [names[i] for i in at]
            updates, state = self._update(
                mine, [grads[i] for i in at], given, [params[i] for i in at]
            )
            for i in at:
                p = params[i]
                new_params[i] = (p + updates[names[i]]).astype(p.dtype)
            new_moments += [x for x in jax.tree.leaves(state) if x.size]
        return new_params, new_moments

    def _update(
        self,
        names: Sequence[str],
        grads: Sequence[Any],
        moments: Iterator[Any],
        params: Sequence[Any],
    ) -> tuple[dict[str, Any], Any]:
        """(update by name, new state) of leaves of different names."""
        shapes = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in params]
        leaves, tree = jax.tree.flatten(self._state(names, shapes))
        filled = [
            next(moments) if x.size else jnp.zeros(x.shape, x.dtype) for x in leaves
        ]
        updates, state = self.optimizer.update(
            self._tree_of(names, grads),
            jax.tree.unflatten(tree, filled),
            self._tree_of(names, params),
        )
        with_path = jax.tree_util.tree_leaves_with_path(updates)
        return {path_name(path): u for path, u in with_path}, state


def _turns(names: Sequence[str]) -> list[list[int]]:
    """Indices such that no name comes twice in a turn.

    Rows of a stacked array share its name, and the user's tree has one place for it.
    """
    turns: list[list[int]] = []
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        turn = seen[name] = seen.get(name, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(i)
    return turns
