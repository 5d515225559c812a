"""Safetensors files: mapped to be read, streamed to be written.

    8 bytes: the header's length | JSON: name -> dtype, shape, offsets | numbers

Read and written here and not through the ``safetensors`` package: its writer wants all
tensors in memory at once, and its NumPy reader has no bfloat16.
"""

import dataclasses
import functools
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hexijax.weights.errors import WeightsError
from hexijax.weights.maps import Names, name_map
from hexijax.weights.source import Box, Source, Tensor, dtype_of, index

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODES = {name: code for code, name in _DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000
_ALIGN_BYTES = 8
_WRITE_BYTES = 16 * 2**20
INDEX = "model.safetensors.index.json"


class SafetensorsFile(Source):
    """One file."""

    def __init__(self, path: Path):
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        self._starts: dict[str, int] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise WeightsError(f"{path} cannot be read: {error}.") from error
        length = int.from_bytes(self._map[:8], "little")
        begin = 8 + length
        if length > _MAX_HEADER_BYTES or begin > len(self._map):
            raise self._broken(
                f"its header is to be {length:,} bytes long, the file is "
                f"{len(self._map):,}"
            )
        try:
            header = json.loads(self._map[8:begin])
            for name, entry in header.items():
                if name != "__metadata__":
                    self._add(name, entry, begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._broken(f"its header cannot be read ({error!r})") from error

    def _add(self, name: str, entry: Mapping[str, Any], begin: int) -> None:
        start, stop = entry["data_offsets"]
        if entry["dtype"] not in _DTYPES:
            raise self._broken(f"{name} has dtype {entry['dtype']!r}")
        tensor = Tensor(tuple(entry["shape"]), dtype_of(_DTYPES[entry["dtype"]]))
        room = len(self._map) - begin
        if stop - start != tensor.num_bytes or not 0 <= start <= stop <= room:
            raise self._broken(
                f"{name} {tensor} takes {tensor.num_bytes:,} bytes and is said to lie "
                f"at {start:,} to {stop:,} of {room:,}"
            )
        self._tensors[name], self._starts[name] = tensor, begin + start

    def _broken(self, why: str) -> WeightsError:
        return WeightsError(
            f"{self._path} is no whole safetensors file: {why}. Was it copied to its "
            "end?"
        )

    @property
    def where(self) -> str:
        """The file."""
        return str(self._path)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by name."""
        return self._tensors

    def read(self, name: str, box: Box) -> np.ndarray:
        """A view of the mapped file."""
        tensor = self._tensors[name]
        count, start = math.prod(tensor.shape), self._starts[name]
        flat = np.frombuffer(self._map, tensor.dtype, count, start)
        return flat.reshape(tensor.shape)[index(box)]


@dataclasses.dataclass(frozen=True)
class Safetensors(Source):
    """A safetensors file, or a folder of them.

        Experiment(init=weights.Safetensors("llama/", names="llama"), ...)

    ``names``: how they name parameters. ``llama``, ``gpt2``, ``bert`` or ``vit``:
    Hugging Face's names for the models of that family; a dict or a function from a
    parameter's path to a name or a ``weights.Named``; None: they are the paths, joined
    by '/' or '.'. ``under``: only what is below this name, which is left out.
    """

    path: str | Path
    names: Names = None
    under: str = ""

    @functools.cached_property
    def _held(self) -> Mapping[str, tuple[SafetensorsFile, str]]:
        """The file of each tensor, and its name there."""
        held: dict[str, tuple[SafetensorsFile, str]] = {}
        tops = (f"{self.under}.", f"{self.under}/") if self.under else ("",)
        for path in _paths(Path(self.path).expanduser()):
            file = SafetensorsFile(path)
            for full in file.tensors:
                if not full.startswith(tops):
                    continue
                name = full[len(tops[0]) :]
                if name in held:
                    raise WeightsError(
                        f"{full} is in two files, {held[name][0].where} and {path}. "
                        "Name the file, or the folder of one model."
                    )
                held[name] = file, full
        return held

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by the files' names."""
        return {name: file.tensors[full] for name, (file, full) in self._held.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A view of a mapped file."""
        file, full = self._held[name]
        return file.read(full, box)

    def fitted(self, wanted: Mapping[str, Tensor]) -> Source:
        """Under the model's names; see ``Source.fitted``."""
        names = name_map(self.names)
        return names.read(self, wanted) if names else Source.fitted(self, wanted)


def is_safetensors(path: Path) -> bool:
    """Whether a path seems to be a file of them, or a folder with some."""
    return path.suffix == ".safetensors" or any(path.glob("*.safetensors"))


def _paths(path: Path) -> list[Path]:
    """The files that a path stands for."""
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        try:
            shards = json.loads((path / INDEX).read_text())["weight_map"].values()
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(
                f"{path / INDEX} is no index of shards ({error!r}): it has a "
                "'weight_map', from tensor to file."
            ) from error
        files = [path / name for name in sorted({*shards})]
        gone = [str(file) for file in files if not file.is_file()]
        if gone:
            raise WeightsError(
                f"{path / INDEX} names files that are not there: {', '.join(gone)}."
            )
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        what = "has no *.safetensors in it" if path.is_dir() else "is not there"
        raise WeightsError(
            f"{path} {what} (looked from {Path.cwd()}). Name a file or its folder."
        )
    return files


def write(path: Path, source: Source, *, metadata: Mapping[str, str]) -> None:
    """Writes all of a source into one file, a window at a time; whole or not at all."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    stop = 0
    # Largest items first, so that every tensor is aligned to its own.
    order = sorted(source.tensors.items(), key=lambda x: (-x[1].dtype.itemsize, x[0]))
    for name, tensor in order:
        if tensor.dtype.name not in _CODES:
            raise WeightsError(
                f"{name} is {tensor}, a dtype that safetensors files do not have. "
                "Name another: --dtype float32."
            )
        start, stop = stop, stop + tensor.num_bytes
        header[name] = {
            "dtype": _CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in order:
                for box in source.windows(name):
                    _append(file, source.read(name, box), tensor.dtype)
        unfinished.replace(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _append(file: BinaryIO, window: np.ndarray, dtype: np.dtype) -> None:
    """Writes a window; it is gone when the next one is read."""
    for part in _slices(window):
        own = np.ascontiguousarray(part, dtype)
        file.write(own.reshape(-1).view(np.uint8).data)


def _slices(array: np.ndarray) -> list[np.ndarray]:
    """Runs of rows of some bytes: what is written next may have to be turned first."""
    if array.ndim == 0 or array.nbytes <= _WRITE_BYTES:
        return [array]
    rows = max(1, _WRITE_BYTES * len(array) // array.nbytes)
    return [array[i : i + rows] for i in range(0, len(array), rows)]
