"""The bytes that an executor's slots hold, by device and memory, at their peak.

What lives inside a compiled program is not in it. Arrays that share memory count once;
asking where an array lies waits for it, so a ledger is for tests and for looking, never
for a run that is timed.
"""

import collections
from typing import Any

import jax

from hexijax.runtime.actions import Action, Slots
from hexijax.runtime.executor import Executor
from hexijax.runtime.later import value


class Ledger:
    """Looks after every instruction of the bodies to come."""

    def __init__(self, executor: Executor):
        self.peak_bytes: collections.Counter[tuple[jax.Device, str]] = (
            collections.Counter()
        )
        """By device and kind of memory (``device`` or ``pinned_host``)."""
        executor.body = [self._watched(action) for action in executor.body]

    def _watched(self, action: Action) -> Action:
        def watched(slots: Slots) -> None:
            action(slots)
            self.peak_bytes |= held_bytes(slots)

        return watched


def held_bytes(values: Any) -> collections.Counter[tuple[jax.Device, str]]:
    """Of all arrays among some values now, by device and kind of memory."""
    sizes: dict[tuple[jax.Device, str, int], int] = {}
    for x in jax.tree.leaves(list(map(value, jax.tree.leaves(values)))):
        if not isinstance(x, jax.Array) or x.is_deleted():
            continue
        for shard in x.addressable_shards:
            where = shard.data.unsafe_buffer_pointer()
            key = (shard.device, str(x.sharding.memory_kind), where)
            sizes[key] = max(sizes.get(key, 0), shard.data.nbytes)
    held: collections.Counter[tuple[jax.Device, str]] = collections.Counter()
    for (device, kind, _), size in sizes.items():
        held[device, kind] += size
    return held
