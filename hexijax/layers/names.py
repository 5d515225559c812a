"""Global names: every array of a tree by its path, ``blocks/3/attend/query/kernel``.

    tree -> flatten -> {name: leaf}, structure -> unflatten -> tree

Names are what plans, checkpoints and error messages use; the structure of the user's
tree is needed only where the user's own function is called.
"""

from collections.abc import Mapping
from typing import Any

import jax

_HOLDERS = ("key", "idx", "name")
"""The attributes of JAX's keys in which a component stands."""


def path_name(path: tuple[Any, ...]) -> str:
    """The components of a JAX key path, joined by '/'.

    Dictionary keys, list indices and attributes look alike, so that a tree keeps its
    names when a list becomes a dictionary of integers (as it does in a checkpoint).
    """
    return "/".join(
        str(next((getattr(key, f) for f in _HOLDERS if hasattr(key, f)), key))
        for key in path
    )


def flatten(tree: Any) -> dict[str, Any]:
    """Every leaf by name, in the order of JAX's own flattening."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    by_name = {path_name(path): leaf for path, leaf in leaves}
    assert len(by_name) == len(leaves), "two leaves of a tree have one name"
    return by_name


def unflatten(like: Any, by_name: Mapping[str, Any]) -> Any:
    """A tree of ``like``'s structure with the leaves of ``by_name``."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    return structure.unflatten([by_name[path_name(path)] for path, _ in leaves])
