"""Tensors made of boxes of other tensors: what a name map gives.

    read(name, box) -> tiles that the box meets -> their boxes of the source -> joined

A box within one tile is passed on as a view, so a mapped file costs no memory until
someone copies the numbers.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from hexijax.weights.axes import Axes
from hexijax.weights.source import (
    Box,
    Source,
    Tensor,
    box_shape,
    index,
    inside,
    overlap,
    rows_of,
    shifted,
    whole,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """A box of a tensor and the box of the source's tensor that it is."""

    box: Box
    """Of the tensor that is made."""

    row: bool
    """That box is one row, which the source's has no dim for."""

    source: str
    """Name in the source."""

    source_box: Box
    """There."""

    source_row: bool
    """That box is one row, which the tensor that is made has no dim for."""

    axes: Axes | None
    """From the source's to the one made; None: they lie alike."""


class Tiled(Source):
    """See above.

    Args:
      source: what is read.
      tiles: by the name of the tensor they make; they tile it.
      shapes: of the tensors that are made.
    """

    def __init__(
        self,
        source: Source,
        tiles: Mapping[str, Sequence[Tile]],
        shapes: Mapping[str, tuple[int, ...]],
    ):
        self._source, self._tiles = source, tiles
        given = source.tensors
        self._tensors = {
            name: Tensor(shapes[name], given[parts[0].source].dtype)
            for name, parts in tiles.items()
        }

    @property
    def where(self) -> str:
        """What it is read from."""
        return self._source.where

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by name."""
        return self._tensors

    def read(self, name: str, box: Box) -> np.ndarray:
        """The numbers of a box."""
        met = [(tile, overlap(tile.box, box)) for tile in self._tiles[name]]
        parts = [(tile, shared) for tile, shared in met if shared is not None]
        if len(parts) == 1 and parts[0][1] == box:
            return self._part(parts[0][0], box)
        out = np.empty(box_shape(box), self._tensors[name].dtype)
        for tile, shared in parts:
            out[index(inside(shared, box))] = self._part(tile, shared)
        return out

    def windows(self, name: str) -> Sequence[Box]:
        """Rows; all of what is turned, whose rows lie strewn over the source's."""
        tiles = self._tiles[name]
        if all(tile.axes is None for tile in tiles):
            return rows_of(self._tensors[name])
        if all(tile.row for tile in tiles):
            return [tile.box for tile in tiles]
        return [whole(self._tensors[name].shape)]

    def _part(self, tile: Tile, box: Box) -> np.ndarray:
        want = inside(box, tile.box)[tile.row :]
        need = want if tile.axes is None else tile.axes.needed(want)
        corner = [start for start, _ in tile.source_box[tile.source_row :]]
        read = shifted(need, corner)
        if tile.source_row:
            read = (tile.source_box[0], *read)
        array = self._source.read(tile.source, read)
        array = array[0] if tile.source_row else array
        array = array if tile.axes is None else tile.axes.apply(array, want)
        return array[None] if tile.row else array
