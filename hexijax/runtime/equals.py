"""Collectives over equal devices that one process drives: training's, and others'.

    an array on each device -> whole -> one program over all -> parts -> one on each

Sums are made in an order of the backend's own, which is the same each time.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hexijax.runtime.programs import struct

MEMBERS = "members"
"""The axis of their mesh."""


def kind(device: Any) -> tuple[str, str, int]:
    """What devices must have in common to run one program."""
    return device.platform, device.device_kind, device.process_index


@dataclasses.dataclass(frozen=True)
class Equals:
    """Equal devices in an order; each has one part of a *whole* array."""

    devices: tuple[jax.Device, ...]

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Of one axis."""
        return Mesh(np.array(self.devices, dtype=object), (MEMBERS,))

    @functools.cached_property
    def apart(self) -> NamedSharding:
        """Of a whole: each its rows."""
        return NamedSharding(self.mesh, PartitionSpec(MEMBERS))

    @functools.cached_property
    def copied(self) -> NamedSharding:
        """Of an array that each has all of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def like(self, rows: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """The whole of vectors of ``rows`` numbers on each."""
        return struct((len(self.devices) * rows,), dtype, self.apart)

    def whole(self, local: Sequence[jax.Array]) -> jax.Array:
        """Of ``[rows, ...]`` on each; nothing is copied."""
        rows, *tail = local[0].shape
        shape = (len(local) * rows, *tail)
        return jax.make_array_from_single_device_arrays(shape, self.apart, [*local])

    def parts(self, array: jax.Array) -> list[jax.Array]:
        """What each has, by their order."""
        data = {shard.device: shard.data for shard in array.addressable_shards}
        return [data[device] for device in self.devices]

    # Programs to be compiled: whole -> whole, or an array that is copied to all.

    def all_gather(self, whole: jax.Array) -> jax.Array:
        """``[members * rows, ...]`` on each."""
        return self._each(
            lambda x: jax.lax.all_gather(x, MEMBERS, tiled=True), PartitionSpec()
        )(whole)

    def all_reduce(self, whole: jax.Array) -> jax.Array:
        """The sum of all parts on each."""
        return self._each(lambda x: jax.lax.psum(x, MEMBERS), PartitionSpec())(whole)

    def reduce_scatter(self, whole: jax.Array) -> jax.Array:
        """The sum of all parts, of whose rows each gets an equal number."""
        return self._each(
            lambda x: jax.lax.psum_scatter(x, MEMBERS, tiled=True),
            PartitionSpec(MEMBERS),
        )(whole)

    def _each(
        self, f: Callable[[jax.Array], jax.Array], out: PartitionSpec
    ) -> Callable[[jax.Array], jax.Array]:
        return jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=PartitionSpec(MEMBERS),
            out_specs=out,
            check_vma=False,
        )
