"""Which ways copies take between devices, and how long they keep them from others.

    devices, devices -> Ways.hops -> Hop, ... ; hops and bytes -> load -> Load

A device has a way out and a way in to the devices of its node. A node has one of each
to other nodes, which all its devices share; a link that carries less than both network
cards is a way of its own. One copy takes the latency and its bytes at its link's rate;
it keeps each of its ways for its bytes at the rate that the way carries of all copies
together. So latency keeps nobody waiting, many small copies fill a way as one large one
does, and no way carries more than its rate allows. Copies that leave at once take as
long as the slowest alone, or as the way among theirs that needs longest for all.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hexijax.cluster import Cluster, LinkProfile
from hexijax.costs.links import way_bytes_per_s
from hexijax.costs.rates import COPIES_SHARE


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """From one device to another."""

    out: str
    """The way out: ``<device or node> out``."""
    into: str
    """The way in."""
    link: LinkProfile
    """What one copy alone gets."""
    out_bytes_per_s: float
    into_bytes_per_s: float
    """What the ways carry of all copies."""
    between_nodes: bool
    through: str = ""
    """The link, where it carries less than both nodes' network cards."""


Hops = Sequence[tuple[Hop, int]]
"""With how many copies take each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Copies that leave at once, on the ways they take."""

    seconds: float = 0.0
    """Until the last is there, with nothing else on the ways."""
    ways: tuple[str, ...] = ()
    holds_s: tuple[float, ...] = ()
    """For each way, how long it is kept from others."""
    num_bytes: tuple[int, ...] = ()
    """For each way."""


NO_LOAD = Load()

MOST_KEPT = 2**16
"""Answers of each kind that are remembered."""


class Grid(NamedTuple):
    """Devices that divide an array: lane by lane, in each its tensor shards."""

    devices: tuple[str, ...]
    lanes: int
    tensor: int


class Ways:
    """Between the devices of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.hop = functools.lru_cache(MOST_KEPT)(self._hop)
        self.pieces = functools.lru_cache(MOST_KEPT)(self._pieces)
        self.ring = functools.lru_cache(MOST_KEPT)(self._ring)

    @classmethod
    @functools.lru_cache(maxsize=4)
    def of(cls, cluster: Cluster) -> "Ways":
        """Those of a cluster whose plans are costed one after another."""
        return cls(cluster)

    def _hop(self, source: str, target: str) -> Hop:
        """From a device to another."""
        cluster = self._cluster
        link = cluster.link(source, target)
        a, b = cluster.device(source).node, cluster.device(target).node
        if a == b:
            rate = link.bytes_per_s
            return Hop(f"{source} out", f"{target} in", link, rate, rate, False)
        out, into = (way_bytes_per_s(cluster.node(end), link) for end in (a, b))
        through = f"{a} > {b}" if link.bytes_per_s < min(out, into) else ""
        return Hop(f"{a} out", f"{b} in", link, out, into, True, through)

    def _pieces(self, source: Grid, target: Grid) -> tuple[tuple[float, Hops], ...]:
        """Where each target device's part of an array comes from.

        Both grids divide the array evenly, by lanes and by tensor shards. Returns
        parts of what a target device gets, and the hops of the copies of that size.
        """
        pairs: dict[float, list[tuple[str, str]]] = {}
        for i, of_lane in enumerate(_overlaps(source.lanes, target.lanes)):
            for j, of_shard in enumerate(_overlaps(source.tensor, target.tensor)):
                to = target.devices[i * target.tensor + j]
                for (k, rows), (m, columns) in itertools.product(of_lane, of_shard):
                    by = source.devices[k * source.tensor + m]
                    pairs.setdefault(rows * columns, []).append((by, to))
        return tuple((part, self.counted(each)) for part, each in pairs.items())

    def _ring(self, grid: Grid) -> Hops:
        """Hops between nodes of a ring over the lanes, for each tensor shard one ring.

        Those inside a node run between the devices that the program holds anyway.
        """
        devices, lanes, tensor = grid
        pairs = (
            (devices[lane * tensor + t], devices[(lane + 1) % lanes * tensor + t])
            for lane in range(lanes)
            for t in range(tensor)
        )
        return tuple(
            (hop, count) for hop, count in self.counted(pairs) if hop.between_nodes
        )

    def counted(self, pairs: Iterable[tuple[str, str]]) -> Hops:
        """Hops from device to device; between the same ways they are one."""
        counts: dict[Hop, int] = {}
        for source, target in pairs:
            if source != target:
                hop = self.hop(source, target)
                counts[hop] = counts.get(hop, 0) + 1
        return tuple(counts.items())


def load(
    copies: Iterable[tuple[Hops, float, int]],
    *,
    out: bool = True,
    into: bool = True,
    several: bool = False,
) -> Load:
    """Copies that leave at once.

    Args:
      copies: hops, the bytes of each copy, and how often all of these go.
      out: count the ways out.
      into: count the ways in.
      several: a device has them to or from several others, whatever nodes carry.
    """
    share = COPIES_SHARE if several else 1.0
    held: dict[str, dict[tuple[LinkProfile, float], float]] = {}
    alone_s = latency_s = 0.0

    def keep(way: str, num_bytes: float, link: LinkProfile, bytes_per_s: float) -> None:
        kept = held.setdefault(way, {})
        kept[link, bytes_per_s] = kept.get((link, bytes_per_s), 0.0) + num_bytes

    for hops, each, times in copies:
        if not each or not times:
            continue
        for hop, count in hops:
            link, num_bytes = hop.link, each * count * times
            alone_s = max(alone_s, link.flow_s(int(each)))
            latency_s = max(latency_s, link.latency_s)
            inside = 1.0 if hop.between_nodes else share
            if hop.through and out:  # copies elsewhere have links of their own
                keep(hop.through, each * count, link, link.bytes_per_s)
            if out:
                keep(hop.out, num_bytes, link, hop.out_bytes_per_s * inside)
            if into:
                keep(hop.into, num_bytes, link, hop.into_bytes_per_s * inside)
    if not held:
        return NO_LOAD
    holds_s = tuple(
        sum(n / (rate * link.filled(n)) for (link, rate), n in kept.items())
        for kept in held.values()
    )
    return Load(
        max(alone_s, latency_s + max(holds_s)),
        tuple(held),
        holds_s,
        tuple(round(sum(kept.values())) for kept in held.values()),
    )


def _overlaps(sources: int, targets: int) -> list[list[tuple[int, float]]]:
    """For each of ``targets`` even parts: the source parts it meets, and how much."""
    found: list[list[tuple[int, float]]] = []
    for i in range(targets):
        start, stop = i * sources, (i + 1) * sources  # in parts of sources x targets
        found.append(
            [
                (k, (min(stop, (k + 1) * targets) - max(start, k * targets)) / sources)
                for k in range(start // targets, -(-stop // targets))
            ]
        )
    return found
