"""Arrays from one island's devices to another's, by ``jax.experimental.transfer``.

    start_server -> Server -> TransferChannel.offer | .pull -> Arriving.wait

One server a process, at an address that is told at the rendezvous. A pull begins at
once and nothing that needs it is dispatched before it has come: a pull from a stopped
process, or of what was never offered, would never return, and neither would what waits
for it on a device. So it is watched from outside, and given up in time.

Large arrays travel in pieces: on a loopback between two processes 64 MB came at 0.35
GB/s in one piece and at 0.8 in 16 (two cores, JAX 0.12).
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

from hexijax.errors import UserError
from hexijax.islands.pacing import Pace
from hexijax.islands.wire import family, joined, split_address
from hexijax.islands.world import ID_BITS, IslandLost, World

CHUNK_BYTES = 4 * 2**20
"""Of the pieces of a large array."""

STREAMS = 8
"""Sockets that a server sends through: between two cards of one host four messages of
64 MiB came at 13.9 GB/s, at 9.3 through 4 (docs/performance.md)."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Between two looks whether something has come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """What other islands fetch arrays from; what it offers is let go with it."""

    address: str
    """Where it listens, ``host:port``."""

    raw: Any = dataclasses.field(repr=False)
    """JAX's own."""


def start_server(address: str = "127.0.0.1:0", streams: int = STREAMS) -> Server:
    """A transfer server of this process's default backend.

    Args:
      address: ``host:port`` of an interface of this machine, and of no other; port 0
        takes a free one.
      streams: sockets that it sends through.

    Raises:
      UserError: it is no address of this machine, or taken.
    """
    # The server itself would share a port with whoever has it.
    try:
        host, port = split_address(address)
        with socket.socket(family(host)) as probe:
            probe.bind((host, port))
    except (OSError, UserError) as error:
        raise UserError(
            f"A transfer server was to listen at {address!r}, and cannot: {error}. It "
            "takes `host:port` with a numeric address of this machine and a port that "
            "nobody has; port 0 takes a free one."
        ) from error
    client = jax.local_devices()[0].client
    raw = transfer.start_transfer_server(client, address, [joined(host, 0)] * streams)
    return Server(raw.address(), raw)


@dataclasses.dataclass(slots=True)
class Traffic:
    """What has come from one island."""

    messages: int = 0
    num_bytes: int = 0
    waited_s: float = 0.0
    """How long something waited for it."""


class TransferChannel:
    """Messages between this island and its peers, for one generation.

    Args:
      server: what the others fetch from.
      world: who they are.
      gone: names a lost one among them, as soon as somebody knows; else None.
      chunk_bytes: of the pieces of a large array; the same on all islands.
      bytes_per_s: send no faster, to stand for a slower link; a rate on one island is
        one on all. None: as fast as it goes.
    """

    def __init__(
        self,
        server: Server,
        world: World,
        gone: Callable[[], str | None] = lambda: None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        bytes_per_s: float | None = None,
    ):
        self._server, self._world, self.gone = server, world, gone
        self._chunk_bytes, self._bytes_per_s = chunk_bytes, bytes_per_s
        self._peers: dict[str, Any] = {}
        self._paces: dict[str, Pace] = {}
        self.traffic: Mapping[str, Traffic] = collections.defaultdict(Traffic)
        """By the island it came from."""
        self.offered_bytes: collections.Counter[str] = collections.Counter()
        """By the island it was meant for."""
        self._engines = itertools.count()
        self._waiting: dict[Arriving, float] = {}  # since when
        self._lock = threading.Lock()

    def next_engine(self) -> int:
        """A number for one more engine: the same on all islands, which make the same
        ones."""
        return next(self._engines)

    def offer(self, peer: str, number: int, arrays: Sequence[jax.Array]) -> None:
        """Leaves a message for an island to fetch; does not wait."""
        chunks = [chunk for x in arrays for chunk in _cut(x, self._chunk_bytes)]
        self.offered_bytes[peer] += sum(x.nbytes for x in chunks)
        if self._bytes_per_s is not None:
            if peer not in self._paces:
                self._paces[peer] = Pace(self._bytes_per_s, self._offer_one)
            self._paces[peer].send(
                [*zip(_numbers(number, chunks), chunks, strict=True)]
            )
        elif chunks:
            self._server.raw.await_pull(number, chunks)

    def _offer_one(self, number: int, chunk: jax.Array) -> None:
        self._server.raw.await_pull(number, [chunk])

    def pull(
        self, peer: str, number: int, like: Sequence[jax.ShapeDtypeStruct], what: str
    ) -> "Arriving":
        """Begins to fetch a message; ``what`` it is, for people."""
        parts = [_chunks(x, self._chunk_bytes) for x in like]
        wanted = [chunk for part in parts for chunk in part]
        try:
            if peer not in self._peers:
                address = self._world.peers[peer]
                self._peers[peer] = self._server.raw.connect(address)
            ways = self._peers[peer]
            if self._bytes_per_s is None:
                arrays = ways.pull(number, wanted) if wanted else []
            else:
                numbers = _numbers(number, wanted)
                arrays = [
                    x
                    for n, chunk in zip(numbers, wanted, strict=True)
                    for x in ways.pull(n, [chunk])
                ]
        except jax.errors.JaxRuntimeError as error:
            raise IslandLost(peer, what, 0.0, _first_line(error)) from error
        rest = iter(arrays)
        cut = [[next(rest) for _ in part] for part in parts]
        return Arriving(self, peer, what, list(like), cut)

    @property
    def seconds(self) -> float:
        """How long to wait for anything."""
        return self._world.pull_s

    def waits(self) -> tuple[str, float] | None:
        """The island that is waited for, and how long already; of several the one
        longest waited for, None: nothing is."""
        with self._lock:
            now = time.monotonic()
            longest = min(self._waiting.items(), key=lambda x: x[1], default=None)
        return longest and (longest[0].peer, now - longest[1])

    @contextlib.contextmanager
    def waiting(self, message: "Arriving") -> Generator[None]:
        """While it lasts, a message is waited for."""
        with self._lock:
            self._waiting[message] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[message]


class Arriving:
    """A message on its way here; any thread may wait for it."""

    def __init__(
        self,
        channel: TransferChannel,
        peer: str,
        what: str,
        like: list[jax.ShapeDtypeStruct],
        cut: list[list[jax.Array]],
    ):
        self._channel, self.peer, self._what = channel, peer, what
        self._like, self._cut = like, cut
        self._arrays: list[jax.Array] | None = None
        self._lock = threading.Lock()

    def wait(self) -> list[jax.Array]:
        """Its arrays, once all have come.

        Raises:
          IslandLost: they did not, in time, or never will.
        """
        with self._lock:
            if self._arrays is None:
                chunks = [chunk for part in self._cut for chunk in part]
                traffic = self._channel.traffic[self.peer]
                with self._channel.waiting(self):
                    traffic.waited_s += self._watch(chunks)
                traffic.messages += 1
                traffic.num_bytes += sum(x.nbytes for x in chunks)
                whole = zip(self._like, self._cut, strict=True)
                self._arrays = [_whole(x, part) for x, part in whole]
                self._cut = []
            return self._arrays

    def _watch(self, chunks: list[jax.Array]) -> float:
        """Until all are there; how long that took. Each chunk has the time that is
        allowed: a slow link is no lost island."""
        began, pause_s = time.perf_counter(), _FIRST_PAUSE_S
        limit_s = self._channel.seconds
        for chunk in chunks:
            since = time.perf_counter()
            is_ready: Callable[[], bool] = getattr(chunk, "is_ready")  # noqa: B009
            while not is_ready():
                spent_s = time.perf_counter() - since
                if spent_s > limit_s:
                    raise IslandLost(self.peer, self._what, limit_s)
                if pause_s == _LONGEST_PAUSE_S and (lost := self._channel.gone()):
                    why = "it was given up by whoever started it"
                    raise IslandLost(lost, self._what, spent_s, why)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        spent_s = time.perf_counter() - began
        try:
            jax.block_until_ready(chunks)
        except jax.errors.JaxRuntimeError as error:
            why = _first_line(error)
            raise IslandLost(self.peer, self._what, spent_s, why) from error
        return spent_s


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _numbers(number: int, chunks: Sequence[Any]) -> list[int]:
    """One for each chunk of a message."""
    return [(number + i) % 2**ID_BITS for i in range(len(chunks))]


def _rows(shape: tuple[int, ...], itemsize: int, chunk_bytes: int) -> int:
    """Elements of a chunk; 0: the array travels as it is."""
    size = math.prod(shape)
    return chunk_bytes // itemsize if size * itemsize >= 2 * chunk_bytes else 0


def _chunks(like: jax.ShapeDtypeStruct, chunk_bytes: int) -> list[jax.ShapeDtypeStruct]:
    """What an array travels as; what is empty never comes, and does not set out."""
    if 0 in like.shape:
        return []
    size = math.prod(like.shape)
    rows = _rows(like.shape, like.dtype.itemsize, chunk_bytes)
    if not rows:
        return [like]
    return [
        jax.ShapeDtypeStruct(
            (min(rows, size - at),), like.dtype, sharding=like.sharding
        )
        for at in range(0, size, rows)
    ]


def _cut(x: jax.Array, chunk_bytes: int) -> Sequence[jax.Array]:
    if 0 in x.shape:
        return []
    rows = _rows(x.shape, x.dtype.itemsize, chunk_bytes)
    return _split(x, rows) if rows else [x]


def _whole(like: jax.ShapeDtypeStruct, chunks: list[jax.Array]) -> jax.Array:
    if not chunks:
        return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
    return chunks[0] if len(chunks) == 1 else _join(chunks, like.shape)


@functools.partial(jax.jit, static_argnums=1)
def _split(x: jax.Array, rows: int) -> list[jax.Array]:
    flat = x.reshape(-1)
    return [flat[at : at + rows] for at in range(0, flat.size, rows)]


@functools.partial(jax.jit, static_argnums=1)
def _join(chunks: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return jnp.concatenate(chunks).reshape(shape)
