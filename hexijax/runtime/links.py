"""What moves and what multiplies: links, host links and products, as they are.

two devices -> curve -> LinkProfile; a device -> host_links, product_flops_per_s, ...
"""

import collections
import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hexijax.cluster import LinkProfile
from hexijax.runtime.layout import PINNED_HOST
from hexijax.runtime.stopwatch import device_s, filled, median_s

SIZES = tuple(2**n for n in (12, 15, 18, 20, 22, 24, 26, 28))
"""Bytes of the messages that are timed: 4 KiB to 256 MiB."""

ON_CPU = 24
"""Of CPU devices up to 2 to the power of that."""

BESIDE = 6
"""Copies that are timed while another goes the other way; the first is not counted."""

A_CHUNK = 2**25
"""Bytes of a copy that keeps a way busy: as long as a chunk of state, so that who comes
between waits no longer than in a step."""

AHEAD = 3
"""Such copies that wait behind the one that moves."""

Points = tuple[tuple[int, float], ...]
"""(bytes, seconds) of single messages."""


def link_s(
    source: jax.Device, target: jax.Device, num_bytes: int, repeats: int = 5
) -> float:
    """Median seconds of a copy from one device to another."""
    x = _bytes(num_bytes, SingleDeviceSharding(source))
    return median_s(lambda: jax.device_put(x, target), repeats)


def host_link_s(device: jax.Device, num_bytes: int, repeats: int = 5) -> float:
    """Median seconds of a copy to pinned host memory."""
    x = _bytes(num_bytes, SingleDeviceSharding(device))
    host = SingleDeviceSharding(device, memory_kind=PINNED_HOST)
    return median_s(lambda: jax.device_put(x, host), repeats)


def link(source: jax.Device, target: jax.Device) -> LinkProfile:
    """The link between two devices, by the slower of both ways."""
    sizes = sizes_on(source)
    both = [
        _curve(lambda n, a=a, b=b: link_s(a, b, n), sizes)
        for a, b in ((source, target), (target, source))
    ]
    slower = [(n, max(x, y)) for (n, x), (_, y) in zip(*both, strict=True)]
    return profile(slower)


def profile(points: Sequence[tuple[int, float]]) -> LinkProfile:
    """The link of single messages' times."""
    (_, latency_s), (most, last_s) = points[0], points[-1]
    beyond_s = max(last_s - latency_s, last_s / 100)
    return LinkProfile(
        latency_s=latency_s, bytes_per_s=most / beyond_s, measured=tuple(points)
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostLinks:
    """A device's ways to pinned host memory and back."""

    inward: Points
    """Into the device, alone."""

    outward: Points
    """Out of it, alone."""

    in_bytes_per_s: float
    """Into it while as much leaves."""

    out_bytes_per_s: float
    """Out of it while as much comes."""


def host_links(device: jax.Device) -> HostLinks:
    """Copies of many sizes each way, and large ones both ways at once."""
    here = SingleDeviceSharding(device)
    host = here.with_memory_kind(PINNED_HOST)
    sizes = sizes_on(device)

    def inward(num_bytes: int) -> float:
        x = jax.device_put(_bytes(num_bytes, here), host)
        return median_s(lambda: jax.device_put(x, here))

    ways = (
        _curve(inward, sizes),
        _curve(lambda n: host_link_s(device, n), sizes),
    )
    most = sizes[-1]
    on_device = _bytes(most, here)
    on_host = jax.device_put(on_device, host)

    def beside(move: Callable[[], Any], other: Callable[[], Any]) -> float:
        """Bytes a second of a copy while another one goes the other way."""
        times: list[float] = []
        for _ in range(BESIDE):
            began = time.perf_counter()
            moving, moved = other(), jax.block_until_ready(move())
            times.append(time.perf_counter() - began)
            jax.block_until_ready((moving, moved))
        return most / statistics.median(times[1:])

    def arrive() -> Any:
        return jax.device_put(on_host, here)

    def leave() -> Any:
        return jax.device_put(on_device, host)

    return HostLinks(
        inward=ways[0],
        outward=ways[1],
        in_bytes_per_s=beside(arrive, leave),
        out_bytes_per_s=beside(leave, arrive),
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class Busy:
    """Copies both ways that run beside something else."""

    num_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """That have arrived, by way."""

    seconds: float = 0.0
    """In which they did; 0 until they have ended."""

    @property
    def bytes_per_s(self) -> float:
        """Of the slower way."""
        return min(self.num_bytes.values(), default=0) / max(self.seconds, 1e-9)


@contextlib.contextmanager
def busy(device: jax.Device) -> Generator[Busy]:
    """Keeps both ways between a device and pinned host memory busy, as a step does:
    each has its copies handed over before the one in front has ended."""
    here = SingleDeviceSharding(device)
    host = here.with_memory_kind(PINNED_HOST)
    on_device = _bytes(A_CHUNK, here)
    on_host = jax.block_until_ready(jax.device_put(on_device, host))
    found, over = Busy(), threading.Event()

    def move(way: str, x: jax.Array, to: SingleDeviceSharding) -> None:
        moving: collections.deque[jax.Array] = collections.deque()
        found.num_bytes[way] = 0
        while not over.is_set():
            moving.append(jax.device_put(x, to))
            if len(moving) > AHEAD:
                jax.block_until_ready(moving.popleft())
                found.num_bytes[way] += x.nbytes
        jax.block_until_ready([*moving])
        found.num_bytes[way] += x.nbytes * len(moving)

    began = time.perf_counter()
    movers = [
        threading.Thread(target=move, args=way, name=f"busy {way[0]}", daemon=True)
        for way in (("in", on_host, here), ("out", on_device, host))
    ]
    for mover in movers:
        mover.start()
    try:
        yield found
    finally:
        over.set()
        for mover in movers:
            mover.join()
        found.seconds = time.perf_counter() - began


def product_flops_per_s(device: jax.Device, dtype: str, rows: int) -> float:
    """Of a square product of unlike numbers."""
    a, b = (
        filled(jax.ShapeDtypeStruct((rows, rows), dtype, sharding=_on(device)))
        for _ in range(2)
    )
    product = jax.jit(jnp.matmul)
    return 2 * rows**3 / device_s(lambda: product(a, b), device)


def memory_bytes_per_s(device: jax.Device, num_bytes: int) -> float:
    """Read and written by a kernel that adds one to each number."""
    x = filled(jax.ShapeDtypeStruct((num_bytes // 4,), "float32", sharding=_on(device)))
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / max(device_s(lambda: add(x), device), 1e-9)


def sizes_on(device: jax.Device) -> tuple[int, ...]:
    """Messages that are timed on such a device."""
    return tuple(n for n in SIZES if device.platform != "cpu" or n <= 2**ON_CPU)


def _curve(seconds: Callable[[int], float], sizes: Sequence[int]) -> Points:
    """By size; a time that a larger message undercuts is lowered to it, for what else
    took it was not the link."""
    times = [seconds(size) for size in sizes]
    lowest = [min(times[i:]) for i in range(len(times))]
    return tuple(zip(sizes, lowest, strict=True))


def _bytes(num_bytes: int, where: Any) -> jax.Array:
    return jax.block_until_ready(
        jax.device_put(jnp.zeros(max(1, num_bytes), jnp.uint8), where)
    )


def _on(device: jax.Device) -> SingleDeviceSharding:
    return SingleDeviceSharding(device)
