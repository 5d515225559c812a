"""Other libraries' names for the parameters of our models, both ways.

    tensors under their names --NameMap.read----> the same under ours
    parameters under ours     --NameMap.written-> the same under theirs

A map is a table: our path -> their name, how dims lie there, and which part of a fused
tensor it is. ``*`` stands for a layer's number. Both directions, and which box of the
one answers a box of the other, follow from the table; a parameter that we hold stacked
over layers is one row of ours for each tensor of theirs.
"""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hexijax.weights.axes import Axes
from hexijax.weights.errors import WeightsError
from hexijax.weights.fit import Renamed, check
from hexijax.weights.source import Box, Source, Tensor, rows_of, whole
from hexijax.weights.tiles import Tile, Tiled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """What a parameter of ours is in the other library's files."""

    name: str
    """Their name; ``*`` is the layer's number."""

    axes: str = ""
    """``theirs -> ours``, as ``o i -> i o``; empty: it lies there as here."""

    part: tuple[int, int, int] | None = None
    """(dim, which, of how many) equal parts of their tensor; None: all of it."""

    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Rows of axes that our shape cannot tell."""

    square: tuple[str, ...] = ()
    """Two axes of one size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A box of ours and a box of theirs that hold the same numbers."""

    ours: str
    ours_box: Box
    row: bool
    """Ours is one row of a stacked parameter."""
    theirs: str
    theirs_box: Box
    theirs_shape: tuple[int, ...]
    axes: Axes | None


Table = Mapping[str, "str | Named"]
Function = Callable[[str], "str | Named | None"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NameMap:
    """See above."""

    table: Table | Function
    """Our path -> theirs; a function gets the path with its numbers."""

    prefix: str = ""
    """What some files leave out at the front of their names."""

    old: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Last part of a name in old files -> the one in the table."""

    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Their name of a tensor that repeats another -> that other."""

    unused: Sequence[str] = ()
    """Patterns of their tensors that our models have no use for."""

    name: str = "a map of your own"
    """For messages."""

    def read(self, source: Source, wanted: Mapping[str, Tensor]) -> Source:
        """A source with their names as one with ours.

        Raises:
          WeightsError: what is there does not fit, all named at once.
        """
        links = self.links(wanted)
        expected = _theirs(links, {name: t.dtype for name, t in wanted.items()})
        spelled = {self._canonical(name, expected): name for name in source.tensors}
        given = Renamed(source, spelled)
        tensors = {
            name: tensor
            for name, tensor in given.tensors.items()
            if name in expected or not self._unused(name, given)
        }
        ours = {link.theirs: link.ours for link in links}
        hint = self._hint(tensors, expected)
        check(source.where, tensors, expected, also=ours, way_out=hint)
        tiles: dict[str, list[Tile]] = {}
        for link in links:
            tile = Tile(
                box=link.ours_box,
                row=link.row,
                source=link.theirs,
                source_box=link.theirs_box,
                source_row=False,
                axes=link.axes,
            )
            tiles.setdefault(link.ours, []).append(tile)
        return Tiled(given, tiles, {name: t.shape for name, t in wanted.items()})

    def written(self, source: Source) -> Source:
        """A source with our names as one with theirs.

        Raises:
          WeightsError: a parameter has no name there.
        """
        links = self.links(source.tensors)
        dtypes = {name: t.dtype for name, t in source.tensors.items()}
        shapes = {name: t.shape for name, t in _theirs(links, dtypes).items()}
        tiles: dict[str, list[Tile]] = {}
        for link in links:
            tile = Tile(
                box=link.theirs_box,
                row=False,
                source=link.ours,
                source_box=link.ours_box,
                source_row=link.row,
                axes=link.axes.back if link.axes else None,
            )
            tiles.setdefault(link.theirs, []).append(tile)
        for name, parts in tiles.items():
            held = sum(math.prod(b - a for a, b in tile.box) for tile in parts)
            if held != math.prod(shapes[name]):
                raise WeightsError(
                    f"{name} of {self.name} is made of several parameters, and the "
                    f"model of {source.where} has only "
                    f"{', '.join(tile.source for tile in parts)}. Choose the map of "
                    "the model's own family, or write without one."
                )
        return Tiled(source, tiles, shapes)

    def links(self, wanted: Mapping[str, Tensor]) -> list[Link]:
        """Which boxes are the same, for parameters of these shapes."""
        links: list[Link] = []
        unknown: list[str] = []
        for name, tensor in wanted.items():
            named, layer = self._look_up(name)
            if named is None:
                unknown.append(f"  {name} {tensor}")
            else:
                links += self._links_of(name, tensor, named, layer)
        if unknown:
            raise WeightsError(
                f"{self.name} has no name for {len(unknown)} of the model's "
                f"{len(wanted)} parameters:\n"
                + "\n".join(unknown)
                + "\nIt is the map of the model of that family in models/. Give an own "
                "map, names={path: name, ...}, or none for files that name parameters "
                "by their paths."
            )
        return links

    def _look_up(self, name: str) -> tuple[Named | None, str | None]:
        """Their name of a parameter, and its layer's number; None: stacked, or none."""
        starred, found = re.subn(r"[/_](\d+)/", "/*/", name, count=1)
        layer = re.search(r"[/_](\d+)/", name)
        if callable(self.table):
            named = self.table(name)
        elif found:
            named = self.table.get(starred, self.table.get(name))
        else:
            stacked = {key.replace("/*/", "/"): key for key in self.table}
            named = self.table.get(stacked.get(name, name))
        if isinstance(named, str):
            named = Named(name=named)
        return named, layer[1] if layer else None

    def _links_of(
        self, name: str, tensor: Tensor, named: Named, layer: str | None
    ) -> list[Link]:
        stacked = "*" in named.name and layer is None
        shape = tensor.shape[1:] if stacked else tensor.shape
        axes = None
        if named.axes:
            given = Axes(named.axes, named.sizes, named.square)
            try:
                axes = given.sized(shape, right=True)
            except ValueError as error:
                raise WeightsError(
                    f"{self.name} cannot turn {name} {tensor} into {named.name}: "
                    f"{error}. Choose the map of the model's own family."
                ) from error
        theirs_shape = list(axes.shape(right=False) if axes else shape)
        theirs_box = list(whole(theirs_shape))
        if named.part:
            dim, which, parts = named.part
            rows = theirs_shape[dim]
            theirs_box[dim] = (which * rows, (which + 1) * rows)
            theirs_shape[dim] = parts * rows
        rows = range(tensor.shape[0]) if stacked else [None]
        return [
            Link(
                ours=name,
                ours_box=whole(tensor.shape)
                if row is None
                else ((row, row + 1), *whole(shape)),
                row=row is not None,
                theirs=named.name.replace("*", str(layer if row is None else row)),
                theirs_box=tuple(theirs_box),
                theirs_shape=tuple(theirs_shape),
                axes=axes,
            )
            for row in rows
        ]

    def _canonical(self, name: str, expected: Mapping[str, Tensor]) -> str:
        """How the table spells a name of a file, if it has it."""
        head, dot, last = name.rpartition(".")
        for spelled in (name, f"{head}{dot}{self.old.get(last, last)}"):
            for candidate in (spelled, self.prefix + spelled):
                if candidate in expected:
                    return candidate
        return name

    def _unused(self, name: str, given: Source) -> bool:
        """Whether a tensor of a file may be left there."""
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unused):
            return True
        other = self.copies.get(name)
        return (
            other in given.tensors
            and given.tensors[other] == given.tensors[name]
            and all(
                np.array_equal(given.read(name, box), given.read(other, box))
                for box in rows_of(given.tensors[name])
            )
        )

    def _hint(self, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
        for name, other in self.copies.items():
            if name in given and name not in expected:
                return (
                    f"{name} is not the same as {other}, so it is of use: build the "
                    "model with a head of its own (tied=False)."
                )
            if name in expected and name not in given:
                return (
                    f"These weights have no {name}, as those do that use {other} for "
                    "it: build the model so (tied=True)."
                )
        return ""


def _theirs(links: Sequence[Link], dtypes: Mapping[str, np.dtype]) -> dict[str, Tensor]:
    """Their tensors, with our dtypes."""
    return {x.theirs: Tensor(x.theirs_shape, dtypes[x.ours]) for x in links}
