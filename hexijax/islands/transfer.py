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
import dataclasses
import functools
import itertools
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer

from hexijax.errors import UserError
from hexijax.islands.world import IslandLost, World

CHUNK_BYTES = 4 * 2**20
"""Of the pieces of a large array."""

STREAMS = 4
"""Sockets that a server sends through."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Between two looks whether something has come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """What other islands fetch arrays from; what it offers is let go with it."""

    address: str
    """Where it listens, ``host:port``."""

    raw: Any = dataclasses.field(repr=False)
    """JAX's own."""


def start_server(address: str = "127.0.0.1:0") -> Server:
    """A transfer server of this process's default backend.

    Args:
      address: ``host:port`` of an interface of this machine, and of no other; port 0
        takes a free one.

    Raises:
      UserError: it is no address of this machine, or taken.
    """
    host, _, port = address.rpartition(":")
    # The server itself would share a port with whoever has it.
    try:
        with socket.socket() as probe:
            probe.bind((host, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"A transfer server was to listen at {address!r}, and cannot: {error}. It "
            "takes `host:port` with a numeric address of this machine and a port that "
            "nobody has; port 0 takes a free one."
        ) from error
    client = jax.local_devices()[0].client
    raw = transfer.start_transfer_server(client, address, [f"{host}:0"] * STREAMS)
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
    """

    def __init__(
        self,
        server: Server,
        world: World,
        gone: Callable[[], str | None] = lambda: None,
    ):
        self._server, self._world, self.gone = server, world, gone
        self._peers: dict[str, Any] = {}
        self.traffic: Mapping[str, Traffic] = collections.defaultdict(Traffic)
        """By the island it came from."""
        self.offered_bytes: collections.Counter[str] = collections.Counter()
        """By the island it was meant for."""
        self._engines = itertools.count()

    def next_engine(self) -> int:
        """A number for one more engine: the same on all islands, which make the same
        ones."""
        return next(self._engines)

    def offer(self, peer: str, number: int, arrays: Sequence[jax.Array]) -> None:
        """Leaves a message for an island to fetch; does not wait."""
        chunks = [chunk for x in arrays for chunk in _cut(x)]
        self.offered_bytes[peer] += sum(x.nbytes for x in chunks)
        if chunks:
            self._server.raw.await_pull(number, chunks)

    def pull(
        self, peer: str, number: int, like: Sequence[jax.ShapeDtypeStruct], what: str
    ) -> "Arriving":
        """Begins to fetch a message; ``what`` it is, for people."""
        wanted = [chunk for x in like for chunk in _chunks(x)]
        try:
            if peer not in self._peers:
                address = self._world.peers[peer]
                self._peers[peer] = self._server.raw.connect(address)
            arrays = self._peers[peer].pull(number, wanted) if wanted else []
        except jax.errors.JaxRuntimeError as error:
            raise IslandLost(peer, what, 0.0, _first_line(error)) from error
        return Arriving(self, peer, what, list(like), arrays)

    @property
    def seconds(self) -> float:
        """How long to wait for anything."""
        return self._world.pull_s


class Arriving:
    """A message on its way here."""

    def __init__(
        self,
        channel: TransferChannel,
        peer: str,
        what: str,
        like: list[jax.ShapeDtypeStruct],
        chunks: list[jax.Array],
    ):
        self._channel, self._peer, self._what = channel, peer, what
        self._like, self._chunks = like, chunks
        self._arrays: list[jax.Array] | None = None

    def wait(self) -> list[jax.Array]:
        """Its arrays, once all have come.

        Raises:
          IslandLost: they did not, in time, or never will.
        """
        if self._arrays is None:
            traffic = self._channel.traffic[self._peer]
            traffic.waited_s += self._watch()
            traffic.messages += 1
            traffic.num_bytes += sum(x.nbytes for x in self._chunks)
            rest = iter(self._chunks)
            self._arrays = [
                _whole(x, [next(rest) for _ in _chunks(x)]) for x in self._like
            ]
            self._chunks = []
        return self._arrays

    def _watch(self) -> float:
        """Until all are there; how long that took. Each chunk has the time that is
        allowed: a slow link is no lost island."""
        began, pause_s = time.perf_counter(), _FIRST_PAUSE_S
        limit_s = self._channel.seconds
        for chunk in self._chunks:
            since = time.perf_counter()
            is_ready: Callable[[], bool] = getattr(chunk, "is_ready")  # noqa: B009
            while not is_ready():
                spent_s = time.perf_counter() - since
                if spent_s > limit_s:
                    raise IslandLost(self._peer, self._what, limit_s)
                if pause_s == _LONGEST_PAUSE_S and (lost := self._channel.gone()):
                    why = "it was given up by whoever started it"
                    raise IslandLost(lost, self._what, spent_s, why)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        spent_s = time.perf_counter() - began
        try:
            jax.block_until_ready(self._chunks)
        except jax.errors.JaxRuntimeError as error:
            why = _first_line(error)
            raise IslandLost(self._peer, self._what, spent_s, why) from error
        return spent_s


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _rows(shape: tuple[int, ...], itemsize: int) -> int:
    """Elements of a chunk; 0: the array travels as it is."""
    size = math.prod(shape)
    return CHUNK_BYTES // itemsize if size * itemsize >= 2 * CHUNK_BYTES else 0


def _chunks(like: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
    """What an array travels as; what is empty never comes, and does not set out."""
    if 0 in like.shape:
        return []
    size, rows = math.prod(like.shape), _rows(like.shape, like.dtype.itemsize)
    if not rows:
        return [like]
    return [
        jax.ShapeDtypeStruct(
            (min(rows, size - at),), like.dtype, sharding=like.sharding
        )
        for at in range(0, size, rows)
    ]


def _cut(x: jax.Array) -> Sequence[jax.Array]:
    if 0 in x.shape:
        return []
    rows = _rows(x.shape, x.dtype.itemsize)
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
