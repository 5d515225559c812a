"""One writer's slices of a step into a place, committed by the manifest.

    {Slice: array in host memory} -> write_part -> state/ -> manifest.json

The writer has a folder of its own under the step, an Orbax folder in form: two writers
in one would lose data silently. Killed at any moment, it leaves a folder without a
manifest, which is no step; ``clear_leftovers`` removes it.
"""

import concurrent.futures
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hexijax.checkpoint.slices import Key, Slice, Tensor
from hexijax.weights.errors import Damaged
from hexijax.weights.memory import give_back_freed
from hexijax.weights.orbax import HANDLER, METADATA, entry
from hexijax.weights.source import whole
from hexijax.weights.stored import arrays, manifest
from hexijax.weights.stored.arrays import StoredArray
from hexijax.weights.stored.files import Files, Folder, Rate
from hexijax.weights.stored.manifest import Manifest, Param, Stand
from hexijax.weights.stored.parts import Part

WRITERS = 4
"""Threads of all parts that are written: they wait for the disk and for TensorStore,
which has its own."""

SENDERS = 4
"""Chunks on their way to a far tier at a time: each waits for an answer."""

_WINDOW_BYTES = 2**22

_T = TypeVar("_T")
_R = TypeVar("_R")


def write_part(
    files: Files,
    held: Mapping[Slice, np.ndarray],
    *,
    writer: str,
    stand: Stand,
    tensors: Mapping[Key, Tensor],
    params: Sequence[Param],
    verify: bool = False,
    rate: Rate | None = None,
) -> Manifest:
    """Writes the slices, then their manifest.

    Args:
      files: the place.
      held: the slices, each array as long as its box.
      writer: whose they are: a node.
      stand: where the run stands.
      tensors: all arrays of the state.
      params: all parameters.
      verify: read every chunk back, and compare it with what it was written from.
      rate: holds the writes back.

    Raises:
      OSError: the place cannot be written.
      Damaged: what was read back is something else.
    """
    prefix = f"{stand.step}/{writer}/"
    files.delete(f"{prefix}{manifest.NAME}")  # saved before, without a step since
    files.delete(prefix)
    keys = {each: _key(number, each) for number, each in enumerate(held)}

    def one(each: Slice) -> StoredArray:
        key, array = prefix + keys[each], np.asarray(held[each])
        made = arrays.write(files, key, array, rate)
        if verify:
            found = arrays.read(files, made, whole(array.shape))
            if not _same_bytes(found, array):
                raise Damaged(
                    f"{files.where}: {key} is not what was written: what was read "
                    f"back of {each} differs."
                )
        return StoredArray(
            key=keys[each], tensor=made.tensor, chunk=made.chunk, crc32c=made.crc32c
        )

    made = dict(zip(held, _each(_pool("save", WRITERS), one, held), strict=True))
    _describe(files, f"{prefix}{manifest.STATE}/", made)
    known = Manifest(
        stand=stand,
        writer=writer,
        arrays=made,
        tensors=dict(tensors),
        params=tuple(params),
    )
    files.put(f"{prefix}{manifest.NAME}", manifest.render(known), durable=True)
    if known.num_bytes > arrays.SMALL_BYTES:
        give_back_freed()
    return known


@functools.cache
def _pool(name: str, threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """The same threads for all: new ones would each bring the C library to keep memory
    of its own."""
    return concurrent.futures.ThreadPoolExecutor(threads, name)


def _each(
    pool: concurrent.futures.ThreadPoolExecutor,
    work: Callable[[_T], _R],
    things: Iterable[_T],
) -> list[_R]:
    """Done side by side; if one fails, none goes on when that is raised."""
    done = [pool.submit(work, each) for each in things]
    try:
        return [each.result() for each in done]
    except BaseException:
        for each in done:
            each.cancel()
        concurrent.futures.wait(done)
        raise


def copy_part(part: Part, target: Files, rate: Rate | None = None) -> None:
    """A committed part into another place, chunk by chunk as it is stored.

    Raises:
      Damaged: it is no longer what was written.
      OSError: the target cannot be written.
    """
    target.delete(f"{part.prefix}{manifest.NAME}")
    stored = [part.at(each) for each in part.manifest.arrays.values()]
    _each(
        _pool("send", SENDERS),
        lambda chunk: arrays.copy(part.files, target, chunk[0], chunk[1], rate),
        [chunk for each in stored for chunk in each.sums()],
    )
    for each in stored:
        arrays.describe(target, each)
    state = f"{part.prefix}{manifest.STATE}/"
    _describe(target, state, part.manifest.arrays)
    data = manifest.render(part.manifest)
    target.put(f"{part.prefix}{manifest.NAME}", data, durable=True)


def remove_part(part: Part) -> None:
    """Its manifest first: half of it is no step."""
    part.files.delete(f"{part.prefix}{manifest.NAME}")
    part.files.delete(part.prefix)


def clear_leftovers(files: Files, writers: Sequence[str]) -> None:
    """What these writers began and did not commit; before any of them writes."""
    if not isinstance(files, Folder) or not files.path.is_dir():
        return  # elsewhere a step is written over
    for step in files.path.iterdir():
        for writer in writers if re.fullmatch(r"[0-9]+", step.name) else ():
            folder: Path = step / writer
            if folder.is_dir() and not (folder / manifest.NAME).exists():
                files.delete(f"{step.name}/{writer}")


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Compares in windows: NumPy lets other threads go on meanwhile, and makes an array
    of the answers."""
    x, y = (np.ascontiguousarray(z).reshape(-1).view(np.uint8) for z in (a, b))
    starts = range(0, x.size, _WINDOW_BYTES)
    return x.size == y.size and all(
        np.array_equal(x[i : i + _WINDOW_BYTES], y[i : i + _WINDOW_BYTES])
        for i in starts
    )


def _key(number: int, each: Slice) -> str:
    """For people; the number tells slices apart."""
    words = re.sub(r"[^A-Za-z0-9_]+", "-", f"{each.name}-{each.kind}").strip("-")
    return f"{manifest.STATE}/{number}-{words[-100:]}"


def _describe(files: Files, state: str, made: Mapping[Slice, StoredArray]) -> None:
    """What Orbax wants to see of a folder it restores."""
    names = [stored.key.rpartition("/")[2] for stored in made.values() if stored.crc32c]
    tree = {str((name,)): entry((name,)) for name in names}
    about = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    files.put(f"{state}{METADATA}", json.dumps(about).encode())
    now = time.time_ns()
    handled: dict[str, Any] = {
        "item_handlers": HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    files.put(f"{state}_CHECKPOINT_METADATA", json.dumps(handled).encode())
