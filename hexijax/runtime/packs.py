"""Arrays that travel together as one: a copy costs the host the same whatever its size.

    leaves' boxes -> pack -> one flat array -> device_put -> unpack -> boxes

Between four cards a Llama's gradients are 3,700 boxes a step; starting so many copies
took half a second, all of it after the last backward.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]


def pack(arrays: Sequence[jax.Array]) -> jax.Array:
    """One after another, row by row; all of one dtype."""
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def unpack(flat: Any, shapes: Sequence[Shape]) -> tuple[Any, ...]:
    """What ``pack`` was given, of JAX or of NumPy."""
    found: list[Any] = []
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        found.append(flat[start : start + size].reshape(shape))
        start += size
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """Of some arrays those that rest and travel as one, flat, behind all others."""

    which: tuple[int, ...]
    """Their numbers; empty: none."""

    shapes: tuple[Shape, ...]

    def closed(
        self, arrays: Iterable[Any], join: Callable[[Sequence[Any]], Any] = pack
    ) -> list[Any]:
        """The others in their order, then what ``join`` makes of these."""
        arrays = list(arrays)
        if not self.which:
            return arrays
        others = [x for i, x in enumerate(arrays) if i not in self.which]
        return [*others, join([arrays[i] for i in self.which])]

    def opened(
        self,
        arrays: Sequence[Any],
        part: Callable[[Any, Sequence[Shape]], Sequence[Any]] = unpack,
    ) -> list[Any]:
        """What ``closed`` was given; ``part`` undoes ``join``."""
        if not self.which:
            return list(arrays)
        *others, flat = arrays
        apart = dict(zip(self.which, part(flat, self.shapes), strict=True))
        rest = iter(others)
        count = len(others) + len(apart)
        return [apart[i] if i in apart else next(rest) for i in range(count)]


def size_of(shapes: Sequence[Shape]) -> int:
    """Elements of them all."""
    return sum(math.prod(shape) for shape in shapes)
