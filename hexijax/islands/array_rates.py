"""How fast arrays go from one host's device to another's: what training will see.

    serve(host, token) -> address, then answers one caller    measure(address, token)

By the transfer server that islands use, so beside the network it counts the way from a
card to its host and back. ``rates`` times the network alone.
"""

import socket
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hexijax.islands.transfer import Server, TransferChannel, start_server
from hexijax.islands.wire import answer, call, derived, family, joined
from hexijax.islands.world import World

SIZES = (4096, 2**25)
"""Bytes of a message whose time is latency, and of one whose time is not."""

REPEATS = 3

_WAIT_S = 60.0
_ENDS = ("here", "there")


def serve(host: str, token: str, tell: Callable[[str], None]) -> None:
    """Listens at a free port of ``host``, tells the address, serves one caller.

    Raises:
      OSError: nobody can listen there, or nobody called.
    """
    arrays = start_server(joined(host, 0))
    with socket.create_server((host, 0), family=family(host)) as server:
        server.settimeout(_WAIT_S)
        tell(joined(host, server.getsockname()[1]))
        connection, _ = server.accept()
    line = answer(connection, token, _WAIT_S)
    channel = _channel(arrays, token, "here", "")
    device = jax.devices()[0]
    for size in SIZES:
        x = jax.device_put(jnp.zeros(size, jnp.uint8), device)
        for i in range(REPEATS + 1):
            channel.offer("there", _number(token, size, i), [x + 0])
    line.send({"address": arrays.address})
    connection.settimeout(_WAIT_S)
    line.receive()  # it has all
    line.close()


def measure(address: str, token: str) -> tuple[float, float]:
    """Seconds that a small array takes, and bytes a second of a large one beyond that,
    from there to here.

    Raises:
      OSError: nobody is there.
      IslandLost: it did not send.
    """
    line = call(address, token, _WAIT_S)
    there = str(line.receive()["address"])
    channel = _channel(start_server(joined(line.host, 0)), token, "there", there)
    where = SingleDeviceSharding(jax.devices()[0])

    def fetch(size: int, i: int) -> float:
        like = [jax.ShapeDtypeStruct((size,), jnp.uint8, sharding=where)]
        began = time.perf_counter()
        number = _number(token, size, i)
        jax.block_until_ready(channel.pull("here", number, like, "rate").wait())
        return time.perf_counter() - began

    def median_s(size: int) -> float:
        fetch(size, REPEATS)  # connects, and compiles what puts chunks together
        return statistics.median(fetch(size, i) for i in range(REPEATS))

    small_s, large_s = map(median_s, SIZES)
    line.send({"done": True})
    line.close()
    return small_s, SIZES[1] / max(large_s - small_s, 1e-9)


def _channel(server: Server, token: str, name: str, address: str) -> TransferChannel:
    (other,) = set(_ENDS) - {name}
    world = World(
        name=name,
        islands=_ENDS,
        run="rates",
        generation=0,
        key=derived(token, "rates"),
        peers={other: address},
        pull_s=_WAIT_S,
    )
    return TransferChannel(server, world)


def _number(token: str, size: int, i: int) -> int:
    return int.from_bytes(derived(token, "rate", size, i)[:7], "big")
