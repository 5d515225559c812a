"""Which link joins two devices.

The first that is given counts: the pair's own > the node's (or ``in_node``) > the two
nodes' > the two sites' > ``between_nodes`` > the slower of the two nodes' NICs.
"""

import collections
import dataclasses

from hexijax.cluster.errors import ClusterError
from hexijax.cluster.link import LINK, LinkProfile
from hexijax.cluster.node import Device, Node
from hexijax.cluster.record import Key, Record
from hexijax.cluster.values import ListOf, Text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NamedLink:
    """The link of two named ends, the same both ways."""

    between: tuple[str, ...]
    """The two ends."""

    link: LinkProfile
    """What joins them."""

    def __post_init__(self) -> None:
        NAMED_LINK.settle(self)

    @property
    def ends(self) -> frozenset[str]:
        """Both ends, in no order; one site may stand for both."""
        return frozenset(self.between)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """All links of a cluster, by level."""

    in_node: LinkProfile | None = None
    """Between devices of one node, where the node gives none."""

    between_nodes: LinkProfile | None = None
    """Between nodes, where nothing nearer is given."""

    device_pairs: tuple[NamedLink, ...] = ()
    """Between two named devices."""

    node_pairs: tuple[NamedLink, ...] = ()
    """Between two named nodes."""

    site_pairs: tuple[NamedLink, ...] = ()
    """Between nodes of two sites, or between nodes of one: ``["x", "x"]``."""

    _by_ends: dict[str, dict[frozenset[str], LinkProfile]] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        LINKS.settle(self)
        by_ends = {level: self._table(level) for level in PAIR_LEVELS}
        object.__setattr__(self, "_by_ends", by_ends)

    def between_devices(
        self, a: Device, b: Device, node_a: Node, node_b: Node
    ) -> LinkProfile | None:
        """The link of two devices, or None where nothing covers them."""
        pair = self._by_ends["device_pairs"].get(frozenset((a.name, b.name)))
        if pair:
            return pair
        if a.node == b.node:
            return node_a.link or self.in_node
        return self.between(node_a, node_b)

    def between(self, a: Node, b: Node) -> LinkProfile | None:
        """The link of two different nodes, or None where nothing covers them."""
        return (
            self._by_ends["node_pairs"].get(frozenset((a.name, b.name)))
            or self._by_ends["site_pairs"].get(frozenset((a.site, b.site)))
            or self.between_nodes
            or _slower(a.nic, b.nic)
        )

    def among(self, *, devices: set[str], nodes: set[str], sites: set[str]) -> "Links":
        """The links less the named ones of devices, nodes and sites not given."""
        left = {"device_pairs": devices, "node_pairs": nodes, "site_pairs": sites}
        return dataclasses.replace(
            self,
            **{
                level: tuple(p for p in getattr(self, level) if p.ends <= names)
                for level, names in left.items()
            },
        )

    def _table(self, level: str) -> dict[frozenset[str], LinkProfile]:
        """The named links of a level by their ends; two of the same ends are a slip."""
        pairs: tuple[NamedLink, ...] = getattr(self, level)
        counts = collections.Counter(pair.ends for pair in pairs)
        for pair in pairs:
            if counts[pair.ends] > 1:
                raise ClusterError(
                    f"{level} gives {counts[pair.ends]} links between "
                    f"{' and '.join(pair.between)}; a link counts for both directions "
                    "and is given once. Keep one of them."
                )
        return {pair.ends: pair.link for pair in pairs}


def _slower(a: LinkProfile | None, b: LinkProfile | None) -> LinkProfile | None:
    """What two network cards make of the way between them."""
    return min(a, b, key=lambda link: link.bytes_per_s) if a and b else None


PAIR_LEVELS = ("device_pairs", "node_pairs", "site_pairs")

NAMED_LINK = Record(
    make=NamedLink,
    what="a named link",
    keys=(
        Key("between", "between", ListOf(item=Text(), least=2, most=2)),
        Key("link", "link", LINK),
    ),
)
LINKS = Record(
    make=Links,
    what="the links",
    keys=(
        Key("in_node", "in_node", LINK),
        Key("between_nodes", "between_nodes", LINK),
        *(Key(level, level, ListOf(item=NAMED_LINK)) for level in PAIR_LEVELS),
    ),
)
NO_LINKS = Links()
