"""Moves arrays between meshes without passing through the host.

``jax.device_put`` onto a mesh whose slices differ falls back to a blocking copy through
host memory (8 instead of 270 GB/s between NVLink cards). Here each target shard is put
together from the source shards it overlaps: cut on the source, copy, assemble on the
target. All copies of a call go out in one ``Carrier.carry``.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from hexijax.program.boxes import Box, overlap
from hexijax.runtime.carrying import ONE_PROCESS, Carrier, Coming, Piece, settled
from hexijax.runtime.programs import struct


class Part(NamedTuple):
    """A piece of a shard."""

    source: jax.Device
    cut: Box | None
    """Within the source's shard; None: all of it."""
    target: jax.Device
    box: Box
    """Of the whole array."""


Recipe = tuple[tuple[tuple[int, ...], tuple[Part, ...]], ...]
"""Per target shard: the grid its pieces form, and the pieces in row-major order."""


def move(
    arrays: Sequence[Any],
    targets: Sequence[NamedSharding],
    carrier: Carrier = ONE_PROCESS,
    *,
    same: Sequence[int] = (),
) -> list[Any]:
    """Each array on its target sharding; dispatched at once, nothing waits.

    An array that already has the sharding is returned as it is.

    Args:
      arrays: what is elsewhere is a struct with its sharding.
      targets: where they are wanted.
      carrier: what makes the copies.
      same: a number for each array, equal where it is one array that is given again:
        its pieces cross to an island once. All islands say so alike, whatever objects
        they have for what is elsewhere. Empty: no two are.

    Returns:
      Arrays; ``Coming`` for what another island sends, and structs for what is wanted
      elsewhere.
    """
    pieces: list[Piece] = []
    recipes: list[Recipe | None] = []
    for n, (array, target) in enumerate(zip(arrays, targets, strict=True)):
        if array.sharding.is_equivalent_to(target, len(array.shape)) and (
            array.sharding.device_set == target.device_set
        ):
            recipes.append(None)
            continue
        recipe = _recipe(array.sharding, target, array.shape)
        pieces += _pieces(same[n] if same else n, array, recipe)
        recipes.append(recipe)
    copies = iter(carrier.carry(pieces) if pieces else ())
    moved: list[Any] = []
    for array, target, recipe in zip(arrays, targets, recipes, strict=True):
        if recipe is None:
            moved.append(array)
            continue
        shards = [([next(copies) for _ in parts], grid) for grid, parts in recipe]
        moved.append(joined(array.shape, array.dtype, target, shards))
    return moved


def joined(
    shape: tuple[int, ...],
    dtype: Any,
    target: NamedSharding,
    shards: Sequence[tuple[list[Any], tuple[int, ...]]],
) -> Any:
    """An array of the pieces of its shards, each shard's with the grid they form; a
    struct where it is elsewhere, and to come where any of them is."""
    flat = [x for parts, _ in shards for x in parts]
    if any(x is None for x in flat):
        return struct(shape, dtype, target)

    def made() -> jax.Array:
        whole = [_assemble(settled(parts), grid) for parts, grid in shards]
        return jax.make_array_from_single_device_arrays(shape, target, whole)

    return Coming(made) if any(isinstance(x, Coming) for x in flat) else made()


def _pieces(n: int, array: Any, recipe: "Recipe") -> list[Piece]:
    """What the recipe of an array, number ``n`` of a call, asks for."""
    here = isinstance(array, jax.Array)
    data = {s.device: s.data for s in array.addressable_shards} if here else {}

    def piece(part: Part) -> Piece:
        def taken() -> jax.Array:
            shard = data[part.source]
            return shard if part.cut is None else _cut(shard, part.cut)

        shape = tuple(stop - start for start, stop in part.box)
        source, target = part.source, part.target
        return Piece(taken, shape, array.dtype, source, target, (n, part.box))

    return [piece(part) for _, parts in recipe for part in parts]


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    assert index is not None, "a sharding that does not know its own indices"
    return tuple(
        (s.start or 0, dim if s.stop is None else s.stop)
        for s, dim in zip(index, shape, strict=True)
    )


@functools.lru_cache(maxsize=65536)
def _recipe(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> Recipe:
    """Per target shard: the grid of its pieces; each one's source, cut and device."""
    held = [
        (device, _box(index, shape))
        for device, index in source.addressable_devices_indices_map(shape).items()
    ]
    recipe = []
    for n, (device, index) in enumerate(
        target.addressable_devices_indices_map(shape).items()
    ):
        want = _box(index, shape)
        whole = [(d, box) for d, box in held if overlap(box, want) == want]
        if whole:
            # Spread readers over the copies, but never leave a device that has one.
            local = [h for h in whole if h[0] == device]
            chosen = [local[0] if local else whole[n % len(whole)]]
        else:
            distinct = {
                box: (d, box) for d, box in reversed(held) if overlap(box, want)
            }
            chosen = [distinct[box] for box in sorted(distinct)]
        overlaps = (overlap(box, want) for _, box in chosen)
        shared = [both for both in overlaps if both is not None]  # all of them
        parts = tuple(
            Part(source_device, _within(both, box), device, both)
            for (source_device, box), both in zip(chosen, shared, strict=True)
        )
        grid = tuple(len({both[d] for both in shared}) for d in range(len(shape)))
        recipe.append((grid, parts))
    return tuple(recipe)


def _within(inner: Box, outer: Box) -> Box | None:
    """``inner`` counted from the start of ``outer``; None if they are equal."""
    if inner == outer:
        return None
    return tuple(
        (start - base, stop - base)
        for (start, stop), (base, _) in zip(inner, outer, strict=True)
    )


@functools.partial(jax.jit, static_argnums=1)
def _cut(x: jax.Array, box: Box) -> jax.Array:
    return x[tuple(slice(start, stop) for start, stop in box)]


@functools.partial(jax.jit, static_argnums=1)
def _join(parts: list[jax.Array], grid: tuple[int, ...]) -> jax.Array:
    for dim in reversed(range(len(grid))):
        n = grid[dim]
        if n > 1:
            parts = [
                jnp.concatenate(parts[i : i + n], axis=dim)
                for i in range(0, len(parts), n)
            ]
    (whole,) = parts
    return whole


def _assemble(parts: list[jax.Array], grid: tuple[int, ...]) -> jax.Array:
    """One array of the pieces of a grid, listed in row-major order of their starts."""
    return parts[0] if len(parts) == 1 else _join(parts, grid)
