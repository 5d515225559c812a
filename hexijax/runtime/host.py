"""The host's processor as a place of updates: where its arrays lie, ways in and out.

    a card's pinned memory -> seen_by_host -> an update -> way_to_cards -> a card

XLA runs one element-wise loop on four threads of sixteen cores, and copies of one large
array on one. So where the CPU backend has several devices (``cores``) an array lies in
as many parts, by its rows: an update and its way back took 15 ms for 33.5 million
parameters where one device took 90 (32 cores, H200, JAX 0.11).
"""

import functools
import math
import os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hexijax.costs.hosts import host_parts
from hexijax.errors import UserError
from hexijax.runtime.batches import host_device
from hexijax.runtime.layout import PINNED_HOST
from hexijax.runtime.memories import pin
from hexijax.runtime.programs import Programs, struct

CORES = "cores"
"""The mesh's axis."""

LEAST_SIZE = 2**16
"""Elements of an array that is worth its parts."""


@functools.cache
def _mesh() -> Mesh | None:
    """Of the processor's parts, where it is a backend of its own and has several."""
    if jax.default_backend() == "cpu":
        return None
    devices = jax.local_devices(backend="cpu")[: host_parts(os.cpu_count())]
    return Mesh(np.array(devices), (CORES,)) if len(devices) > 1 else None


def host_memory(shape: Sequence[int]) -> jax.sharding.Sharding:
    """Where an array of the host's processor lies, for its updates.

    Where that is a backend of its own, its default memory: what lies in pinned memory
    of a card is read there without a copy.

    Raises:
      UserError: the process has no CPU backend.
    """
    device = host_device()
    if device is None:
        raise UserError(
            "The plan has the host update parameters, and this process has no CPU "
            "backend. Let JAX_PLATFORMS name cpu as well (cuda,cpu), or let the device "
            "update them ('update device' in the plan's state lines)."
        )
    kind = PINNED_HOST if jax.default_backend() == "cpu" else None
    if mesh := _mesh():
        return NamedSharding(mesh, _cut(shape, mesh.size), memory_kind=kind)
    return SingleDeviceSharding(device, memory_kind=kind)


def _cut(shape: Sequence[int], count: int) -> PartitionSpec:
    """By rows where they divide: such parts are views of the whole."""
    if math.prod(shape) >= LEAST_SIZE:
        for dim, size in enumerate(shape):
            if size % count == 0:
                return PartitionSpec(*[None] * dim, CORES)
    return PartitionSpec()


def to_host(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies where the host's processor computes; waits for those in parts."""
    made: list[jax.Array] = []
    for x in arrays:
        where = host_memory(x.shape)
        in_parts = max(len(x.sharding.device_set), len(where.device_set)) > 1
        made.append(jax.device_put(np.array(x) if in_parts else x, where))
    return made


def seen_by_host(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same to be read only: of pinned memory no copy is made.

    ``device_put`` between backends copies, at 1 GB/s where it was measured (H200, JAX
    0.11); NumPy sees pinned memory as it lies, and the CPU backend what NumPy sees.
    """
    return [jax.device_put(np.asarray(x), host_memory(x.shape)) for x in arrays]


def way_to_cards(
    like: jax.ShapeDtypeStruct, programs: Programs
) -> Callable[[jax.Array], jax.Array]:
    """How an array of the host's processor gets to the sharding of ``like``.

    To one card by way of its pinned memory, part by part, so that several copies are
    under way, and joined there.
    """
    target = like.sharding
    spec = getattr(host_memory(like.shape), "spec", PartitionSpec())
    if CORES not in spec or len(target.device_set) > 1:
        return lambda x: jax.device_put(x, target)
    dim = list(spec).index(CORES)
    pinned = target.with_memory_kind(PINNED_HOST)

    def rows(shard: jax.Shard) -> int:
        return shard.index[dim].start or 0

    @functools.cache
    def join(shape: tuple[int, ...], count: int) -> Callable[..., jax.Array]:
        parts = (struct(shape, like.dtype, target),) * count
        return programs.get(
            lambda *given: jnp.concatenate(given, dim), parts, out_shardings=target
        )

    def by_parts(x: jax.Array) -> jax.Array:
        shards = sorted(x.addressable_shards, key=rows)
        given = [np.asarray(shard.data) for shard in shards]
        waiting = pin(given, [pinned] * len(given), "New parameters")
        parts = jax.device_put(waiting, [target] * len(waiting))
        return join(parts[0].shape, len(parts))(*parts)

    return by_parts
