"""Collectives over a group of devices, wherever they are.

    arrays of the members that are here -> Communicator -> arrays on the members here

Every island that has a member calls the same, in the same order. The way is chosen from
what is true of the members: one mesh of equal devices takes an XLA collective, unlike
devices of one process copy, and islands send each other what the carrier carries. So a
sum over islands is made inside each first, exchanged between their first members, and
spread inside; and whatever several members of an island want crosses once.

Sums are made in the order of the members inside an island (of one mesh in the order of
its backend), and then in the order of the islands: the same bits on every member, and
in every run.

Training's Reduce and Gather are planned ahead and never wait, so they are no calls of
this; but what crosses is their carrier's, and the collectives of equal devices too are
the same (``equals``).
"""

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.runtime.carrying import (
    ONE_PROCESS,
    Carrier,
    Piece,
    Spot,
    at_spot,
    settled,
    spot,
)
from hexijax.runtime.equals import Equals, kind

DIRECT_BYTES = 64 * 1024
"""Up to here islands exchange whole sums: one message each is sooner there than two."""

MOST_PADDED = 2
"""How much longer all rows may become by padding: beyond it, copies of a sum are less
to send."""


class Way(enum.Enum):
    """How arrays get from one device to another."""

    MESH = "collective"
    COPY = "copy"
    TRANSFER = "transfer"


class Communicator:
    """A group of devices.

    Args:
      members: each once; ghosts stand for those of other islands.
      carrier: what copies between them.
      dtypes: what each member takes and gives, where it is not the same for all, since
        a kind lacks a dtype; sums are made in what they are all promoted to.
      name: of the group, where it is used outside of a Program: the same everywhere.
    """

    def __init__(
        self,
        members: Sequence[jax.Device],
        carrier: Carrier = ONE_PROCESS,
        *,
        dtypes: Sequence[Any] | None = None,
        name: str = "group",
    ):
        assert len(set(members)) == len(members), "a device is a member once"
        self.members, self._carrier, self._name = tuple(members), carrier, name
        self._dtypes = dtypes and [jnp.dtype(d) for d in dtypes]
        self._turn = itertools.count()
        self._islands: dict[str, list[int]] = {}
        for i, device in enumerate(members):
            self._islands.setdefault(carrier.island(device), []).append(i)

    def way(self, source: int, target: int) -> Way:
        """Between two members."""
        a, b = self.members[source], self.members[target]
        if self._carrier.island(a) != self._carrier.island(b):
            return Way.TRANSFER
        alike = kind(a) == kind(b) and self._carrier.here(a)
        return Way.MESH if alike else Way.COPY

    @functools.cached_property
    def here(self) -> tuple[int, ...]:
        """Members that this process drives."""
        return tuple(i for i, d in enumerate(self.members) if self._carrier.here(d))

    # What crosses as it is: results may be still to come.

    def send(self, value: Any, source: int, target: int) -> Any:
        """A member's array on another. ``value`` is a struct where the source is
        elsewhere; None comes back where the target is."""
        (sent,) = self._carry("send", [(value, source, target, 0)])
        return sent

    def broadcast(self, value: Any, root: int) -> list[Any]:
        """The root's array on every member; a struct where the root is elsewhere."""
        every = range(len(self.members))
        return self._carry("broadcast", [(value, root, i, 0) for i in every])

    def all_gather(self, values: Sequence[Any]) -> list[Any]:
        """Every member's rows, one after another, on each.

        Args:
          values: of any numbers of rows; structs of members elsewhere.
        """
        shapes = {x.shape[1:] for x in values}
        assert len(shapes) == 1, f"rows of different shapes: {shapes}"
        if len(self.members) == 1 or self._one_mesh:
            return self._gathered(values)
        pairs = itertools.product(range(len(values)), range(len(values)))
        sent = self._carry("all_gather", [(values[i], i, j, i) for i, j in pairs])
        return [
            _concatenated(settled(sent[j :: len(values)])) if j in self.here else None
            for j in range(len(values))
        ]

    # Sums.

    def all_reduce(self, values: Sequence[Any]) -> list[Any]:
        """The sum of all members' arrays on each; structs of members elsewhere."""
        if self._one_mesh:
            summed = self._summed(self._wide(values), self.members)
            return [_cast(x, v.dtype) for x, v in zip(summed, values, strict=True)]
        totals = self._inside(values)
        own = self._carrier.island(self.members[self.here[0]])
        leaders = {island: which[0] for island, which in self._islands.items()}
        if len(leaders) > 1:
            totals[own] = self._exchanged(totals, leaders)
        return self._spread(totals[own], values)

    def reduce_scatter(self, values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
        """The sum of all members' arrays, of which each gets its rows.

        Args:
          values: of equal shapes; structs of members elsewhere.
          rows: how many each gets, one after another; any numbers.
        """
        assert sum(rows) == values[0].shape[0], (rows, values[0].shape)
        if self._one_mesh and 0 < len(rows) * max(rows) <= MOST_PADDED * sum(rows):
            return self._scattered(values, rows)
        totals = self._inside(values)
        starts = [0, *itertools.accumulate(rows)]
        parts = []
        for island, which in self._islands.items():
            for j, (start, stop) in enumerate(itertools.pairwise(starts)):
                part = _rows(totals[island], start, stop)
                parts.append((part, which[0], j, (island, j)))
        sent = self._carry("reduce_scatter", parts, cast=False)
        return [
            self._as(j, _added(settled(sent[j :: len(rows)])))
            if j in self.here
            else None
            for j in range(len(rows))
        ]

    def _inside(self, values: Sequence[Any]) -> dict[str, Any]:
        """Each island's sum on its first member; structs of islands elsewhere."""
        found: dict[str, Any] = {}
        for island, which in self._islands.items():
            if which[0] not in self.here:
                like = values[which[0]]
                found[island] = jax.ShapeDtypeStruct(like.shape, _promoted(values))
                continue
            wide = self._wide(values, which)
            devices = [self.members[i] for i in which]
            if len(which) > 1 and self._is_mesh(which):
                found[island], *_ = self._summed(wide, devices)
            else:
                came = jax.device_put(wide, [devices[0]] * len(wide))
                found[island] = _added(came)
        return found

    def _wide(self, values: Sequence[Any], which: Sequence[int] = ()) -> list[Any]:
        """What some members give, or all, in the dtype that sums are made in."""
        dtype = _promoted(values)
        return [_cast(settled(values[i]), dtype) for i in which or range(len(values))]

    def _summed(
        self, values: Sequence[jax.Array], devices: Sequence[jax.Device]
    ) -> list[jax.Array]:
        """The sum on each of equal devices."""
        equals = Equals(tuple(devices))
        return equals.parts(_sum(equals)(equals.whole([x[None] for x in values])))

    def _exchanged(self, totals: dict[str, Any], leaders: dict[str, int]) -> Any:
        """The sum over islands on this one's first member."""
        between = Communicator(
            [self.members[i] for i in leaders.values()],
            self._carrier,
            name=f"{self._name}, first of each island",
        )
        between._turn = self._turn  # its calls are some of this group's
        given = list(totals.values())
        x, count, me = given[0], len(given), between.here[0]
        size = x.size * x.dtype.itemsize
        if count == 2 or size <= DIRECT_BYTES or not x.shape:
            pairs = itertools.product(range(count), range(count))
            sent = between._carry("exchange", [(given[i], i, j, i) for i, j in pairs])
            return _added(settled(sent[me::count]))
        flat = [_flat(x) for x in given]
        each, more = divmod(x.size, count)
        part = between.reduce_scatter(flat, [each + (i < more) for i in range(count)])
        whole = between.all_gather(
            [
                jax.ShapeDtypeStruct((each + (i < more),), x.dtype)
                if mine is None
                else mine
                for i, mine in enumerate(part)
            ]
        )
        return whole[me].reshape(x.shape)

    def _spread(self, total: Any, values: Sequence[Any]) -> list[Any]:
        """One array on all members here, each in its dtype."""
        copies = jax.device_put(
            [total] * len(self.here), [self.members[i] for i in self.here]
        )
        found = dict(zip(self.here, copies, strict=True))
        return [
            _cast(found[i], values[i].dtype) if i in found else None
            for i in range(len(self.members))
        ]

    def _as(self, member: int, x: jax.Array) -> jax.Array:
        return _cast(x, self._dtypes[member]) if self._dtypes else x

    # One mesh.

    @property
    def _one_mesh(self) -> bool:
        return len(self.here) == len(self.members) and self._is_mesh(self.here)

    def _is_mesh(self, which: Sequence[int]) -> bool:
        return all(self.way(which[0], i) is Way.MESH for i in which)

    def _gathered(self, values: Sequence[Any]) -> list[Any]:
        """By one collective."""
        rows = [x.shape[0] for x in values]
        if len(values) == 1 or not max(rows):
            return [self._as(i, x) for i, x in enumerate(values)]
        equals = Equals(self.members)
        whole = equals.whole([_padded(x, max(rows)) for x in self._wide(values)])
        parts = equals.parts(_gather(equals, tuple(rows))(whole))
        return [self._as(i, x) for i, x in enumerate(parts)]

    def _scattered(self, values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
        """By one collective, too: what each is to get is padded to one number."""
        equals = Equals(self.members)
        given = [_parted(x, tuple(rows)) for x in self._wide(values)]
        parts = equals.parts(_scatter(equals)(equals.whole(given)))
        each = enumerate(zip(parts, rows, strict=True))
        return [self._as(i, _sliced(x, 0, n)) for i, (x, n) in each]

    # Between.

    def _carry(
        self,
        what: str,
        wanted: Sequence[tuple[Any, int, int, Any]],
        *,
        cast: bool = True,
    ) -> list[Any]:
        """(array, source, target, name of the array) each -> it at its target; ``cast``
        to what the target takes."""
        dtypes = self._dtypes if cast else None
        pieces = [self._piece(*each, dtypes) for each in wanted]
        turn = next(self._turn)
        if spot() is not None:
            sent = self._carrier.carry(pieces)
        else:
            with at_spot(Spot((self._name, turn), f"{what} {turn} of {self._name}")):
                sent = self._carrier.carry(pieces)
        return [
            x if x is None or dtypes is None else self._as(target, settled(x))
            for x, (_, _, target, _) in zip(sent, wanted, strict=True)
        ]

    def _piece(
        self, value: Any, source: int, target: int, what: Any, dtypes: Any
    ) -> Piece:
        """Its dtype on the way is the smaller one: no byte travels in vain."""
        dtype = jnp.dtype(value.dtype)
        if dtypes and dtypes[target].itemsize < dtype.itemsize:
            dtype, what = dtypes[target], (what, dtypes[target].name)
        return Piece(
            lambda: _cast(settled(value), dtype),
            tuple(value.shape),
            dtype,
            self.members[source],
            self.members[target],
            what,
        )


def _rows(x: Any, start: int, stop: int) -> Any:
    """Rows of an array, or of a struct."""
    if isinstance(x, jax.Array):
        return _sliced(x, start, stop)
    return jax.ShapeDtypeStruct((stop - start, *x.shape[1:]), x.dtype)


def _flat(x: Any) -> Any:
    """As one dim, or a struct of it."""
    if isinstance(x, jax.Array):
        return x.reshape(-1)
    return jax.ShapeDtypeStruct((x.size,), x.dtype)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == jnp.dtype(dtype) else x.astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sliced(x: jax.Array, start: int, stop: int) -> jax.Array:
    return x[start:stop]


@jax.jit
def _concatenated(parts: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts)


@jax.jit
def _added(parts: list[jax.Array]) -> jax.Array:
    """One after another."""
    return functools.reduce(jnp.add, parts)


@functools.partial(jax.jit, static_argnums=1)
def _padded(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, [(0, rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


@functools.partial(jax.jit, static_argnums=1)
def _parted(x: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """Rows one after another, each run of them padded to the longest."""
    starts = [0, *itertools.accumulate(rows)]
    parts = [x[a:b] for a, b in itertools.pairwise(starts)]
    return jnp.concatenate([_padded(part, max(rows)) for part in parts])


def _promoted(values: Sequence[Any]) -> Any:
    return functools.reduce(jnp.promote_types, [x.dtype for x in values])


@functools.cache
def _sum(equals: Equals) -> Callable[[jax.Array], jax.Array]:
    """``[members, ...]`` -> the sum, on every member."""
    return jax.jit(lambda x: equals.all_reduce(x)[0], out_shardings=equals.copied)


@functools.cache
def _scatter(equals: Equals) -> Callable[[jax.Array], jax.Array]:
    """``[members * members * rows, ...]`` -> the sum, on each member its rows."""
    return jax.jit(equals.reduce_scatter, out_shardings=equals.apart)


@functools.cache
def _gather(equals: Equals, rows: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """``[members * most rows, ...]`` -> the rows of all, on every member."""
    starts = [i * max(rows) for i in range(len(rows))]

    def f(x: jax.Array) -> jax.Array:
        whole = equals.all_gather(x)
        parts = zip(starts, rows, strict=True)
        return jnp.concatenate([whole[start : start + n] for start, n in parts])

    return jax.jit(f, out_shardings=equals.copied)
