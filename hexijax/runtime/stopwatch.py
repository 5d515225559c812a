"""How long a call takes on its device, of arrays that are made for it.

shapes and shardings -> filled -> arrays; call -> device_s -> seconds

A call that is waited for takes what waiting costs, too, which is measured and taken
off; calls in a row on a card take no less than the host needs to dispatch them. Both
are upper bounds of what the device does, and the lower of them counts. CPU devices are
no queues: several calls may run at once there, so each is waited for.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.runtime.layout import DEVICE

ROUND_S = 0.1
"""Of calls in a row: long enough for a card to draw the power it draws in training."""

MOST_CALLS = 50
ROUNDS = 3


def median_s(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call that is waited for, after a first one."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def waiting_s(device: jax.Device, repeats: int = 50) -> float:
    """Seconds that it takes to call a program that does nothing and wait for it."""
    return median_s(_nothing(device), repeats)


def dispatch_s(device: jax.Device, calls: int = 200) -> float:
    """Seconds that each of many calls of a program that does nothing takes, not waited
    for: what a call costs whatever it computes."""
    call = _nothing(device)
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready([call() for _ in range(calls)])
    return (time.perf_counter() - began) / calls


def device_s(
    call: Callable[[], Any], device: jax.Device, asking_s: float | None = None
) -> float:
    """Seconds of a call on its device.

    Args:
      call: dispatches a program and returns something of what it makes.
      device: one that computes it.
      asking_s: ``waiting_s``, where it is known.
    """
    asking_s = waiting_s(device) if asking_s is None else asking_s
    waited_s = median_s(call, ROUNDS)
    alone_s = max(0.0, waited_s - asking_s)
    if device.platform == "cpu":
        return alone_s
    count = min(MOST_CALLS, max(1, round(ROUND_S / max(waited_s, 1e-6))))
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(count - 1):
            call()
        jax.block_until_ready(call())
        rounds.append((time.perf_counter() - began) / count)
    return min(alone_s, statistics.median(rounds))


def filled(structs: Any) -> Any:
    """Arrays like the structs, where those say: unlike numbers around 0, since a card
    draws less power on equal ones; of whole numbers zeros."""
    return jax.tree.map(
        lambda s: _maker(tuple(s.shape), jnp.dtype(s.dtype).name, s.sharding)(), structs
    )


@functools.lru_cache(maxsize=512)
def _maker(shape: tuple[int, ...], dtype: str, sharding: Any) -> Callable[[], Any]:
    count = int(np.prod(shape, dtype=np.int64))

    def make() -> jax.Array:
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.zeros(shape, dtype)
        numbers = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(2_654_435_761)
        unlike = (numbers >> 8).astype(jnp.float32) / 2**24 - 0.5
        return (0.04 * unlike).astype(dtype).reshape(shape)

    made = jax.jit(make, out_shardings=sharding.with_memory_kind(DEVICE))
    if sharding.memory_kind in (None, DEVICE):
        return made
    return lambda: jax.device_put(made(), sharding)


def _nothing(device: jax.Device) -> Callable[[], Any]:
    x = jax.device_put(np.zeros(8, np.float32), device)
    call = jax.jit(lambda x: x + 1)
    return lambda: call(x)
