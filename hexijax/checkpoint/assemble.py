"""Reads slices from many sources at once, and makes an engine's arrays of them.

    engine.targets() -> wanted -> Assign(wanted, sources) -> fetches
    fetches -> reads, each source by threads of its own -> arrays, Moved

What a device is to hold is read once, however many devices hold it, and goes to them
when its last piece has come. Host memory holds what has come and is not whole yet.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hexijax.checkpoint.slices import Key, Slice
from hexijax.checkpoint.sources import Damaged, Source
from hexijax.errors import UserError
from hexijax.weights.source import (
    Box,
    box_shape,
    index,
    inside,
    overlap,
    shifted,
)
from hexijax.weights.stored.parts import without

if TYPE_CHECKING:
    import jax

    Targets = Mapping[Slice, Sequence[jax.ShapeDtypeStruct]]
    Arrays = dict[Slice, list[jax.Array]]

ALIGNED_BYTES = 64
"""XLA's for a processor's arrays."""

READERS = 4
"""Threads a source: reads of a disk or a network wait more than they compute."""


class Wanted(NamedTuple):
    """A box that some devices are to hold; those of one array do not overlap."""

    slice: Slice
    """What it is."""

    num_bytes: int
    """Of it."""

    nodes: tuple[str, ...]
    """Nodes of these devices, in order; unknown ones are left out."""


class Fetch(NamedTuple):
    """A piece of a wanted box, and which source gives it."""

    slice: Slice
    """The piece: within a box that is wanted, and within one that the source holds."""

    source: int
    """Index of the source."""


Assign = Callable[[Sequence[Wanted], Sequence[Source]], Sequence[Fetch]]
"""Cuts what is wanted into pieces that tile it, each from a source that holds it.

Raises a ``Missing`` if some of it is held by none.
"""


class Missing(UserError):
    """No source holds some of what is wanted."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What was read to put a state together."""

    num_bytes: Mapping[str, int]
    """By the sources' label."""

    seconds: Mapping[str, float]
    """From the first read's begin to the last one's end, by label."""

    total_s: float
    """From the first read to the last array on its device."""

    def __str__(self) -> str:
        parts = [
            f"{count / 1e9:.3f} GB from {label} in {self.seconds[label]:.2f} s"
            for label, count in sorted(self.num_bytes.items())
        ]
        return f"{', '.join(parts) or 'nothing'}; {self.total_s:.2f} s in all"


def wanted(
    targets: "Targets", node_of: "Mapping[jax.Device, str] | None" = None
) -> list[Wanted]:
    """What must be read for ``targets``: each box that some device holds, once."""
    nodes: dict[Slice, set[str]] = {}
    num_bytes: dict[Slice, int] = {}
    for each, copies in targets.items():
        for like in copies:
            for part, devices in _parts(each, like).items():
                found = nodes.setdefault(part, set())
                found |= {(node_of or {}).get(device, "") for device in devices} - {""}
                num_bytes[part] = part.size * np.dtype(like.dtype).itemsize
    return [
        Wanted(part, num_bytes[part], tuple(sorted(found)))
        for part, found in nodes.items()
        if part.size
    ]


def first_holder(wanted: Sequence[Wanted], sources: Sequence[Source]) -> list[Fetch]:
    """An ``Assign``: each piece from the first source in the list that has it."""
    fetches: list[Fetch] = []
    for want in wanted:
        key, left = want.slice.key, [want.slice.box]
        for number, source in enumerate(sources):
            for held in source.holds.get(key, ()):
                rest: list[Box] = []
                for box in left:
                    both = overlap(held, box)
                    if both is None:
                        rest.append(box)
                        continue
                    fetches.append(Fetch(Slice(*key, both), number))
                    rest += without(box, both)
                left = rest
            if not left:
                break
        if left:
            raise missing(Slice(*key, left[0]), sources)
    return fetches


def missing(part: Slice, sources: Sequence[Source]) -> Missing:
    """Says that no source holds ``part``."""
    asked = sorted({f"{s.label} {s.node}".strip() for s in sources})
    return Missing(
        f"{part} is held by none of {len(sources)} sources "
        f"({', '.join(asked) or 'there are none'})."
    )


def assemble(
    targets: "Targets",
    sources: Sequence[Source],
    assign: Assign = first_holder,
    node_of: "Mapping[jax.Device, str] | None" = None,
) -> "tuple[Arrays, Moved]":
    """Arrays like ``targets``, for ``Stateful.load``, and what was read for them.

    Args:
      targets: of the engine that takes them.
      sources: where slices can be read.
      assign: which of them gives what.
      node_of: node of each device, for ``assign``.

    Raises:
      Missing: some of it is nowhere.
      Damaged: a source, which it names, could not be read.
    """
    wants = wanted(targets, node_of)
    began = time.monotonic()
    clock, coming = _Clock(), _Coming(targets)
    pools = [ThreadPoolExecutor(READERS, source.label) for source in sources]
    try:
        reads = [
            pools[fetch.source].submit(
                _read, sources[fetch.source], fetch, coming, clock
            )
            for fetch in assign(wants, sources)
        ]
        for read in reads:
            read.result()
        arrays = coming.arrays()
    finally:
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)
    return arrays, clock.moved(time.monotonic() - began)


def _read(source: Source, fetch: Fetch, coming: "_Coming", clock: "_Clock") -> None:
    began = time.monotonic()
    try:
        found = source.read(*fetch.slice)
    except Damaged as error:
        error.source = source
        raise
    clock.tell(source.label, found.nbytes, began, time.monotonic())
    coming.put(fetch.slice, found)


def _parts(
    each: Slice, like: "jax.ShapeDtypeStruct"
) -> "dict[Slice, list[jax.Device]]":
    """Boxes of an array by its devices' shards, in the parameter's rows."""
    corner = [start for start, _ in each.box]
    assert like.sharding is not None
    found: dict[Slice, list[jax.Device]] = {}
    where = like.sharding.addressable_devices_indices_map(tuple(like.shape))
    for device, slices in where.items():
        assert slices is not None
        rows = zip(slices, like.shape, strict=True)
        box = tuple(s.indices(n)[:2] for s, n in rows)
        part = Slice(each.name, each.kind, shifted(box, corner))
        found.setdefault(part, []).append(device)
    return found


class _Coming:
    """Boxes on their way to devices."""

    def __init__(self, targets: "Targets"):
        self._targets, self._lock = targets, threading.Lock()
        self._left: dict[Slice, int] = {}
        self._boxes: dict[Key, list[Box]] = {}
        self._dtypes: dict[Key, np.dtype] = {}
        self._uses: dict[Slice, list[tuple[Slice, int, jax.Device]]] = {}
        for each, copies in targets.items():
            self._dtypes[each.key] = np.dtype(copies[0].dtype)
            for number, like in enumerate(copies):
                for part, devices in _parts(each, like).items():
                    uses = self._uses.setdefault(part, [])
                    uses += [(each, number, device) for device in devices]
        for part in self._uses:
            self._left[part] = part.size
            self._boxes.setdefault(part.key, []).append(part.box)
        self._buffers: dict[Slice, np.ndarray] = {}
        self._shards: dict[tuple[Slice, int, jax.Device], jax.Array] = {}
        for part, left in self._left.items():
            if not left:  # nobody is asked for nothing
                self._place(part, np.empty(box_shape(part.box), self._dtypes[part.key]))

    def put(self, piece: Slice, found: np.ndarray) -> None:
        """Takes a piece; the last of a box sends it to its devices."""
        box = next(
            box
            for box in self._boxes[piece.key]
            if overlap(box, piece.box) == piece.box
        )
        part, dtype = Slice(*piece.key, box), self._dtypes[piece.key]
        if box == piece.box:
            buffer, whole = np.ascontiguousarray(found, dtype), True
        else:
            with self._lock:
                buffer = self._buffers.get(part)
                if buffer is None:
                    buffer = self._buffers[part] = _aligned(box_shape(box), dtype)
            buffer[index(inside(piece.box, box))] = found
            with self._lock:
                self._left[part] -= piece.size
                whole = not self._left[part]
                if whole:
                    del self._buffers[part]
        if whole:
            ours = box != piece.box
            self._place(part, buffer.reshape(box_shape(box)), ours=ours)

    def _place(self, part: Slice, buffer: np.ndarray, *, ours: bool = False) -> None:
        import jax
        from jax.sharding import SingleDeviceSharding

        uses = self._uses[part]
        for each, number, device in uses:
            sharding = self._targets[each][number].sharding
            assert sharding is not None
            one = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            # The next update overwrites the device's memory: an alias of what is one
            # device's alone at most.
            alias = ours and len(uses) == 1
            shard = jax.device_put(buffer, one, may_alias=alias)
            with self._lock:
                self._shards[each, number, device] = shard

    def arrays(self) -> "Arrays":
        """All of them, once every piece has come and been copied."""
        import jax

        found: Arrays = {}
        for each, copies in self._targets.items():
            for number, like in enumerate(copies):
                sharding, shape = like.sharding, tuple(like.shape)
                assert sharding is not None
                devices = sharding.addressable_devices_indices_map(shape)
                array = jax.make_array_from_single_device_arrays(
                    shape,
                    sharding,
                    [self._shards[each, number, device] for device in devices],
                )
                found.setdefault(each, []).append(array)
        return jax.block_until_ready(found)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that a processor's own device takes as it is."""
    count = math.prod(shape) * dtype.itemsize
    raw = np.empty(count + ALIGNED_BYTES, np.uint8)
    first = -raw.ctypes.data % ALIGNED_BYTES
    return raw[first : first + count].view(dtype).reshape(shape)


class _Clock:
    """Adds up reads by label; several threads tell it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, tuple[int, float, float]] = {}

    def tell(self, label: str, num_bytes: int, began: float, ended: float) -> None:
        """Of one read."""
        with self._lock:
            count, first, last = self._spans.get(label, (0, began, ended))
            span = (count + num_bytes, min(first, began), max(last, ended))
            self._spans[label] = span

    def moved(self, total_s: float) -> Moved:
        """Of all."""
        return Moved(
            num_bytes={label: count for label, (count, _, _) in self._spans.items()},
            seconds={label: b - a for label, (_, a, b) in self._spans.items()},
            total_s=total_s,
        )
