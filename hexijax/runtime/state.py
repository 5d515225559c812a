"""State by global name: out of its homes as NumPy or named arrays, and back in.

A parameter is known by its path in the user's tree, a piece of it by its box, never by
the stage or device that happened to hold it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.layers.chain import Leaf, LeafPart
from hexijax.layers.names import path_name
from hexijax.plan.plan import Place
from hexijax.program.boxes import Box
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.layout import box_shape
from hexijax.runtime.memo import memo
from hexijax.runtime.optimizer import Moment
from hexijax.weights.slices import MASTER, Key, Slice
from hexijax.weights.source import Tensor, whole

Groups = Mapping[str, GroupRuntime]
State = Mapping[tuple[Place, str], Mapping[str, Any]]


def by_name(params: Any) -> dict[str, Any]:
    """The leaves of a tree by global name."""
    return {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}


def global_box(leaf: Leaf, box: Box) -> Box:
    """A box of a leaf as a box of the user's array: a stacked row and a part add their
    offsets."""
    if isinstance(leaf, LeafPart):
        (start, stop), at = box[leaf.dim], leaf.dim
        moved = (start + leaf.start, stop + leaf.start)
        return global_box(leaf.whole, (*box[:at], moved, *box[at + 1 :]))
    if leaf.row is None:
        return box
    return ((leaf.row, leaf.row + 1), *box[1:])


def cut(array: Any, leaf: Leaf, box: Box) -> jax.Array:
    """A box of a leaf out of the user's array."""
    index = tuple(slice(start, stop) for start, stop in global_box(leaf, box))
    return jnp.asarray(array, dtype=leaf.dtype)[index]


def assemble(abstract: Any, groups: Groups, state: State) -> Any:
    """The user's tree of master parameters, on the host."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    whole = {path_name(p): np.empty(x.shape, x.dtype) for p, x in leaves}
    for (home, name), held in state.items():
        for (leaf, box), array in zip(
            groups[name].held[home], held["master"], strict=True
        ):
            index = tuple(slice(*rows) for rows in global_box(leaf, box))
            whole[leaf.name][index] = np.asarray(array)
    return jax.tree.unflatten(tree, [whole[path_name(p)] for p, _ in leaves])


def assemble_moments(
    abstract: Any, groups: Groups, state: State, kind: str
) -> dict[str, np.ndarray]:
    """One kind of moment (a path in the optimizer state, as ``0/mu``) by parameter."""
    whole = {
        path_name(p): np.full(x.shape, np.nan, x.dtype)
        for p, x in jax.tree_util.tree_leaves_with_path(abstract)
    }
    for (home, name), held in state.items():
        group = groups[name]
        for moment, array in zip(group.moments(home), held["moments"], strict=True):
            if moment.owner is not None:
                leaf, box = group.held[home][moment.owner]
                if moment.path == f"{kind}/{leaf.name}":
                    index = tuple(slice(*rows) for rows in global_box(leaf, box))
                    whole[leaf.name][index] = np.asarray(array)
    return whole


def slices(groups: Groups, state: State) -> dict[Slice, list[Any]]:
    """Every array of the state by what it is, with each copy that homes have of it.

    Only what belongs to no leaf, such as a step count, has several: one a group and
    home, all equal.
    """
    out: dict[Slice, list[Any]] = {}
    for (home, name), held in state.items():
        masters, moments = _state_slices(groups[name], home)
        arrays = (*held["master"], *held["moments"])
        for each, array in zip((*masters, *moments), arrays, strict=True):
            out.setdefault(each, []).append(array)
    return out


def unsliced(
    homes: Iterable[tuple[GroupRuntime, Place]], arrays: Mapping[Slice, Sequence[Any]]
) -> dict[tuple[Place, str], Any]:
    """The state of these homes that ``slices`` spelled out."""
    given = {each: iter(copies) for each, copies in arrays.items()}
    state = {}
    for group, home in homes:
        masters, moments = _state_slices(group, home)
        state[home, group.group.name] = {
            "master": tuple(next(given[each]) for each in masters),
            "moments": [next(given[each]) for each in moments],
        }
    return state


def tensors(abstract: Any, groups: Groups) -> dict[Key, Tensor]:
    """Shape and dtype of every array that the slices are boxes of."""
    shapes = {
        path_name(path): tuple(x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(abstract)
    }
    out: dict[Key, Tensor] = {}
    for group in groups.values():
        for home in group.homes:
            held, (masters, moments) = group.held[home], _state_slices(group, home)
            for each, (leaf, _) in zip(masters, held, strict=True):
                out[each.key] = Tensor(shapes[leaf.name], np.dtype(leaf.dtype))
            for each, moment in zip(moments, group.moments(home), strict=True):
                shape = tuple(moment.shape)
                if moment.owner is not None and _as_its_leaf(group, home, moment):
                    shape = shapes[held[moment.owner][0].name]
                out[each.key] = Tensor(shape, np.dtype(moment.dtype))
    return out


@memo
def _state_slices(group: GroupRuntime, home: Place) -> tuple[list[Slice], list[Slice]]:
    """Of the masters and the moments of a home, in its order."""
    held = group.held[home]
    masters = [Slice(leaf.name, MASTER, global_box(leaf, box)) for leaf, box in held]
    moments = []
    for moment in group.moments(home):
        if moment.owner is None:
            moments.append(Slice("", moment.path, whole(tuple(moment.shape))))
            continue
        leaf, box = held[moment.owner]
        kind = moment.path.removesuffix(leaf.name).strip("/")
        if _as_its_leaf(group, home, moment):
            moments.append(Slice(leaf.name, kind, global_box(leaf, box)))
        else:
            moments.append(Slice(leaf.name, kind, whole(tuple(moment.shape))))
    return masters, moments


def _as_its_leaf(group: GroupRuntime, home: Place, moment: Moment) -> bool:
    """Whether a moment has a number for each of its leaf's; else its leaf is whole."""
    assert moment.owner is not None
    leaf, box = group.held[home][moment.owner]
    alike = tuple(moment.shape) == box_shape(box)
    assert alike or leaf.row is None, (leaf.id, moment)
    return alike
