"""How fast bytes go from one host to another: what `cluster init` measures.

    serve(host, token) -> address, then answers one caller    measure(address, token)

A single stream of TCP, as one chunk of a transfer is. Who calls has to know the token.
"""

import socket
import statistics
import time
from collections.abc import Callable

from hexijax.islands.wire import answer, call, family, joined

PINGS = 20
MOST_S = 2.0
"""Of sending; a slow link is not made to carry more."""

_PART_BYTES = 2**20
_WAIT_S = 30.0


def serve(host: str, token: str, tell: Callable[[str], None]) -> None:
    """Listens at a free port of ``host``, tells the address, serves one caller.

    Raises:
      OSError: nobody can listen there, or nobody called.
    """
    with socket.create_server((host, 0), family=family(host)) as server:
        server.settimeout(_WAIT_S)
        tell(joined(host, server.getsockname()[1]))
        connection, _ = server.accept()
    with connection:
        answer(connection, token, _WAIT_S)
        connection.settimeout(_WAIT_S)
        for _ in range(PINGS):
            connection.sendall(connection.recv(1))
        part, until = bytes(_PART_BYTES), time.monotonic() + MOST_S
        while time.monotonic() < until:
            connection.sendall(part)


def measure(address: str, token: str) -> tuple[float, float]:
    """Half a round trip in seconds, and bytes a second from there to here.

    Raises:
      OSError: nobody is there.
    """
    line = call(address, token, _WAIT_S)
    connection = line.socket
    connection.settimeout(_WAIT_S)
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        trips.append(time.perf_counter() - began)
    began, total = time.perf_counter(), 0
    while part := connection.recv(_PART_BYTES):
        total += len(part)
    seconds = time.perf_counter() - began
    line.close()
    return statistics.median(trips) / 2, total / seconds
