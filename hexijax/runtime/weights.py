"""Weights into the homes of a plan and out of them, a box at a time.

    Source -> read(name, box of one device) -> that device          put
    homes -> Held (a Source) -> read(name, box)                     out

A device is given its own box of a parameter and no host ever holds more of it.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from hexijax.layers.names import path_name
from hexijax.plan.plan import Place
from hexijax.program.boxes import Box
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.layout import PINNED_HOST
from hexijax.runtime.state import State, global_box
from hexijax.weights.source import (
    Source,
    Tensor,
    box_shape,
    index,
    inside,
    overlap,
    shifted,
)
from hexijax.weights.stored.manifest import Param
from hexijax.weights.tree import Item
from hexijax.weights.tree import Path as TreePath

Groups = Mapping[str, GroupRuntime]


def put(source: Source, name: str, box: Box, like: jax.ShapeDtypeStruct) -> jax.Array:
    """A box of a parameter as an array like ``like``, read for each device alone.

    Waits for the copy: the host's box can go before the next one is read.
    """
    sharding = like.sharding
    assert sharding is not None
    devices: dict[Box, list[jax.Device]] = {}
    where = sharding.addressable_devices_indices_map(like.shape)
    for device, slices in where.items():
        assert slices is not None
        part = tuple(
            s.indices(rows)[:2] for s, rows in zip(slices, like.shape, strict=True)
        )
        devices.setdefault(part, []).append(device)
    corner = [start for start, _ in box]
    shards: list[jax.Array] = []
    for part, holders in devices.items():
        read = source.read(name, shifted(part, corner))
        host = np.ascontiguousarray(read, dtype=like.dtype).reshape(box_shape(part))
        # Never an alias: the next update overwrites the device's memory.
        one = functools.partial(SingleDeviceSharding, memory_kind=sharding.memory_kind)
        shards += [jax.device_put(host, one(d), may_alias=False) for d in holders]
    array = jax.make_array_from_single_device_arrays(like.shape, sharding, shards)
    return jax.block_until_ready(array)


def put_masters(
    source: Source, group: GroupRuntime, home: Place
) -> tuple[jax.Array, ...]:
    """The master parameters of a home, from a source with the model's names."""
    likes = group.state_structs(home)["master"]
    return tuple(
        put(source, leaf.name, global_box(leaf, box), like)
        for (leaf, box), like in zip(group.held[home], likes, strict=True)
    )


class Held(Source):
    """Master parameters where they lie, as a source."""

    def __init__(self, abstract: Any, groups: Groups, state: State):
        leaves = jax.tree_util.tree_leaves_with_path(abstract)
        self._tensors = {
            path_name(path): Tensor(tuple(x.shape), np.dtype(x.dtype))
            for path, x in leaves
        }
        self._paths = {path_name(path): tree_path(path) for path, _ in leaves}
        self._pieces: dict[str, list[tuple[Box, Any]]] = {}
        for (home, name), held in state.items():
            masters = held["master"]
            for (leaf, box), array in zip(
                groups[name].held[home], masters, strict=True
            ):
                piece = (global_box(leaf, box), array)
                self._pieces.setdefault(leaf.name, []).append(piece)

    @property
    def where(self) -> str:
        """What it is read from."""
        return "the run's devices"

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by path."""
        return self._tensors

    @property
    def paths(self) -> Mapping[str, TreePath]:
        """Where each is in the tree."""
        return self._paths

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box, from the devices that hold some of it."""
        out = np.empty(box_shape(box), self._tensors[name].dtype)
        for held, array in self._pieces.get(name, ()):
            both = overlap(held, box)
            if both is not None:
                # What lies in host memory is not cut there: programs run on devices.
                there = not isinstance(array, jax.Array)
                on_host = there or array.sharding.memory_kind == PINNED_HOST
                source = np.asarray(array) if on_host else array
                out[index(inside(both, box))] = source[index(inside(both, held))]
        return out


def stored(abstract: Any, came_as: Mapping[str, str]) -> list[Param]:
    """All parameters, as a checkpoint keeps them in mind."""
    return [
        Param(
            path=tree_path(path),
            tensor=Tensor(tuple(x.shape), np.dtype(x.dtype)),
            came_as=came_as.get(path_name(path), ""),
        )
        for path, x in jax.tree_util.tree_leaves_with_path(abstract)
    ]


def tree_path(path: tuple[Any, ...]) -> TreePath:
    """A JAX key path as a checkpoint keeps it."""

    def component(key: Any) -> str | int | Item:
        if isinstance(key, jax.tree_util.SequenceKey):
            return Item(key.idx)
        if isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, int):
            return key.key
        return path_name((key,))

    return tuple(map(component, path))


def came_as(source: Source, abstract: Any) -> dict[str, str]:
    """Dtypes of a source's tensors, where the model keeps them in another."""
    own = {
        path_name(path): np.dtype(x.dtype)
        for path, x in jax.tree_util.tree_leaves_with_path(abstract)
    }
    return {
        name: tensor.dtype.name
        for name, tensor in source.tensors.items()
        if tensor.dtype != own[name]
    }
