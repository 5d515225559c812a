"""An array as an Orbax folder holds it: a Zarr array in chunks, each with its crc32c.

    array -> write -> key/zarr.json, key/c.0.0  ->  StoredArray, with the crc32c of each
    StoredArray, box -> read -> the chunks it meets, each checked -> numbers

TensorStore encodes, checks and decodes. A chunk that is gone would be read as zeros and
one of another step passes its own check, so each is also held against the manifest's.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hexijax.weights.errors import Damaged
from hexijax.weights.memory import give_back_freed
from hexijax.weights.orbax import few_chunks
from hexijax.weights.source import Box, Tensor, box_shape, index, inside, whole
from hexijax.weights.stored.files import Files, Rate

CHUNK_BYTES = 8 * 2**20
"""Of an array: whoever reads any of it reads and checks no more than this for it."""

SMALL_BYTES = 2**20
"""No memory is asked back for less."""

CRC_BYTES = 4
"""A chunk's last bytes: the crc32c of the others."""

_CONTEXT = {
    "cache_pool": {"total_bytes_limit": 0},
    "data_copy_concurrency": {"limit": 4},
    "file_io_concurrency": {"limit": 4},
    # A torn chunk is seen, and an older step taken: no wait for the disk at each.
    "file_io_sync": False,
}
"""Of TensorStore: what it may hold must not grow with a host's cores."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """What a manifest knows of an array."""

    key: str
    """Of its folder."""

    tensor: Tensor
    """Shape and dtype."""

    chunk: tuple[int, ...]
    """Rows of a chunk by dim."""

    crc32c: tuple[int, ...]
    """Of each chunk as it is stored, the last dim's chunks first after one another."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Zarr's."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.tensor.shape),
            "data_type": self.tensor.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(self.chunk)},
            },
            # A file a chunk beside the metadata: folders cost more than small files.
            "chunk_key_encoding": {
                "name": "default",
                "configuration": {"separator": "."},
            },
            "fill_value": False if self.tensor.dtype.kind == "b" else 0,
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        }

    def chunks(self, box: Box) -> Iterator[tuple[int, str, Box]]:
        """Those that a box meets: number, key, and the part of the array each is."""
        counts = _counts(self.tensor.shape, self.chunk)
        met = [
            range(start // rows, -(-stop // rows))
            for (start, stop), rows in zip(box, self.chunk, strict=True)
        ]
        for at in itertools.product(*met):
            number = 0
            for i, count in zip(at, counts, strict=True):
                number = number * count + i
            part = tuple(
                (i * rows, min((i + 1) * rows, of))
                for i, rows, of in zip(at, self.chunk, self.tensor.shape, strict=True)
            )
            yield number, f"{self.key}/{'.'.join(['c', *map(str, at)])}", part

    def sums(self) -> Iterator[tuple[str, int]]:
        """Key and crc32c of each chunk."""
        if self.crc32c:
            for number, name, _ in self.chunks(whole(self.tensor.shape)):
                yield name, self.crc32c[number]


def chunk_shape(tensor: Tensor, limit_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Chunks of at most some bytes: runs of rows, of columns where a row is more."""
    shape, rest = list(tensor.shape), tensor.num_bytes
    for dim, rows in enumerate(tensor.shape):
        if rest <= limit_bytes:
            break
        a_row = rest // rows
        shape[dim] = max(1, limit_bytes // a_row)
        rest = a_row
    return tuple(max(1, rows) for rows in shape)


def write(
    files: Files, key: str, array: np.ndarray, rate: Rate | None = None
) -> StoredArray:
    """Writes an array, a chunk after another.

    Raises:
      OSError: it cannot be written.
    """
    tensor = Tensor(tuple(array.shape), np.dtype(array.dtype))
    stored = StoredArray(key=key, tensor=tensor, chunk=chunk_shape(tensor), crc32c=())
    if not array.size:
        return stored
    put = _Direct(files, stored) if files.spec is not None else _Staged(files, stored)
    found = []
    for _, name, part in stored.chunks(whole(tensor.shape)):
        piece = np.asarray(array[index(part)], order="C")
        if rate is not None:
            rate.take(piece.nbytes)
        found.append(put.write(name, part, piece))
        if piece.nbytes > SMALL_BYTES:
            give_back_freed()
    return dataclasses.replace(stored, crc32c=tuple(found))


def read(
    files: Files, stored: StoredArray, box: Box, rate: Rate | None = None
) -> np.ndarray:
    """A box of an array.

    Raises:
      Damaged: a chunk that it meets is gone, or not what was written.
    """
    out = np.empty(box_shape(box), stored.tensor.dtype)
    if not out.size:
        return out
    get = _Direct(files, stored) if files.spec is not None else _Staged(files, stored)
    for part in few_chunks(box, stored.chunk, out.itemsize):
        for number, name, _ in stored.chunks(part):
            _check(files, name, stored.crc32c[number])
        if rate is not None:
            rate.take(math.prod(box_shape(part)) * out.itemsize)
        try:
            out[index(inside(part, box))] = get.read(part)
        except (OSError, ValueError) as error:
            raise Damaged(
                f"{files.where}: {stored.key} cannot be read "
                f"({str(error).splitlines()[0][:300]})."
            ) from error
    if out.nbytes > SMALL_BYTES:
        give_back_freed()
    return out


def copy(
    source: Files, target: Files, name: str, crc32c: int, rate: Rate | None = None
) -> None:
    """A stored chunk as it is, checked against the manifest's crc32c.

    Raises:
      Damaged: the source has another.
      OSError: the target cannot be written.
    """
    data = _got(source, name, crc32c)
    if rate is not None:
        rate.take(len(data))
    target.put(name, data)


def describe(files: Files, stored: StoredArray) -> None:
    """Zarr's own word of an array beside its chunks, if it has any."""
    if stored.crc32c:
        files.put(f"{stored.key}/zarr.json", _json(stored))


def _got(files: Files, name: str, crc32c: int) -> bytes:
    try:
        data = files.get(name)
    except OSError as error:
        raise Damaged(f"{files.where}: {name} cannot be read ({error}).") from error
    if _number(data[-CRC_BYTES:]) != crc32c:
        raise _other(files, name, crc32c, data[-CRC_BYTES:])
    return data


def _check(files: Files, name: str, crc32c: int) -> None:
    try:
        tail = files.tail(name, CRC_BYTES)
    except OSError as error:
        raise Damaged(f"{files.where}: {name} cannot be read ({error}).") from error
    if _number(tail) != crc32c:
        raise _other(files, name, crc32c, tail)


def _other(files: Files, name: str, crc32c: int, found: bytes) -> Damaged:
    return Damaged(
        f"{files.where}: {name} is not what was written: its crc32c is "
        f"{_number(found):08x}, the manifest's {crc32c:08x}."
    )


def _number(tail: bytes) -> int:
    return int.from_bytes(tail, "little")


def _json(stored: StoredArray) -> bytes:
    import json

    return json.dumps(stored.metadata).encode()


def _counts(shape: tuple[int, ...], chunk: tuple[int, ...]) -> list[int]:
    return [-(-of // rows) for of, rows in zip(shape, chunk, strict=True)]


@functools.cache
def _context() -> Any:
    """One for all: its limits are for all threads together."""
    import tensorstore

    return tensorstore.Context(_CONTEXT)


def _opened(spec: Mapping[str, Any], stored: StoredArray, *, context: Any) -> Any:
    import tensorstore

    return tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {**spec, "path": f"{spec.get('path', '')}{stored.key}/"},
            "metadata": stored.metadata,
            "assume_metadata": True,
            # Zeros are numbers too: what was not written could not be told from them.
            "store_data_equal_to_fill_value": True,
        },
        context=context,
    ).result()


class _Direct:
    """Chunks of an array where TensorStore reaches."""

    def __init__(self, files: Files, stored: StoredArray):
        assert files.spec is not None
        self._files, self._stored = files, stored
        self._array = _opened(files.spec, stored, context=_context())
        self._named = False

    def write(self, name: str, part: Box, piece: np.ndarray) -> int:
        """A chunk; returns its crc32c."""
        if not self._named:
            self._files.put(f"{self._stored.key}/zarr.json", _json(self._stored))
            self._named = True
        try:
            self._array[index(part)].write(piece).result()
        except ValueError as error:
            raise OSError(
                f"{self._files.where}: {name} cannot be written "
                f"({str(error).splitlines()[0][:300]})"
            ) from error
        return _number(self._files.tail(name, CRC_BYTES))

    def read(self, part: Box) -> np.ndarray:
        """Some of it."""
        return self._array[index(part)].read().result()


class _Staged:
    """The same through memory, file by file."""

    def __init__(self, files: Files, stored: StoredArray):
        self._files, self._stored = files, stored
        self._named = False

    def _memory(self) -> Any:
        import tensorstore

        context = tensorstore.Context(_CONTEXT)  # its memory is its own
        return _opened({"driver": "memory"}, self._stored, context=context)

    def write(self, name: str, part: Box, piece: np.ndarray) -> int:
        """A chunk; returns its crc32c."""
        if not self._named:
            self._files.put(f"{self._stored.key}/zarr.json", _json(self._stored))
            self._named = True
        array = self._memory()
        array[index(part)].write(piece).result()
        at = name.removeprefix(f"{self._stored.key}/")
        data = bytes(array.kvstore.read(at).result().value)
        self._files.put(name, data)
        return _number(data[-CRC_BYTES:])

    def read(self, part: Box) -> np.ndarray:
        """Some of it."""
        array = self._memory()
        for _, name, _ in self._stored.chunks(part):
            at = name.removeprefix(f"{self._stored.key}/")
            array.kvstore.write(at, self._files.get(name)).result()
        return array[index(part)].read().result()
