"""Files by key, at a path or URL: whole or not at all.

    "runs/gpt-001/checkpoints" -> Folder
    "gs://bucket/run", "s3://..." -> Objects   what TensorStore has a driver for
    "hdfs://...", "memory://..." -> Fsspec     what fsspec knows besides

Keys are joined by '/'. Arrays go through TensorStore where ``spec`` says how.
"""

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from hexijax.errors import UserError

_SCHEMES = ("gs", "gcs", "s3", "http", "https")
"""Of TensorStore's, those that are object stores."""


@runtime_checkable
class Files(Protocol):
    """What a place of stored steps can do."""

    @property
    def where(self) -> str:
        """The path or URL."""
        ...

    @property
    def spec(self) -> "Mapping[str, Any] | None":
        """TensorStore's key-value store; None: it has none, files go through here."""
        ...

    def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """Writes a file; readers see all of it or none.

        ``durable``: it is there after a power cut, too, once this returns.
        """
        ...

    def get(self, key: str) -> bytes:
        """Reads one; FileNotFoundError: there is none."""
        ...

    def tail(self, key: str, num_bytes: int) -> bytes:
        """Its last bytes."""
        ...

    def find(self, name: str) -> list[str]:
        """Keys ``step/writer/name``."""
        ...

    def delete(self, prefix: str) -> None:
        """Removes every file whose key begins so; none is no error."""
        ...


_LOOK_S = 0.1
"""Of one that waits: after which it looks whether it still must."""


class Rate:
    """Holds transfers back, all threads' together, to so many bytes a second.

    Args:
      bytes_per_s: infinite: nothing is held back.
    """

    def __init__(self, bytes_per_s: float):
        self.bytes_per_s = bytes_per_s
        self._lock, self._free_at_s = threading.Lock(), 0.0

    def take(self, num_bytes: int) -> None:
        """Waits until that many more bytes would have been through, or until nothing
        is held back any more."""
        if self.bytes_per_s == float("inf"):
            return
        with self._lock:
            begins_s = max(time.monotonic(), self._free_at_s)
            ends_s = self._free_at_s = begins_s + num_bytes / self.bytes_per_s
        while (left_s := ends_s - time.monotonic()) > 0:
            if self.bytes_per_s == float("inf"):
                return
            time.sleep(min(left_s, _LOOK_S))


def open_files(where: "str | Path") -> Files:
    """The files at a path or URL.

    Raises:
      UserError: nobody knows such a URL.
    """
    text = str(where)
    scheme, colon, rest = text.partition("://")
    if not colon:
        return Folder(Path(text).expanduser().resolve())
    if scheme == "file":
        return Folder(Path(rest))
    if scheme in _SCHEMES:
        return Objects(text)
    return Fsspec(text)


_TRIES = 20
"""To make a file in a folder that comes and goes."""


class Folder:
    """A folder of this machine, or one that it has mounted."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def spec(self) -> Mapping[str, Any]:
        """TensorStore's."""
        return {"driver": "file", "path": f"{self.path}/"}

    def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """Under another name first."""
        path = self.path / key
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with _opened(unfinished) as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        if durable:
            _sync_folder(path.parent)

    def get(self, key: str) -> bytes:
        """See ``Files``."""
        return (self.path / key).read_bytes()

    def tail(self, key: str, num_bytes: int) -> bytes:
        """See ``Files``."""
        with (self.path / key).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            return file.read()

    def find(self, name: str) -> list[str]:
        """See ``Files``."""
        found = [
            writer / name
            for step in _inside(self.path)
            for writer in _inside(step)
            if (writer / name).exists()
        ]
        return sorted(path.relative_to(self.path).as_posix() for path in found)

    def delete(self, prefix: str) -> None:
        """A file, or a folder; those above it that are empty then go, too."""
        path = self.path / prefix
        if path.is_file():
            path.unlink(missing_ok=True)  # another island may be quicker
        else:
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            while path.parent != self.path:
                path = path.parent
                path.rmdir()


def _inside(folder: Path) -> list[Path]:
    """What it holds; nothing where it is no folder, or has just been removed: old steps
    go while others are listed. ``Path.glob`` would raise."""
    try:
        return [*folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


class Objects:
    """What TensorStore reaches: an object store."""

    def __init__(self, url: str):
        self._url = url.rstrip("/") + "/"

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    @functools.cached_property
    def spec(self) -> Mapping[str, Any]:
        """TensorStore's."""
        return self._store.spec().to_json()

    @functools.cached_property
    def _store(self) -> Any:
        import tensorstore

        return _told(lambda: tensorstore.KvStore.open(self._url).result(), self._url)

    def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """One request; such a store says yes when it is."""
        _told(lambda: self._store.write(key, data).result(), self._url)

    def get(self, key: str) -> bytes:
        """See ``Files``."""
        return self._read(key)

    def tail(self, key: str, num_bytes: int) -> bytes:
        """See ``Files``."""
        return self._read(key, byte_range=slice(-num_bytes, None))

    def _read(self, key: str, **part: Any) -> bytes:
        found = _told(lambda: self._store.read(key, **part).result(), self._url)
        if found.state != "value":
            raise FileNotFoundError(f"{self._url}{key}")
        return bytes(found.value)

    def find(self, name: str) -> list[str]:
        """By a list of all."""
        keys = _told(lambda: self._store.list().result(), self._url)
        return _named((key.decode() for key in keys), name)

    def delete(self, prefix: str) -> None:
        """See ``Files``."""
        import tensorstore

        span = tensorstore.KvStore.KeyRange(
            prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1)
        )
        _told(lambda: self._store.delete_range(span).result(), self._url)


class Fsspec:
    """What fsspec opens."""

    spec: None = None

    def __init__(self, url: str):
        import fsspec

        try:
            self._files, self._path = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"{url} cannot be opened: neither TensorStore nor fsspec knows what it "
                f"is ({error}). Give a path, gs://, s3://, or install fsspec's package "
                "for it."
            ) from error
        self._url = url.rstrip("/")

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    def _at(self, key: str) -> str:
        return f"{self._path.rstrip('/')}/{key}"

    def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        """As that file system writes: a manifest that is half there does not parse."""
        self._files.makedirs(self._at(key).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self._at(key), data)

    def get(self, key: str) -> bytes:
        """See ``Files``."""
        return self._files.cat_file(self._at(key))

    def tail(self, key: str, num_bytes: int) -> bytes:
        """See ``Files``."""
        return self._files.cat_file(self._at(key), start=-num_bytes)

    def find(self, name: str) -> list[str]:
        """By a list of all."""
        self._files.invalidate_cache()
        if not self._files.exists(self._path):
            return []
        top = self._path.strip("/") + "/"
        found = (path.strip("/") for path in self._files.find(self._path))
        return _named((path.removeprefix(top) for path in found), name)

    def delete(self, prefix: str) -> None:
        """See ``Files``."""
        if self._files.exists(self._at(prefix)):
            self._files.rm(self._at(prefix), recursive=True)


def _named(keys: Any, name: str) -> list[str]:
    return sorted(k for k in keys if k.count("/") == 2 and k.endswith(f"/{name}"))


def _told(call: Callable[[], Any], where: str) -> Any:
    """TensorStore raises ValueErrors: here what they are."""
    try:
        return call()
    except ValueError as error:
        raise OSError(f"{where}: {str(error).splitlines()[0]}") from error


def _opened(path: Path) -> BinaryIO:
    """A new file, in folders that another writer may just be removing as empty."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _sync_folder(path: Path) -> None:
    """A new name is on the disk when its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
