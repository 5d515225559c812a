"""Orbax folders: read box by box, and written as Orbax itself would restore them.

    folder/_METADATA             JSON: the paths
    folder/manifest.ocdbt, d/    an OCDBT store: for each path a Zarr array

Through TensorStore and not through ``orbax.checkpoint``, which reads and saves whole
arrays, all of them at once, and imports JAX.
"""

import dataclasses
import functools
import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hexijax.weights.errors import WeightsError
from hexijax.weights.maps import Names, name_map
from hexijax.weights.memory import give_back_freed
from hexijax.weights.source import (
    Box,
    Source,
    Tensor,
    box_shape,
    dtype_of,
    index,
    inside,
    rows_of,
)
from hexijax.weights.tree import Item, name_of
from hexijax.weights.tree import Path as TreePath

METADATA = "_METADATA"
CHUNK_BYTES = 4 * 2**20
"""Of an array in the store: what is decoded at once to read any of it."""

READ_BYTES = 2 * CHUNK_BYTES
"""Read or written at once, where an array has more than one chunk."""

_CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    # Each thread keeps what it has decoded with: as large as a chunk, for good.
    "data_copy_concurrency": {"limit": 2},
    "file_io_concurrency": {"limit": 2},
}
"""Of TensorStore: what it may hold must not grow with a host's cores."""

_ITEM, _KEY = 1, 2
"""Orbax's numbers for a list's and a dict's component."""

HANDLER = (
    "orbax.checkpoint._src.handlers.standard_checkpoint_handler."
    "StandardCheckpointHandler"
)


class Store:
    """The arrays of an Orbax folder by their key in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            metadata = json.loads((folder / METADATA).read_text())
            self.paths: dict[str, TreePath] = {}
            for entry in metadata["tree_metadata"].values():
                keys = entry["key_metadata"]
                if entry["value_metadata"].get("value_type") not in ("None", "Dict"):
                    key = ".".join(str(x["key"]) for x in keys)
                    self.paths[key] = tuple(
                        Item(int(x["key"])) if x["key_type"] == _ITEM else str(x["key"])
                        for x in keys
                    )
            self._ocdbt = metadata.get("use_ocdbt", True)
            self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(
                f"{folder} is no Orbax folder that can be read: {METADATA} there is "
                f"not what Orbax writes ({error!r})."
            ) from error

    @functools.cached_property
    def _open(self) -> dict[str, Any]:
        import tensorstore

        context = tensorstore.Context(_CONTEXT)
        specs = {key: self._spec(key) for key in self.paths}
        opening = {
            key: tensorstore.open(spec, open=True, read=True, context=context)
            for key, spec in specs.items()
        }
        try:
            return {key: future.result() for key, future in opening.items()}
        except ValueError as error:
            raise WeightsError(
                f"{self.folder} cannot be read: {error}. Was it copied to its end?"
            ) from error

    def _spec(self, key: str) -> dict[str, Any]:
        base = f"file://{self.folder.resolve()}/"
        kvstore = (
            {"driver": "ocdbt", "base": base, "path": f"{key}/"}
            if self._ocdbt
            else {"driver": "file", "path": f"{self.folder.resolve()}/{key}/"}
        )
        return {"driver": self._driver, "kvstore": kvstore}

    def tensor(self, key: str) -> Tensor:
        """Shape and dtype of an array."""
        array = self._open[key]
        return Tensor(tuple(array.shape), dtype_of(array.dtype.name))

    def read(self, key: str, box: Box) -> np.ndarray:
        """A box of an array."""
        out = np.empty(box_shape(box), self.tensor(key).dtype)
        self.read_into(out, key, box)
        return out

    def read_into(self, out: np.ndarray, key: str, box: Box) -> None:
        """A box of an array into one of its shape.

        A few chunks at a time: TensorStore holds all those of one read at once, encoded
        and decoded, beside what it makes of them, and frees them in other threads.
        """
        array = self._open[key]
        chunk = array.chunk_layout.read_chunk.shape or array.shape
        for part in few_chunks(box, chunk, out.itemsize):
            out[index(inside(part, box))] = array[index(part)].read().result()
            give_back_freed()


@dataclasses.dataclass(frozen=True)
class Orbax(Source):
    """A tree that Orbax saved.

        Experiment(init=weights.Orbax("pretrained/", under="params"), ...)

    ``under``: only what is below this path, which is left out. ``names``: see
    ``Safetensors``.
    """

    path: str | Path
    under: str = ""
    names: Names = None

    @functools.cached_property
    def _store(self) -> Store:
        return Store(find(Path(self.path).expanduser()))

    @functools.cached_property
    def _keys(self) -> Mapping[str, str]:
        """The store's key of each name."""
        top = f"{self.under.strip('/')}/" if self.under else ""
        named = {name_of(path): key for key, path in self._store.paths.items()}
        return {
            name.removeprefix(top): key
            for name, key in named.items()
            if name.startswith(top)
        }

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.path)

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by path."""
        return {name: self._store.tensor(key) for name, key in self._keys.items()}

    @property
    def paths(self) -> Mapping[str, TreePath]:
        """Where each is in the tree."""
        deep = len(self.under.strip("/").split("/")) if self.under else 0
        return {name: self._store.paths[k][deep:] for name, k in self._keys.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box, decoded."""
        return self._store.read(self._keys[name], box)

    def fitted(self, wanted: Mapping[str, Tensor]) -> Source:
        """Under the model's names; see ``Source.fitted``."""
        names = name_map(self.names)
        return names.read(self, wanted) if names else Source.fitted(self, wanted)


def few_chunks(box: Box, chunk: Sequence[int], item_bytes: int) -> Iterator[Box]:
    """Boxes that tile ``box``, cut between chunks: each meets one chunk, or few enough
    that they are ``READ_BYTES`` together."""
    met = [-(-b // size) - a // size for (a, b), size in zip(box, chunk, strict=True)]
    if math.prod(met) * math.prod(chunk) * item_bytes > READ_BYTES:
        for dim, (start, stop) in enumerate(box):
            first, last = start // chunk[dim] + 1, (stop - 1) // chunk[dim]
            if first <= last:
                edge = (first + last) // 2 * chunk[dim]
                for rows in ((start, edge), (edge, stop)):
                    half = (*box[:dim], rows, *box[dim + 1 :])
                    yield from few_chunks(half, chunk, item_bytes)
                return
    yield box


def find(folder: Path) -> Path:
    """The folder of arrays that a path means: it, or the only one below.

    Raises:
      WeightsError: there is none, or a choice.
    """
    if (folder / METADATA).is_file():
        return folder
    found = [*folder.glob(f"*/{METADATA}"), *folder.glob(f"*/*/{METADATA}")]
    below = sorted(file.parent for file in found)
    if len(below) == 1:
        return below[0]
    if not below:
        what = f"has no {METADATA} in it" if folder.is_dir() else "is not there"
        raise WeightsError(
            f"{folder} {what} (looked from {Path.cwd()}). An Orbax folder has one; "
            "name the folder that was saved to."
        )
    raise WeightsError(
        f"{folder} holds {len(below)} Orbax folders. Name one of them: "
        f"{', '.join(map(str, below))}."
    )


def write(folder: Path, source: Source, paths: Mapping[str, TreePath]) -> None:
    """Writes all of a source as a tree that Orbax restores, a window at a time.

    The folder takes its name when it is whole.
    """
    unfinished = folder.with_name(f".{folder.name}.orbax-checkpoint-tmp")
    try:
        unfinished.mkdir(parents=True)
        for name in source.tensors:
            _write_array(unfinished, ".".join(map(_text, paths[name])), source, name)
        tree = {str(tuple(map(_text, path))): entry(path) for path in paths.values()}
        (unfinished / METADATA).write_text(
            json.dumps(
                {
                    "tree_metadata": tree,
                    "use_ocdbt": True,
                    "use_zarr3": False,
                    "store_array_data_equal_to_fill_value": True,
                    "custom_metadata": None,
                }
            )
        )
        (unfinished / "_CHECKPOINT_METADATA").write_text(
            json.dumps(
                {
                    "item_handlers": HANDLER,
                    "metrics": {},
                    "performance_metrics": {},
                    "init_timestamp_nsecs": time.time_ns(),
                    "commit_timestamp_nsecs": time.time_ns(),
                    "custom_metadata": {},
                }
            )
        )
        unfinished.rename(folder)
    except OSError as error:
        raise WeightsError(f"{folder} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_array(folder: Path, key: str, source: Source, name: str) -> None:
    import tensorstore

    tensor = source.tensors[name]
    chunk = rows_of(tensor, CHUNK_BYTES)[0]
    array = tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{folder.resolve()}/",
                "path": f"{key}/",
            },
            "metadata": {
                "compressor": {"id": "zstd", "level": 1},
                "chunks": [max(1, stop - start) for start, stop in chunk],
                "shape": list(tensor.shape),
            },
            # Zeros are numbers too: what was not written could not be told from them.
            "store_data_equal_to_fill_value": True,
        },
        create=True,
        dtype=tensorstore.dtype(tensor.dtype),
        context=tensorstore.Context(_CONTEXT),
    ).result()
    rows = chunk[0][1] * (READ_BYTES // CHUNK_BYTES) if chunk else 0
    for box in source.windows(name):
        _write_window(array, source.read(name, box), box, tensor.dtype, rows)


def _write_window(
    array: Any, window: np.ndarray, box: Box, dtype: np.dtype, rows: int
) -> None:
    """Writes a window, some rows at a time; it is gone when the next one is read."""
    if not box:
        array.write(window).result()
        return
    start, stop = box[0]
    # By whole chunks, or each would be read back and written twice.
    edges = [start, *range(-(-(start + 1) // rows) * rows, stop, rows), stop]
    for a, b in itertools.pairwise(edges):
        part = np.ascontiguousarray(window[a - start : b - start], dtype)
        array[a:b].write(part).result()
        give_back_freed()


def entry(path: TreePath) -> dict[str, Any]:
    """What a folder's metadata says of an array at a path."""
    return {
        "key_metadata": [
            {"key": _text(c), "key_type": _ITEM if isinstance(c, Item) else _KEY}
            for c in path
        ],
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }


def _text(component: "str | int | Item") -> str:
    return str(component.place if isinstance(component, Item) else component)
