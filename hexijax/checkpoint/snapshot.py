"""An engine's whole state as it is now, in host memory, beside the steps that follow.

    engine, node of each device -> take -> copies under way -> Snapshot.arrays(node)

The copies are dispatched before the next step's programs: on a card they run beside its
forward and backward, and only its update, which overwrites the state, waits for them.
State that rests in host memory is copied at once.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hexijax.checkpoint.slices import Slice, Stateful
from hexijax.checkpoint.sources import live_sources

if TYPE_CHECKING:
    import jax


class Snapshot:
    """See above.

    Args:
      held: by node, copies that may be under way.
    """

    def __init__(self, held: "Mapping[str, Mapping[Slice, jax.Array | np.ndarray]]"):
        self._held = dict(held)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Whose slices there are."""
        return tuple(self._held)

    def arrays(self, node: str) -> dict[Slice, np.ndarray]:
        """A node's slices; waits for the copies."""
        return {each: np.asarray(x) for each, x in self._held[node].items()}


def take(engine: Stateful, node_of: "Mapping[jax.Device, str]") -> Snapshot:
    """Copies of each slice, once: what several nodes hold is the first one's.

    Raises:
      UserError: the host has no memory left to pin.
    """
    from hexijax.runtime.memories import copied

    live = live_sources(engine, node_of)
    found: dict[Slice, tuple[str, jax.Array]] = {}
    for source in live:
        for each, shard in source.shards.items():
            found.setdefault(each, (source.node, shard))
    copies = copied([shard for _, shard in found.values()], "A checkpoint's snapshot")
    held: dict[str, dict[Slice, jax.Array | np.ndarray]] = {
        source.node: {} for source in live
    }
    for (each, (node, _)), copy in zip(found.items(), copies, strict=True):
        held[node][each] = copy
    return Snapshot(held)
