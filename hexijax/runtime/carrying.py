"""How copies get from device to device: in one process, or between islands.

    pieces -> Carrier.carry -> arrays where they are wanted, or Coming

An island's process knows every place of a plan, but holds arrays of its own alone: what
lies elsewhere is a shape with a sharding on *ghosts*, devices of this process that
stand for another's and never hold an array or run a program. All islands carry the same
pieces in the same order, so each knows what it has to give and what will come.
"""

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from hexijax.program.program import Instruction
from hexijax.program.text import line


class Piece(NamedTuple):
    """An array on one device that is wanted on another."""

    data: Callable[[], jax.Array]
    """The array; asked for where the source is here."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source: jax.Device
    target: jax.Device

    what: Hashable
    """Pieces of one call that are equal in it are copies of each other."""


class Coming:
    """An array that is on its way from another island, or what is made of such, perhaps
    several; any thread may ask for it."""

    def __init__(self, made: Callable[[], Any]):
        """``made``: waits, within the deadline of what is waited for."""
        self._made: Callable[[], Any] | None = made
        self._value: Any = None
        self._lock = threading.Lock()

    def value(self) -> Any:
        """It, once all that it is made of has come."""
        with self._lock:
            if self._made is not None:
                self._value, self._made = self._made(), None
            assert self._value is not None
            return self._value

    def block_until_ready(self) -> Any:
        """As an array's: ``jax.block_until_ready`` calls it."""
        return jax.block_until_ready(self.value())


@runtime_checkable
class Carrier(Protocol):
    """Copies between devices."""

    @property
    def readers(self) -> Sequence[jax.Device]:
        """A device of each island, to read a step's numbers from; none where there is
        one island only."""
        ...

    def here(self, device: jax.Device) -> bool:
        """Whether this process drives a device; else it is a ghost."""
        ...

    def island(self, device: jax.Device) -> str:
        """Whose a device is."""
        ...

    def carry(self, pieces: Sequence[Piece]) -> list[Any]:
        """Each piece at its target: an array, one ``Coming``, or None where the target
        is elsewhere. Dispatched at once, nothing waits."""
        ...

    def settle(self, tree: Any) -> Any:
        """A tree whose arrays have all come."""
        ...


class OneProcess:
    """All devices are here."""

    readers: Sequence[jax.Device] = ()

    def here(self, device: jax.Device) -> bool:
        """Always."""
        return True

    def island(self, device: jax.Device) -> str:
        """The only one, which needs no name."""
        return ""

    def carry(self, pieces: Sequence[Piece]) -> list[Any]:
        """All copies in one call."""
        if not pieces:
            return []
        return jax.device_put([p.data() for p in pieces], [p.target for p in pieces])

    def settle(self, tree: Any) -> Any:
        """As it is."""
        return tree


ONE_PROCESS: Carrier = OneProcess()


def come(x: Any) -> Any:
    """The thing itself, waited for where it is to come."""
    return x.value() if isinstance(x, Coming) else x


def settled(tree: Any) -> Any:
    """A tree whose arrays have all come, whatever carried them."""
    return jax.tree.map(come, tree)


@dataclasses.dataclass
class Spot:
    """Where in a run an island is: the same on all of them, and said only once."""

    at: tuple[str | int, ...]
    """Executor, how many sections ran before, index of the instruction."""

    what: Instruction | str

    moves: int = 0
    """Calls of ``carry`` so far."""

    def next(self) -> tuple[str | int, ...]:
        """Of one more call."""
        self.moves += 1
        return (*self.at, self.moves)

    def __str__(self) -> str:
        if isinstance(self.what, str):
            return self.what
        return line(self.what).partition(" :")[0]


_spot: contextvars.ContextVar[Spot | None] = contextvars.ContextVar(
    "spot", default=None
)


def spot() -> Spot | None:
    """Of what is at hand, if other islands take part in it; work that is handed to
    another thread takes its own along."""
    return _spot.get()


@contextlib.contextmanager
def at_spot(here: Spot) -> Generator[None]:
    """While it lasts, that is where this island is."""
    token = _spot.set(here)
    try:
        yield
    finally:
        _spot.reset(token)
