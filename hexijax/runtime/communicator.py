"""Collectives over a group of devices, wherever they are.

    arrays of the members that are here -> Communicator -> arrays on the members here

Every island that has a member calls the same, in the same order. The way is chosen from
what is true of the members: one mesh of equal devices takes an XLA collective, unlike
devices of one process copy, and islands send each other what the carrier carries. So a
sum over islands is made inside each first, exchanged between their first members, and
spread inside; and whatever several members of an island want crosses once.

Sums are made in the order of the members inside an island, and then in the order of
the islands: the same bits on every member, and in every run.
"""

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hexijax.runtime.carrying import (
    ONE_PROCESS,
    Carrier,
    Piece,
    Spot,
    at_spot,
    settled,
    spot,
)

MEMBERS = "members"
"""The axis of a mesh of members."""

DIRECT_BYTES = 64 * 1024
"""Up to here islands exchange whole sums: one message each is sooner there than two."""


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
        alike = (a.platform, a.device_kind) == (b.platform, b.device_kind)
        return Way.MESH if alike and self._carrier.here(a) else Way.COPY

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
        dtype = functools.reduce(jnp.promote_types, [x.dtype for x in values])
        found: dict[str, Any] = {}
        for island, which in self._islands.items():
            shape = values[which[0]].shape
            if which[0] not in self.here:
                found[island] = jax.ShapeDtypeStruct(shape, dtype)
                continue
            wide = [_cast(settled(values[i]), dtype) for i in which]
            devices = [self.members[i] for i in which]
            if len(which) > 1 and self._is_mesh(which):
                summed = _psum(_mesh(tuple(devices)))(_stacked(wide, devices))
                found[island] = _shards(summed)[devices[0]]
            else:
                came = jax.device_put(wide, [devices[0]] * len(wide))
                found[island] = _added(came)
        return found

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
        """By one collective: rows padded to one number, and cut."""
        rows = [x.shape[0] for x in values]
        if len(values) == 1 or not max(rows):
            return [self._as(i, x) for i, x in enumerate(values)]
        dtype = functools.reduce(jnp.promote_types, [x.dtype for x in values])
        padded = [_padded(_cast(x, dtype), max(rows)) for x in values]
        mesh = _mesh(self.members)
        whole = _gather(mesh, tuple(rows))(_stacked(padded, self.members))
        shards = _shards(whole)
        return [self._as(i, shards[d]) for i, d in enumerate(self.members)]

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


def _shards(x: jax.Array) -> dict[jax.Device, jax.Array]:
    return {shard.device: shard.data for shard in x.addressable_shards}


@functools.cache
def _mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    return Mesh(np.array(devices, dtype=object), (MEMBERS,))


def _stacked(values: Sequence[jax.Array], devices: Sequence[jax.Device]) -> jax.Array:
    """Equal arrays on the devices of a mesh as one, ``[members, ...]``."""
    shape = (len(values), *values[0].shape)
    where = NamedSharding(_mesh(tuple(devices)), PartitionSpec(MEMBERS))
    put = jax.device_put(
        [x[None] for x in values], [SingleDeviceSharding(d) for d in devices]
    )
    return jax.make_array_from_single_device_arrays(shape, where, put)


@functools.cache
def _psum(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """``[members, ...]`` -> the sum, on every member."""
    return jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x[0], MEMBERS),
            mesh=mesh,
            in_specs=PartitionSpec(MEMBERS),
            out_specs=PartitionSpec(),
        )
    )


@functools.cache
def _gather(mesh: Mesh, rows: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """``[members, most rows, ...]`` -> the rows of all, on every member."""

    def f(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x[0], MEMBERS)
        return jnp.concatenate([whole[i, :n] for i, n in enumerate(rows)])

    return jax.jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=PartitionSpec(MEMBERS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
