"""Steps in the memory of nodes and, if asked, on neighbours or far away."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hexijax.checkpoint.slices import Slice, Stateful
from hexijax.checkpoint.sources import DISK, FAR, PEER, Held, live_sources
from hexijax.elastic.recovery import Kept


@dataclasses.dataclass
class Nearby:
    """A store that keeps every saved step in this process."""

    node_of: Mapping[Any, str]
    neighbour: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Which node keeps a copy of another's slices."""
    far_every: int = 0
    saved: dict[int, tuple[Any, list[Held]]] = dataclasses.field(default_factory=dict)

    def save(self, engine: Stateful, step: int, data_state: Any) -> None:
        held: list[Held] = []
        everything: dict[Slice, np.ndarray] = {}
        for source in live_sources(engine, self.node_of):
            arrays = {k: np.array(x) for k, x in source.shards.items()}
            everything |= arrays
            held.append(Held(arrays=arrays, label=DISK, node=source.node))
            if source.node in self.neighbour:
                to = self.neighbour[source.node]
                held.append(Held(arrays=arrays, label=PEER, node=to))
        if self.far_every and step % self.far_every == 0:
            held.append(Held(arrays=everything, label=FAR))
        self.saved[step] = data_state, held

    def forget(self, node: str) -> None:
        for step, (state, held) in self.saved.items():
            left = [source for source in held if source.node != node]
            self.saved[step] = state, left

    def kept(self) -> Iterator[Kept]:
        for step in sorted(self.saved, reverse=True):
            state, held = self.saved[step]
            yield Kept(step=step, data_state=state, sources=held)
