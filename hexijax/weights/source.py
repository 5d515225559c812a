"""Where weights come from: names, shapes, and a read of any box of any of them.

    file, folder, tree, engine -> Source -> read(name, box) -> NumPy

A name is a parameter's path in the model's tree, joined by '/'. A source opens files
when it is first looked at and reads numbers only when asked for them, so whoever reads
decides how much is in memory: a box, never a file.
"""

import abc
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from hexijax.weights.tree import Path

Box = tuple[tuple[int, int], ...]
"""One (start, stop) per dim."""

WINDOW_BYTES = 64 * 2**20
"""What is read at once where a tensor may be read in parts."""


class Tensor(NamedTuple):
    """What is known of an array before it is read."""

    shape: tuple[int, ...]
    """Rows by dim."""

    dtype: np.dtype
    """As it is stored; ``ml_dtypes`` adds bfloat16 and the float8 kinds to NumPy's."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


class Source(abc.ABC):
    """Weights that can be read box by box."""

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """What it is read from, for messages."""

    @property
    @abc.abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by name; no numbers are read for it."""

    @abc.abstractmethod
    def read(self, name: str, box: Box) -> np.ndarray:
        """The numbers of a box; perhaps a view of a file, so only to be looked at."""

    @property
    def paths(self) -> Mapping[str, Path]:
        """Where each is in a tree; by the '/' in their names, unless more is known."""
        return {name: tuple(name.split("/")) for name in self.tensors}

    def windows(self, name: str) -> Sequence[Box]:
        """Boxes that tile a tensor along dim 0 and are cheap to read one by one."""
        return rows_of(self.tensors[name])

    def fitted(self, wanted: Mapping[str, Tensor]) -> "Source":
        """These weights under the names of ``wanted``, the model's parameters.

        Raises:
          WeightsError: some are missing, left over, or have another shape.
        """
        from hexijax.weights.fit import fitted

        return fitted(self, wanted)


class Arrays(Source):
    """Arrays that lie in memory, by name."""

    def __init__(
        self, arrays: Mapping[str, np.ndarray], where: str = "a tree of arrays"
    ):
        self._arrays, self._where = dict(arrays), where

    @property
    def where(self) -> str:
        """What it is read from."""
        return self._where

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by name."""
        return {
            name: Tensor(tuple(x.shape), np.dtype(x.dtype))
            for name, x in self._arrays.items()
        }

    def read(self, name: str, box: Box) -> np.ndarray:
        """A view of the array."""
        return np.asarray(self._arrays[name][index(box)])


def whole(shape: Sequence[int]) -> Box:
    """The box of all of an array."""
    return tuple((0, rows) for rows in shape)


def index(box: Box) -> tuple[slice, ...]:
    """The NumPy index of a box."""
    return tuple(slice(start, stop) for start, stop in box)


def box_shape(box: Box) -> tuple[int, ...]:
    """Rows a dim of a box."""
    return tuple(stop - start for start, stop in box)


def overlap(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, or None."""
    shared = tuple(
        (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )
    return shared if all(start < stop for start, stop in shared) else None


def shifted(box: Box, by: Sequence[int]) -> Box:
    """A box with its starts and stops moved."""
    return tuple((a + d, b + d) for (a, b), d in zip(box, by, strict=True))


def inside(box: Box, outer: Box) -> Box:
    """A box as counted from the corner of a box around it."""
    return shifted(box, [-start for start, _ in outer])


def rows_of(tensor: Tensor, window_bytes: int = WINDOW_BYTES) -> list[Box]:
    """A tensor in runs of rows of at most some bytes, at least a row each."""
    box = whole(tensor.shape)
    if not box or not tensor.num_bytes:
        return [box]
    rows = max(1, window_bytes * box[0][1] // tensor.num_bytes)
    starts = range(0, box[0][1], rows)
    return [((start, min(start + rows, box[0][1])), *box[1:]) for start in starts]


def dtype_of(name: str) -> np.dtype:
    """The dtype of that NumPy name, ``ml_dtypes``'s among them."""
    extra = getattr(ml_dtypes, name, None)
    return np.dtype(name if extra is None else extra)
