"""A run's parameters in a form that others read.

run folder -> Run -> (dtypes) -> (another library's names) -> Orbax folder or file

Streamed: what is in memory is a tensor of the file at most, most often a few rows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hexijax.errors import UserError
from hexijax.weights import orbax, safetensors
from hexijax.weights.fit import Renamed
from hexijax.weights.maps import Names, name_map
from hexijax.weights.runs import Run
from hexijax.weights.source import Box, Source, Tensor, dtype_of

ORBAX, SAFETENSORS = "orbax", "safetensors"

CAME_AS = "came-as"
"""The dtype in which each parameter came into the run; its own where it was made."""

PLAIN_FILE = "model.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    """Where it lies."""

    step: int
    """Steps the run had done."""

    tensors: Mapping[str, Tensor]
    """What it holds, by its names there."""

    narrowed: int
    """How many parameters lost digits on the way, unasked."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


class Cast(Source):
    """A source in other dtypes."""

    def __init__(self, source: Source, dtypes: Mapping[str, np.dtype]):
        self._source, self._dtypes = source, dtypes

    @property
    def where(self) -> str:
        """What it is read from."""
        return self._source.where

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by name."""
        given = self._source.tensors
        return {name: Tensor(t.shape, self._dtypes[name]) for name, t in given.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box; whoever writes it casts it, row by row."""
        return self._source.read(name, box)

    def windows(self, name: str) -> Sequence[Box]:
        """Those of the source."""
        return self._source.windows(name)


def export(
    run: str | Path,
    to: str,
    *,
    out: str | Path | None = None,
    names: Names = None,
    step: int | None = None,
    dtype: str = CAME_AS,
) -> Exported:
    """Writes a run's parameters as an Orbax folder or a safetensors file.

    Args:
        run: the run's folder.
        to: ``orbax`` or ``safetensors``.
        out: the folder, or a file that ends in .safetensors; None: in the run's folder.
        names: of another library, as in ``weights.Safetensors``; safetensors only.
        step: whose checkpoint is read; None: the newest.
        dtype: of the floats; ``came-as``: that of the weights the run began with, and
            of the parameters as they were trained where it made them.

    Raises:
      UserError: there is no such run, or it cannot be written so.
    """
    source = Run(run, step)
    if to not in (ORBAX, SAFETENSORS):
        raise UserError(
            f"--to {to}: parameters can be written as {ORBAX} or {SAFETENSORS}."
        )
    if names is not None and to == ORBAX:
        raise UserError(
            f"--names {names} goes with --to {SAFETENSORS}: an Orbax folder holds the "
            "tree as the Flax module names it."
        )
    path = Path(run) / to if out is None else Path(out).expanduser()
    if to == SAFETENSORS and path.suffix != ".safetensors":
        path = path / PLAIN_FILE
    if path.exists():
        raise UserError(
            f"{path} is there already. Name another with --out, or remove it."
        )
    written = cast = _cast(source, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    if to == ORBAX:
        orbax.write(path, written, source.paths)
    else:
        written = write_safetensors(path, written, names)
    narrowed = [
        name
        for name, tensor in cast.tensors.items()
        if tensor.dtype.itemsize < source.tensors[name].dtype.itemsize
    ]
    return Exported(
        path=path,
        step=source.found_step,
        tensors=written.tensors,
        narrowed=len(narrowed) if dtype == CAME_AS else 0,
    )


def write_safetensors(path: Path, source: Source, names: Names = None) -> Source:
    """Writes a source into a file under other names; returns what was written.

    Without names they are the parameters' paths, joined by '.', as transformers' Flax
    models name theirs.
    """
    map_ = name_map(names)
    dotted = {name.replace("/", "."): name for name in source.tensors}
    written = map_.written(source) if map_ else Renamed(source, dotted)
    safetensors.write(path, written, metadata={"format": "pt" if map_ else "flax"})
    return written


def _cast(source: Run, dtype: str) -> Source:
    """A run's parameters in the dtype asked for; integers stay what they are."""

    def of(name: str, tensor: Tensor) -> np.dtype:
        if tensor.dtype.kind in "biu":
            return tensor.dtype
        came_as = source.stored[name].came_as
        if dtype != CAME_AS:
            return dtype_of(dtype)
        return dtype_of(came_as) if came_as else tensor.dtype

    return Cast(source, {name: of(name, t) for name, t in source.tensors.items()})
