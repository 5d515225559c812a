"""Transposes, splits and merges of dims, that also know which box they need.

    Axes("d c p q -> (p q c) d"): a [D, C, P, Q] array as a [P*Q*C, D] one

Each letter is an axis; axes in parentheses share a dim, the first varying slowest. To
answer a box of the right side, the box of the left side around it is enough.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hexijax.weights.source import Box, box_shape, index, inside

Dims = tuple[tuple[str, ...], ...]
Ranges = dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Axes:
    """How the left side's dims become the right side's."""

    text: str
    """``left -> right``."""

    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Rows of axes; ``sized`` finds those that a shape tells."""

    square: tuple[str, ...] = ()
    """Axes of one size: a shape then tells them though they share a dim."""

    def __post_init__(self) -> None:
        left, right = ([x for d in side for x in d] for side in self.sides)
        if sorted(left) != sorted(right) or len({*left}) != len(left):
            raise ValueError(
                f"Axes {self.text!r}: each axis stands once on each side of the '->'."
            )

    @functools.cached_property
    def sides(self) -> tuple[Dims, Dims]:
        """Axes by dim, of left and right."""
        left, arrow, right = self.text.partition("->")
        if not arrow:
            raise ValueError(f"Axes {self.text!r}: write 'left -> right'.")
        return _dims(left), _dims(right)

    @property
    def back(self) -> "Axes":
        """From right to left."""
        left, _, right = self.text.partition("->")
        text = f"{right.strip()} -> {left.strip()}"
        return dataclasses.replace(self, text=text)

    def sized(self, shape: Sequence[int], *, right: bool = False) -> "Axes":
        """With the sizes that follow from the shape of one side.

        Raises:
          ValueError: the shape has other dims, or a dim cannot be divided so.
        """
        sizes, dims = dict(self.sizes), self.sides[right]
        if len(dims) != len(shape):
            raise ValueError(
                f"axes {self.text!r} are of {len(dims)} dims there, the array has "
                f"{len(shape)}"
            )
        for axes, rows in zip(dims, shape, strict=True):
            unknown = [axis for axis in axes if axis not in sizes]
            known = math.prod(sizes[axis] for axis in axes if axis in sizes)
            size, alike = rows // known, {*unknown} <= {*self.square}
            if alike and len(unknown) == 2:
                size = math.isqrt(size)
            if (len(unknown) > 1 and not alike) or known * size ** len(unknown) != rows:
                raise ValueError(
                    f"axes {self.text!r} with {sizes} do not divide a dim of {rows}"
                )
            sizes |= dict.fromkeys(unknown, size)
        return dataclasses.replace(self, sizes=sizes)

    def shape(self, *, right: bool) -> tuple[int, ...]:
        """The shape of a side; all sizes are known."""
        return tuple(
            math.prod(self.sizes[axis] for axis in axes) for axes in self.sides[right]
        )

    def needed(self, box: Box) -> Box:
        """The box of the left side that a box of the right side is made of."""
        return self._boxes(box)[0]

    def apply(self, array: np.ndarray, box: Box) -> np.ndarray:
        """A box of the right side from the left side's box that ``needed`` named."""
        _, around, ranges = self._boxes(box)
        left, right = ([x for dim in side for x in dim] for side in self.sides)
        rows = [ranges[axis][1] - ranges[axis][0] for axis in left]
        turned = array.reshape(rows).transpose([left.index(axis) for axis in right])
        return turned.reshape(box_shape(around))[index(inside(box, around))]

    def _boxes(self, box: Box) -> tuple[Box, Box, Ranges]:
        """The left and the right box around ``box`` that hold the same elements."""
        left, right = self.sides
        ranges = self._ranges(right, box)
        while True:  # axes only grow, so this ends
            left_box = self._hull(left, ranges)
            grown = self._ranges(left, left_box)
            right_box = self._hull(right, grown)
            grown = self._ranges(right, right_box)
            if grown == ranges:
                return left_box, right_box, ranges
            ranges = grown

    def _ranges(self, dims: Dims, box: Box) -> Ranges:
        """Ranges of axes whose product covers a box; merged axes are cut outermost."""
        ranges: Ranges = {}
        for axes, (start, stop) in zip(dims, box, strict=True):
            for i, axis in enumerate(axes):
                inner = math.prod(self.sizes[a] for a in axes[i + 1 :])
                first, last = start // inner, -(-stop // inner)
                ranges[axis] = (first, last)
                if last - first > 1:
                    ranges |= {a: (0, self.sizes[a]) for a in axes[i + 1 :]}
                    break
                start, stop = start - first * inner, stop - first * inner
        return ranges

    def _hull(self, dims: Dims, ranges: Ranges) -> Box:
        """The smallest box that holds the product of some ranges."""
        box = []
        for axes in dims:
            start, last = 0, 0
            for axis in axes:
                start = start * self.sizes[axis] + ranges[axis][0]
                last = last * self.sizes[axis] + ranges[axis][1] - 1
            box.append((start, last + 1))
        return tuple(box)


def _dims(text: str) -> Dims:
    spaced = text.replace("(", " ( ").replace(")", " ) ").split()
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for word in spaced:
        if word == "(":
            group = []
        elif word == ")":
            dims.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(word)
        else:
            dims.append((word,))
    return tuple(dims)
