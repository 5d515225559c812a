"""Where slices can be read: live devices, host memory, a stored step.

    engine, the nodes that live -> live_sources -> a Source a node
    {Slice: array in host memory} -> Held
    a stored step's places -> inventory.stored_sources

A source says what it holds before anything is read, at which node, and how fast it is
meant to be. Whoever assigns reads looks at nothing else.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hexijax.checkpoint.slices import Key, Slice, Stateful
from hexijax.weights.errors import Damaged
from hexijax.weights.source import Box, index, inside, overlap, shifted

if TYPE_CHECKING:
    import jax

__all__ = [
    "DEVICE",
    "DISK",
    "FAR",
    "OWN",
    "PEER",
    "Damaged",
    "Held",
    "Live",
    "Source",
    "boxes_of",
    "holding",
    "live_sources",
]

DEVICE, OWN, DISK, PEER, FAR = "device", "memory", "disk", "peer", "far"
"""Labels: a live node's device memory; what it saved last, in its host's memory; its
own fast tier; the copy of its slices that another keeps for it; the far tier."""


@runtime_checkable
class Source(Protocol):
    """One place that slices can be read from, by several threads at a time."""

    @property
    def label(self) -> str:
        """Which sort of place: ``device``, ``disk``, ``peer`` or ``far``."""
        ...

    @property
    def node(self) -> str:
        """The node that it is in; empty: none, as an object store."""
        ...

    @property
    def rate_bytes_per_s(self) -> float:
        """How fast it is read, by all its readers together; infinite: unknown."""
        ...

    @property
    def holds(self) -> Mapping[Key, Sequence[Box]]:
        """Boxes that do not overlap; any box inside one of them can be read."""
        ...

    def read(self, name: str, kind: str, box: Box) -> np.ndarray:
        """The numbers of a box that lies within one of ``holds``; to be looked at only.

        Raises:
          Damaged: they are gone, or not what was written.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Arrays in host memory, such as a neighbour's copy, as a ``Source``."""

    arrays: Mapping[Slice, np.ndarray]
    """Each as long as its box."""

    label: str = PEER
    """See ``Source``."""

    node: str = ""
    """See ``Source``."""

    rate_bytes_per_s: float = math.inf
    """See ``Source``."""

    @functools.cached_property
    def holds(self) -> Mapping[Key, Sequence[Box]]:
        """Boxes of the arrays."""
        return boxes_of(self.arrays)

    def read(self, name: str, kind: str, box: Box) -> np.ndarray:
        """A view."""
        held = holding(self.holds, Key(name, kind), box)
        return self.arrays[Slice(name, kind, held)][index(inside(box, held))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Live:
    """A node's device memory, and pinned memory beside it, as a ``Source``."""

    shards: "Mapping[Slice, jax.Array]"
    """By box, each wholly on one device of the node."""

    node: str
    """See ``Source``."""

    label: str = DEVICE
    """See ``Source``."""

    rate_bytes_per_s: float = math.inf
    """See ``Source``."""

    @functools.cached_property
    def holds(self) -> Mapping[Key, Sequence[Box]]:
        """Boxes of the shards."""
        return boxes_of(self.shards)

    def read(self, name: str, kind: str, box: Box) -> np.ndarray:
        """A box, copied from its device where that has memory of its own."""
        held = holding(self.holds, Key(name, kind), box)
        return np.asarray(self.shards[Slice(name, kind, held)])[
            index(inside(box, held))
        ]


def live_sources(
    engine: Stateful,
    node_of: "Mapping[jax.Device, str]",
    rate_bytes_per_s: float = math.inf,
) -> list[Live]:
    """What an engine's live devices hold, a source a node.

    Args:
      engine: of which no step is under way.
      node_of: the node of each device that lives. The others are lost: their memory is
        never touched.
      rate_bytes_per_s: of a node's devices to its host.
    """
    shards: dict[str, dict[Slice, jax.Array]] = {}
    for each, copies in engine.slices().items():
        corner = [start for start, _ in each.box]
        for array in copies:
            if not any(device in node_of for device in array.sharding.device_set):
                continue
            for shard in array.addressable_shards:
                node = node_of.get(shard.device)
                if node is None or not array.size:
                    continue
                rows = zip(shard.index, array.shape, strict=True)
                box = tuple(s.indices(n)[:2] for s, n in rows)
                here = Slice(each.name, each.kind, shifted(box, corner))
                shards.setdefault(node, {}).setdefault(here, shard.data)
    return [
        Live(shards=found, node=node, rate_bytes_per_s=rate_bytes_per_s)
        for node, found in sorted(shards.items())
    ]


def boxes_of(slices: Mapping[Slice, object]) -> dict[Key, list[Box]]:
    """Boxes by array."""
    found: dict[Key, list[Box]] = {}
    for each in slices:
        found.setdefault(each.key, []).append(each.box)
    return found


def holding(holds: Mapping[Key, Sequence[Box]], key: Key, box: Box) -> Box:
    """The box of ``holds`` that ``box`` lies in."""
    for held in holds.get(key, ()):
        if overlap(held, box) == box:
            return held
    raise KeyError(f"no box of {key} that holds {box}")
