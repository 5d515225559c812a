"""What an optax optimizer needs to see, found by tracing its update.

    optimizer, Chain -> classify -> ELEMENTWISE | PER_LEAF, or refused by name
    optimizer, leaves -> GroupUpdate: the update of some leaves alone, a pure function

Element-wise: any box of a leaf can be updated alone. Inside one leaf (norms of a leaf,
matrix updates): the leaf's state has one home. Across leaves: refused, with the
Experiment field that does the same thing globally, where there is one.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.errors import UserError
from hexijax.layers import jaxprs
from hexijax.layers.names import path_name

ELEMENTWISE_PRIMITIVES = jaxprs.words(
    """
    abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos cosh
    div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log
    log1p logistic lt max min mul ne neg nextafter not optimization_barrier or pow pvary
    real reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
    """
)


class OptimizerError(UserError):
    """The optimizer cannot be split over the cluster as it stands."""


class Reach(enum.Enum):
    """How far an update looks."""

    ELEMENTWISE = "element-wise"
    PER_LEAF = "inside one leaf"


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """Which leaves a traced value depends on, and whether still element by element."""

    leaves: frozenset[str]
    elementwise: bool = True


def classify(optimizer: Any, params: Any) -> Reach:
    """How far ``optimizer`` looks, for a parameter tree of arrays or shapes.

    Raises:
      OptimizerError: an update of one leaf depends on another leaf's gradient or
        parameter; the message names the primitive and the leaves.
    """
    with_path = jax.tree_util.tree_leaves_with_path(params)
    names = [path_name(path) for path, _ in with_path]
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = jax.eval_shape(optimizer.init, shapes)
    paths = jax.tree_util.tree_leaves_with_path(state)
    owner = [owner_of(path_name(path), names) for path, _ in paths]

    def update(grads: Any, state: Any, params: Any) -> Any:
        return optimizer.update(grads, state, params)

    closed = jax.make_jaxpr(update)(shapes, state, shapes)
    inputs = [*names, *owner, *names]
    seen = [_Seen(frozenset([n] if n else [])) for n in inputs]
    outputs = _walk(
        closed.jaxpr, [_Seen(frozenset())] * len(closed.jaxpr.constvars), seen
    )
    reach = Reach.ELEMENTWISE
    for name, out in zip([*names, *owner], outputs, strict=True):
        if name and out.leaves - {name}:
            raise _across(name, out.leaves - {name}, closed)
        if not name and len(out.leaves) > 1:
            first, *others = sorted(out.leaves)
            raise _across(first, frozenset(others), closed)
        if not out.elementwise or (not name and out.leaves):
            reach = Reach.PER_LEAF
    return reach


def _across(name: str, others: frozenset[str], closed: Any) -> OptimizerError:
    primitive = _first_mixer(closed.jaxpr)
    listed = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
    return OptimizerError(
        f"The optimizer's update of {name!r} depends on other leaves ({listed}) "
        f"through `{primitive}`: those live on other devices. Leave global clipping, "
        "loss-finite guards and accumulation out of the optimizer and set the "
        "Experiment's clip_norm, skip_nonfinite or batch_size instead."
    )


def _first_mixer(jaxpr: Any) -> str:
    for eqn in jaxpr.eqns:
        for inner in _inner(eqn):
            return _first_mixer(inner)
        if eqn.primitive.name not in ELEMENTWISE_PRIMITIVES | {"broadcast_in_dim"}:
            return eqn.primitive.name
    return "add"


def _inner(eqn: Any) -> list[Any]:
    jaxprs = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                jaxprs.append(inner)
    return jaxprs


def _walk(jaxpr: Any, consts: list[_Seen], args: list[_Seen]) -> list[_Seen]:
    env: dict[Any, _Seen] = dict(zip(jaxpr.constvars, consts, strict=False))
    env.update(zip(jaxpr.invars, args, strict=False))

    def read(atom: Any) -> _Seen:
        return _Seen(frozenset()) if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(a) for a in eqn.invars]
        inner = _inner(eqn)
        name = eqn.primitive.name
        if len(inner) == 1 and name in (
            "jit",
            "pjit",
            "closed_call",
            "custom_jvp_call",
        ):
            (body,) = inner
            outs = _walk(body, [_Seen(frozenset())] * len(body.constvars), ins)
        else:
            leaves = frozenset().union(*(i.leaves for i in ins))
            same = all(i.elementwise for i in ins)
            pointwise = name in ELEMENTWISE_PRIMITIVES or not leaves
            # Broadcasting a scalar or adding dims moves no element onto another.
            if name == "broadcast_in_dim":
                operand = eqn.invars[0].aval
                pointwise = (
                    operand.size == 1 or operand.size == eqn.outvars[0].aval.size
                )
            keeps = not leaves or (same and pointwise)
            outs = [_Seen(leaves, keeps)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def owner_of(path: str, names: Iterable[str]) -> str | None:
    """The parameter that an array of the optimizer state belongs to, None if shared.

    A moment's path ends in its parameter's: ``0/mu/blocks/3/kernel``.
    """
    mine = [n for n in names if path == n or path.endswith("/" + n)]
    return max(mine, key=len, default=None)


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
    def of(cls, optimizer: Any, params: Any) -> "GroupUpdate":
        """For a parameter tree of arrays or shapes."""
        with_path, tree = jax.tree_util.tree_flatten_with_path(params)
        names = tuple(path_name(path) for path, _ in with_path)
        made = cls(optimizer, tree, names, tuple(x.ndim for _, x in with_path), False)
        probe = [jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in with_path[:1]]
        try:
            moments = jax.eval_shape(lambda p: made.init(names[:1], p), probe)
            jax.eval_shape(lambda p, m: made.update(names[:1], p, m, p), probe, moments)
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
