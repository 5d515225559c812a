"""The places that steps are kept in, how often, how many, and what is there.

    Tiers: fast (a node's own), far (shared), neighbours (in each other's memory)
    Tiers -> inventory -> Inventory: step -> parts and copies -> sources

A node's fast tier and the copies it keeps for its neighbour go with the node. The far
tier is filled from the fast one, later and no faster than it may be.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from hexijax.checkpoint.slices import Slice
from hexijax.checkpoint.sources import DISK, FAR, PEER, Held, Source
from hexijax.weights.stored.files import Files, Rate
from hexijax.weights.stored.manifest import Manifest
from hexijax.weights.stored.parts import Part, first_gap, of_one_mind, parts_in

KEEP = 2
"""Steps kept in a tier, unless told: while one is written, the last is whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """Where a run saves, and when: a step is saved that any of them is due for."""

    fast: Files
    """Each node's own; in one process the nodes have folders in it."""

    every: int = 0
    """Steps between saves; 0: only when asked, as at the end of a run."""

    keep: int = KEEP
    """Steps kept there."""

    far: Files | None = None
    """Outlives every node; None: there is none."""

    far_every: int = 0
    """Steps between those that go there, too; 0: only when asked."""

    far_keep: int = KEEP
    """Steps kept there."""

    far_rate: Rate = dataclasses.field(default_factory=lambda: Rate(math.inf))
    """Of what is sent there: it shares the network with training."""

    neighbour_every: int = 0
    """Steps between copies of each node's slices in its neighbour's memory; 0: none."""

    def due(self, step: int) -> bool:
        """Whether anything is to be done after ``step`` steps."""
        each = (self.every, self.far_every, self.neighbour_every)
        return any(every and step % every == 0 for every in each)

    def stores(self, step: int) -> bool:
        """Whether a step goes to the fast tier: those for the far one start there."""
        return any(n and step % n == 0 for n in (self.every, self.far_every))

    def sends(self, step: int) -> bool:
        """Whether a step goes to the far tier."""
        return bool(self.far_every) and step % self.far_every == 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A node's slices of a step in the memory of another, or in its own."""

    manifest: Manifest
    """Whose and of which step; of no stored array."""

    source: Held
    """The arrays, and where."""


class Neighbours:
    """Copies of nodes' slices in each other's memory, the newest and the one before.

    In one process the memory is the process's own; what would cross a network is copied
    all the same, into buffers that are used again.
    """

    def __init__(self) -> None:
        self._copies: dict[str, list[Copy]] = {}
        self._spare: dict[str, list[dict[Slice, np.ndarray]]] = {}

    def keep(
        self, manifest: Manifest, held: Mapping[Slice, np.ndarray], node: str
    ) -> None:
        """Copies a writer's slices to ``node``."""
        owner = manifest.writer
        copies = self._copies.setdefault(owner, [])
        spare = self._spare.setdefault(owner, [])
        buffers = spare.pop() if spare else {}
        if {k: (v.shape, v.dtype) for k, v in buffers.items()} != {
            k: (v.shape, v.dtype) for k, v in held.items()
        }:
            buffers = {each: np.empty_like(x) for each, x in held.items()}
        for each, x in held.items():
            np.copyto(buffers[each], x)
        source = Held(arrays=buffers, label=PEER, node=node)
        copies.append(Copy(manifest=manifest, source=source))
        while len(copies) > KEEP:
            spare.append(dict(copies.pop(0).source.arrays))

    def forget(self, node: str) -> None:
        """A node is lost, and what it kept for others."""
        for owner, copies in self._copies.items():
            self._copies[owner] = [c for c in copies if c.source.node != node]

    def copies(self) -> list[Copy]:
        """All there are."""
        return [copy for copies in self._copies.values() for copy in copies]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Which slices of which step lie where."""

    parts: Sequence[Part]
    """Stored."""

    copies: Sequence[Copy] = ()
    """In memory."""

    def manifests(self, step: int) -> list[Manifest]:
        """Of one step."""
        found = [p.manifest for p in self.parts if p.step == step]
        held = [c.manifest for c in self.copies if c.manifest.stand.step == step]
        return found + held

    def sources(self, step: int) -> list[Source]:
        """Of one step, the nearest sort first."""
        copies = [c.source for c in self.copies if c.manifest.stand.step == step]
        disks = [p for p in self.parts if p.step == step and p.label == DISK]
        others = [p for p in self.parts if p.step == step and p.label != DISK]
        return [*copies, *disks, *others]

    def whole(self) -> list[int]:
        """The steps of which every piece is somewhere, newest first."""
        steps = {p.step for p in self.parts}
        steps |= {c.manifest.stand.step for c in self.copies}
        return [s for s in sorted(steps, reverse=True) if self.gap(s) is None]

    def gap(self, step: int) -> Slice | None:
        """The first piece of a step that is nowhere."""
        tensors = self.manifests(step)[0].tensors
        return first_gap(tensors, [source.holds for source in self.sources(step)])

    def without(self, nodes: Collection[str]) -> "Inventory":
        """What is left when nodes are lost: their disks and memory with them."""
        return Inventory(
            parts=[p for p in self.parts if p.node not in nodes],
            copies=[c for c in self.copies if c.source.node not in nodes],
        )


def inventory(
    tiers: Tiers,
    neighbours: Neighbours | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Inventory:
    """What is there now.

    Args:
      tiers: looked at.
      neighbours: whose copies count, too.
      tell: is told of what cannot be read; a tier that is away counts as empty.
    """
    parts = _found(lambda: parts_in(tiers.fast, DISK, tell=tell), tiers.fast, tell)
    far = tiers.far
    if far is not None:
        parts += _found(lambda: parts_in(far, FAR, "", tiers.far_rate, tell), far, tell)
    copies = neighbours.copies() if neighbours else ()
    return Inventory(parts=of_one_mind(parts), copies=copies)


def _found(
    look: Callable[[], list[Part]], files: Files, tell: Callable[[str], None]
) -> list[Part]:
    try:
        return look()
    except OSError as error:
        tell(f"{files.where} cannot be looked at ({error}); it counts as empty.")
        return []
