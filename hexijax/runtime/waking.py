"""Cards' first allocation and first copies, while Python is at work elsewhere.

The first array on a card waits for its allocator and the first copy between two for
their link: seconds, in which a model can be traced.
"""

import contextlib
import itertools
import threading
from collections.abc import Mapping

import jax
import numpy as np

from hexijax.cluster import Cluster
from hexijax.runtime.devices import CPU, assign

NUM_BYTES = 1 << 20
"""Of an array that is copied: enough for the way that large ones take."""


def wake(cluster: Cluster, *, emulate: bool = False) -> threading.Thread:
    """Begins to use the cluster's cards; what is wrong with them is said by others."""

    def run() -> None:
        with contextlib.suppress(Exception):
            touch(assign(cluster, emulate=emulate))

    thread = threading.Thread(target=run, name="waking", daemon=True)
    thread.start()
    return thread


def touch(devices: Mapping[str, jax.Device]) -> None:
    """Puts an array on each card, and copies one from each to the next."""
    cards = [device for device in devices.values() if device.platform != CPU]
    host = np.zeros(NUM_BYTES, np.uint8)
    there = [jax.device_put(host, card) for card in cards]
    ways = itertools.pairwise([*zip(cards, there, strict=True)])
    jax.block_until_ready(
        [jax.device_put(array, card) for (_, array), (card, _) in ways]
    )
