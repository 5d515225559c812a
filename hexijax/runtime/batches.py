"""Which samples of the global batch go where, and the random key of each.

    (step, plan) -> rows of the global batch per (replica, microbatch) -> lanes

The map is a pure function of the plan: replica 0 takes the first samples, its
microbatches in order, lanes in order. Padding repeats a sample with mask 0. A sample's
key follows from (seed, step, its row), never from the device that computes it.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import numpy as np

from hexijax.layers.segment import MASK
from hexijax.plan.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The samples of one microbatch."""

    index: np.ndarray
    """Rows of the global batch, ``[microbatch_size]``; padding repeats row 0 of it."""

    mask: np.ndarray
    """float32 ``[microbatch_size]``: 1 for a sample, 0 for padding."""


def sample_map(plan: Plan) -> dict[tuple[int, int], Rows]:
    """Rows by (replica, microbatch); every row of the batch exactly once.

    The samples of a replica are spread evenly over its microbatches: the first ones
    hold one more when they do not divide.
    """
    rows: dict[tuple[int, int], Rows] = {}
    start = 0
    for r, replica in enumerate(plan.replicas):
        size, count = replica.microbatch_size, replica.microbatches
        for m in range(count):
            real = replica.samples // count + (m < replica.samples % count)
            index = np.full(size, start if real else max(start - 1, 0))
            index[:real] = np.arange(start, start + real)
            rows[r, m] = Rows(index, (np.arange(size) < real).astype(np.float32))
            start += real
    assert start == plan.batch_size, (start, plan.batch_size)
    return rows


def cut_short(
    rows: Mapping[tuple[int, int], Rows], size: int
) -> dict[tuple[int, int], Rows]:
    """The rows of a batch of which only the first ``size`` samples are there; the
    others become padding."""
    return {
        key: Rows(
            np.minimum(each.index, size - 1),
            each.mask * (each.index < size).astype(np.float32),
        )
        for key, each in rows.items()
    }


@functools.partial(jax.jit, static_argnums=(0, 2))
def _key_data(seed: int, step: jax.Array, batch_size: int) -> jax.Array:
    at_step = jax.random.fold_in(jax.random.key(seed), step)
    keys = jax.vmap(lambda row: jax.random.fold_in(at_step, row))(
        jax.numpy.arange(batch_size)
    )
    return jax.random.key_data(keys)


def sample_keys(seed: int, step: int, batch_size: int) -> np.ndarray:
    """Key data of every sample of a step: uint32 ``[batch_size, 2]``, on the host."""
    with jax.default_device(host_device()):
        return np.asarray(_key_data(seed, np.uint32(step), batch_size))


@functools.cache
def host_device() -> jax.Device | None:
    """The CPU backend's first device, where small host work never waits for a card."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def take(batch: Mapping[str, np.ndarray], rows: Rows) -> dict[str, np.ndarray]:
    """The arrays of one microbatch, with its mask."""
    picked = {name: np.asarray(array)[rows.index] for name, array in batch.items()}
    return {**picked, MASK: rows.mask}
