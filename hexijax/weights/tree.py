"""Plain trees by path: nested dicts and lists, without JAX.

    {name: leaf}, {name: path} -> nested -> tree

A path's component is a dict's key (text or a whole number), or ``Item(i)``, a place in
a list.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Item(NamedTuple):
    """A place in a list."""

    place: int


Path = tuple["str | int | Item", ...]


def name_of(path: Path) -> str:
    """The global name: components joined by '/', dicts and lists alike."""
    return "/".join(str(c.place) if isinstance(c, Item) else str(c) for c in path)


def nested(leaves: Mapping[str, Any], paths: Mapping[str, Path]) -> Any:
    """The tree that has these leaves at these paths."""
    if list(paths.values()) == [()]:  # the tree is one array
        return next(iter(leaves.values()))
    root: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        node, path = root, paths[name]
        for component in path[:-1]:
            node = node.setdefault(component, {})
        node[path[-1]] = leaf
    return _listed(root)


def _listed(node: Any) -> Any:
    """Dicts whose keys are all ``Item`` become lists."""
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, Item) for key in node):
        return [_listed(node[key]) for key in sorted(node)]
    return {key: _listed(value) for key, value in node.items()}


def to_json(path: Path) -> list[Any]:
    """A path as JSON; ``from_json`` undoes it."""
    return [[c.place] if isinstance(c, Item) else c for c in path]


def from_json(data: Sequence[Any]) -> Path:
    """See ``to_json``."""
    return tuple(Item(c[0]) if isinstance(c, list) else c for c in data)
