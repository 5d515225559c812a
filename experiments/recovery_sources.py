"""Sources of a recovery that give as much as they are told, and no more.

    arrays of this process -> Paced, a survivor
    a file, behind a server in a process of its own -> Loopback, the far tier

What of: ``experiments.recovery_table``.
"""

import dataclasses
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hexijax.checkpoint.slices import Key
    from hexijax.weights.source import Box

ROWS, COLUMNS = 1440, 4096
"""Of each array of float32."""

LATE_S = 0.005
"""Of a reader that woke late, what is made up for."""


@dataclasses.dataclass
class Paced:
    """A survivor, read no faster than its rate by all its readers together."""

    arrays: "Mapping[Key, np.ndarray]"
    holds: "Mapping[Key, Sequence[Box]]"
    node: str
    rate_bytes_per_s: float
    label: str = "peer"

    def __post_init__(self) -> None:
        self._lock, self._free_s = threading.Lock(), 0.0

    def read(self, name: str, kind: str, box: "Box") -> np.ndarray:
        """What it holds, when it would have come."""
        from hexijax.checkpoint.slices import Key

        (start, stop), _ = box
        found = self.arrays[Key(name, kind)][start:stop]
        with self._lock:
            now_s = time.monotonic()
            begins_s = max(now_s - LATE_S, self._free_s)
            self._free_s = begins_s + found.nbytes / self.rate_bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(max(0.0, wait_s))
        return found


@dataclasses.dataclass
class Loopback:
    """The far tier: ranges of a file behind a socket, a connection a thread."""

    port: int
    keys: "Sequence[Key]"
    rate_bytes_per_s: float
    node: str = ""
    label: str = "far"

    def __post_init__(self) -> None:
        self._local, self._open = threading.local(), list[socket.socket]()
        self._at = {key: i for i, key in enumerate(self.keys)}

    @property
    def holds(self) -> "Mapping[Key, Sequence[Box]]":
        """All of it."""
        return {key: [((0, ROWS), (0, COLUMNS))] for key in self.keys}

    def read(self, name: str, kind: str, box: "Box") -> np.ndarray:
        """A range of rows."""
        from hexijax.checkpoint.slices import Key

        if not hasattr(self._local, "socket"):
            self._local.socket = socket.create_connection(("127.0.0.1", self.port))
            self._open.append(self._local.socket)
        (start, stop), _ = box
        first = (self._at[Key(name, kind)] * ROWS + start) * COLUMNS * 4
        found = np.empty((stop - start, COLUMNS), np.float32)
        self._local.socket.sendall(struct.pack("<qq", first, found.nbytes))
        view = memoryview(found.data).cast("B")
        while view:
            view = view[self._local.socket.recv_into(view) :]
        return found

    def close(self) -> None:
        """Nothing is read after it."""
        for each in self._open:
            each.close()


def serve(file: Path, rate_bytes_per_s: float) -> None:
    """Answers (offset, length) with bytes of the file, at a rate for all together.

    It ends when its standard input does.
    """
    lock, free_s = threading.Lock(), 0.0

    def answer(connection: socket.socket) -> None:
        nonlocal free_s
        while len(asked := connection.recv(16, socket.MSG_WAITALL)) == 16:
            first, count = struct.unpack("<qq", asked)
            while count:
                part = min(count, 2**20)
                with lock:
                    now_s = time.monotonic()
                    free_s = max(now_s - LATE_S, free_s) + part / rate_bytes_per_s
                    wait_s = free_s - now_s
                time.sleep(max(0.0, wait_s))
                while part:
                    sent = os.sendfile(connection.fileno(), data.fileno(), first, part)
                    first, count, part = first + sent, count - sent, part - sent

    with file.open("rb") as data, socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        threading.Thread(target=_until_closed, daemon=True).start()
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=[connection], daemon=True).start()


def _until_closed() -> None:
    sys.stdin.read()
    os._exit(0)


@contextmanager
def far_tier(file: Path, rate_bytes_per_s: float) -> Generator[int]:
    """A server in a process of its own; its port."""
    command = [sys.executable, "-m", "experiments.recovery_sources", str(file)]
    with subprocess.Popen(
        [*command, str(rate_bytes_per_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), float(sys.argv[2]))
