"""The parameters in a run's checkpoint, whatever plan wrote it.

    run folder/checkpoints/<step>/state/   an Orbax folder of boxes
                                  meta/    JSON, whose "params" says which box is where

The index has a version of its own, so that reading needs neither plan nor engine.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hexijax.weights.errors import WeightsError
from hexijax.weights.orbax import Store
from hexijax.weights.source import (
    Box,
    Source,
    Tensor,
    box_shape,
    dtype_of,
    index,
    inside,
    overlap,
    rows_of,
)
from hexijax.weights.tree import Path as TreePath
from hexijax.weights.tree import from_json, name_of, to_json

INDEX_VERSION = 1
CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A parameter, and the arrays that its boxes are."""

    path: TreePath
    """In the model's tree."""

    tensor: Tensor
    """Shape and dtype of all of it."""

    pieces: Mapping[str, Box]
    """Key in the checkpoint -> box; they tile the parameter."""

    came_as: str = ""
    """Dtype of the weights the run began with; empty: they were made."""


def index_json(params: list[Stored]) -> dict[str, Any]:
    """The index, for a checkpoint's meta."""
    return {
        "version": INDEX_VERSION,
        "params": [
            {
                "path": to_json(stored.path),
                "shape": list(stored.tensor.shape),
                "dtype": stored.tensor.dtype.name,
                "came_as": stored.came_as,
                "pieces": {k: [list(r) for r in b] for k, b in stored.pieces.items()},
            }
            for stored in params
        ],
    }


def index_from(data: Mapping[str, Any]) -> list[Stored]:
    """The index that ``index_json`` wrote."""
    return [
        Stored(
            path=from_json(entry["path"]),
            tensor=Tensor(tuple(entry["shape"]), dtype_of(entry["dtype"])),
            pieces={
                key: tuple((start, stop) for start, stop in box)
                for key, box in entry["pieces"].items()
            },
            came_as=entry["came_as"],
        )
        for entry in data["params"]
    ]


@dataclasses.dataclass(frozen=True)
class Run(Source):
    """The parameters of a run of ``hexijax run``.

    ``path``: the run's folder, or one step's in its ``checkpoints``. ``step``: None:
    the newest.
    """

    path: str | Path
    step: int | None = None

    @functools.cached_property
    def folder(self) -> Path:
        """The step's folder."""
        return find_step(Path(self.path).expanduser(), self.step)

    @functools.cached_property
    def stored(self) -> Mapping[str, Stored]:
        """The index by name."""
        file = self.folder / "meta" / "metadata"
        try:
            found = json.loads(file.read_text()).get("params")
        except (OSError, ValueError, AttributeError) as error:
            raise WeightsError(
                f"{self.folder} is no checkpoint of a hexijax run: {file} cannot be "
                f"read ({error})."
            ) from error
        version = (found or {}).get("version")
        if version != INDEX_VERSION:
            raise WeightsError(
                f"The checkpoint {self.folder} has an index of parameters of version "
                f"{version}; this hexijax reads version {INDEX_VERSION}. Resume the "
                "run for a step with this hexijax, which saves it anew."
            )
        return {name_of(stored.path): stored for stored in index_from(found)}

    @functools.cached_property
    def _store(self) -> Store:
        store = Store(self.folder / "state")
        # Keys of the checkpoint's flat dict: one component, whatever is in it.
        assert all(len(path) == 1 for path in store.paths.values())
        return store

    @property
    def where(self) -> str:
        """The step's folder."""
        return str(self.folder)

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by path."""
        return {name: stored.tensor for name, stored in self.stored.items()}

    @property
    def paths(self) -> Mapping[str, TreePath]:
        """Where each parameter is in the tree."""
        return {name: stored.path for name, stored in self.stored.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box, put together from those that the plan's devices held."""
        stored = self.stored[name]
        out = np.empty(box_shape(box), stored.tensor.dtype)
        for key, held in stored.pieces.items():
            both = overlap(held, box)
            if both is not None:
                part = out[index(inside(both, box))]
                self._store.read_into(part, key, inside(both, held))
        return out

    def windows(self, name: str) -> list[Box]:
        """Runs of rows, in few enough that chunks are not decoded over and over."""
        return rows_of(self.tensors[name])


def is_run(path: Path) -> bool:
    """Whether a path is a run's folder or a step's."""
    return (path / CHECKPOINTS).is_dir() or (path / "meta" / "metadata").is_file()


def find_step(path: Path, step: int | None) -> Path:
    """The folder of a step of a run.

    Raises:
      WeightsError: there is none.
    """
    if (path / "meta" / "metadata").is_file() and step is None:
        return path
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = [int(p.name) for p in folder.glob("*") if p.name.isdigit()]
    if step is None and steps:
        return folder / str(max(steps))
    if step is not None and step in steps:
        return folder / str(step)
    if not path.is_dir():
        raise WeightsError(f"There is no run {path} (looked from {Path.cwd()}).")
    if not steps:
        raise WeightsError(
            f"The run {path} has no checkpoint, so its parameters are gone. A run "
            "saves them at its end, unless it was told --no-save, and every N steps "
            "with --save-every N."
        )
    raise WeightsError(
        f"The run {path} has no step {step}; saved are "
        f"{', '.join(map(str, sorted(steps)))}. Name one with --step."
    )
