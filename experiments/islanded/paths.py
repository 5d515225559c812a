"""How fast bytes go by each way there is between two devices."""

import dataclasses
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from experiments.islanded.here import LOOPBACK, Here
from hexijax.islands.transfer import TransferChannel, start_server
from hexijax.runtime.communicator import Communicator
from hexijax.runtime.links import host_link_s, link_s

REPEATS = 3
STREAMS, CHUNKS = (1, 4, 8), (2**20, 2**22, 2**24)
IN_FLIGHT = 4
"""Messages that are fetched at once, besides one after another."""


def look(here: Here) -> dict[str, Any]:
    """What is here."""
    devices = jax.devices()
    return {
        "card": devices[0].device_kind,
        "cards": len(devices),
        "kind": here.cluster.devices[0].kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def inside(here: Here, *, sizes: list[int]) -> list[dict[str, Any]]:
    """In one client: copies, collectives, and through the host's memory."""
    devices = jax.devices()[:2]
    rows: list[dict[str, Any]] = []
    for size in sizes:
        host_s = host_link_s(devices[0], size)
        rows.append({"path": "device to pinned host", "bytes": size, "s": host_s})
        if len(devices) > 1:
            each = _two(devices[0], devices[1], size)
            rows += [{"path": name, "bytes": size, "s": s} for name, s in each.items()]
    return rows


def _two(first: jax.Device, second: jax.Device, size: int) -> dict[str, float]:
    """Seconds of each path between two devices of this client."""
    x = jax.device_put(jnp.zeros(size, jnp.uint8), first)
    group = Communicator([first, second])
    given = [jax.device_put(jnp.zeros(size // 4), d) for d in (first, second)]
    return {
        "device to device": link_s(first, second, size),
        "through NumPy": _median_s(lambda: jax.device_put(np.asarray(x + 0), second)),
        "all-reduce": _median_s(lambda: group.all_reduce(given)),
        "all-gather": _median_s(lambda: group.all_gather(given)),
        "reduce-scatter": _median_s(
            lambda: group.reduce_scatter(given, [size // 8, size // 4 - size // 8])
        ),
    }


def between(here: Here, *, sizes: list[int], wide: bool = True) -> list[dict[str, Any]]:
    """From the first island to the second, as the second sees it.

    ``wide``: by numbers of streams and sizes of chunks; else by ours alone.
    """
    rows: list[dict[str, Any]] = []
    for streams in STREAMS if wide else STREAMS[-1:]:
        server = start_server(LOOPBACK, streams)
        peers = here.all(f"server {streams}", server.address)
        assert here.world is not None
        world = dataclasses.replace(here.world, peers=peers)
        for chunk, size in itertools.product(CHUNKS if wide else (2**22,), sizes):
            label = f"{streams} {chunk} {size}"
            channel = TransferChannel(server, world, chunk_bytes=chunk)
            rows += _messages(here, channel, world, label, size, streams, chunk)
    return rows


def _messages(
    here: Here,
    channel: TransferChannel,
    world: Any,
    label: str,
    size: int,
    streams: int,
    chunk: int,
) -> list[dict[str, Any]]:
    first, second = world.islands
    count = REPEATS + 1 + IN_FLIGHT
    numbers = [world.transfer_id(label, i) for i in range(count)]
    device = jax.devices()[0]
    if world.name == first:
        x = jax.device_put(jnp.zeros(size, jnp.uint8), device)
        for number in numbers:
            channel.offer(second, number, [x + 0])
        here.all(f"offered {label}")
        here.all(f"fetched {label}")
        return []
    where = SingleDeviceSharding(device)
    like = [jax.ShapeDtypeStruct((size,), jnp.uint8, sharding=where)]
    here.all(f"offered {label}")

    def fetch(which: list[int]) -> float:
        began = time.perf_counter()
        pulls = [channel.pull(first, number, like, label) for number in which]
        jax.block_until_ready([pull.wait() for pull in pulls])
        return time.perf_counter() - began

    fetch(numbers[:1])
    each = [fetch([number]) for number in numbers[1 : 1 + REPEATS]]
    many_s = fetch(numbers[1 + REPEATS :])
    here.all(f"fetched {label}")
    row = {"bytes": size, "streams": streams, "chunk_bytes": chunk}
    return [
        row | {"path": "between islands", "s": statistics.median(each)},
        row
        | {"path": f"between islands, {IN_FLIGHT} at once", "s": many_s / IN_FLIGHT},
    ]


def _median_s(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)
