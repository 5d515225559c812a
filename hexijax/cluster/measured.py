"""What a profile file says: measured figures that go over those of a cluster.

    {format, measured, kinds, nodes, links} -> Measured -> over(nodes, links)

A machine that was measured need not be in the cluster: what names a node or a pair that
is not there changes nothing. ``measured`` says what the figures were taken on; nobody
plans by it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hexijax.cluster.errors import Place, shown
from hexijax.cluster.kinds import read_kinds
from hexijax.cluster.links import LINKS, Links, NamedLink
from hexijax.cluster.node import NODE, Node
from hexijax.cluster.profile import DeviceProfile
from hexijax.cluster.record import Record

KEYS = ("format", "measured", "kinds", "nodes", "links")
"""Of a profile file."""

_OF_NODES = (
    *("name", "link", "host_link_gb_per_s"),
    *("host_out_gb_per_s", "host_update_mparams_per_s", "host_return_gb_per_s"),
)
_MEASURED_NODE = Record(
    make=Node,
    what="a node that was measured",
    keys=tuple(key for key in NODE.keys if key.name in _OF_NODES),
)
_PAIRS = ("device_pairs", "node_pairs")
_MEASURED_LINKS = Record(
    make=Links,
    what="links that were measured",
    keys=tuple(key for key in LINKS.keys if key.name in _PAIRS),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A profile file's figures."""

    kinds: Mapping[str, DeviceProfile]
    """Whole kinds, their measured figures over what was known of them."""

    nodes: Mapping[str, Mapping[str, Any]]
    """Fields of nodes, by the node's name."""

    links: Links
    """Between named devices and named nodes."""

    others: tuple[str, ...] = ()
    """Kinds with figures that are not known here, so are left out of ``kinds``."""

    def concerns(self, nodes: tuple[Node, ...]) -> bool:
        """Whether it has a figure of one of these nodes or of a kind they hold."""
        kinds = {group.kind for node in nodes for group in node.devices}
        named = {end.split("/")[0] for link in self._pairs for end in link.ends}
        names = {node.name for node in nodes}
        return bool(kinds & self.kinds.keys() or names & (self.nodes.keys() | named))

    def whose(self) -> str:
        """What it has figures of, for people."""
        kinds = sorted({*self.kinds, *self.others})
        named = [f"nodes {', '.join(sorted(self.nodes)[:8])}"] if self.nodes else []
        return (
            " in ".join([", ".join(kinds[:8]), *named] if kinds else named)
            or "nothing yet"
        )

    @property
    def _pairs(self) -> tuple[NamedLink, ...]:
        return (*self.links.device_pairs, *self.links.node_pairs)

    def over(self, nodes: tuple[Node, ...], links: Links) -> dict[str, Any]:
        """Nodes and links with what was measured of them."""
        devices = {f"{node.name}/{i}" for node in nodes for i in range(node.num_slots)}
        names = {node.name for node in nodes}
        return {
            "nodes": tuple(
                dataclasses.replace(node, **self.nodes.get(node.name, {}))
                for node in nodes
            ),
            "links": dataclasses.replace(
                links,
                device_pairs=_over(
                    links.device_pairs, self.links.device_pairs, devices
                ),
                node_pairs=_over(links.node_pairs, self.links.node_pairs, names),
            ),
        }


def read_measured(
    table: Mapping[str, object], place: Place, known: Mapping[str, DeviceProfile]
) -> Measured:
    """The figures of a profile file over the kinds already known."""
    kinds, about = table.get("kinds", {}), table.get("measured", {})
    others: tuple[str, ...] = ()
    if isinstance(about, Mapping) and isinstance(kinds, Mapping):
        # Kinds that another cluster declares.
        others = tuple(k for k in kinds if k not in known and k in about)
        kinds = {k: v for k, v in kinds.items() if k in known or k not in about}
    nodes = table.get("nodes", [])
    if not isinstance(nodes, list):
        place.at("nodes").fail(f"is {shown(nodes)}; it must be a list of [[nodes]].")
    found: dict[str, Mapping[str, Any]] = {}
    for i, raw in enumerate(nodes):
        fields = _MEASURED_NODE.given(raw, place.at("nodes").item(i))
        if "name" not in fields:
            place.at("nodes").item(i).at("name").fail(
                "is missing; what was measured belongs to a node. Name it."
            )
        found[fields["name"]] = fields
    return Measured(
        kinds=read_kinds(kinds, place.at("kinds"), known),
        nodes=found,
        links=_MEASURED_LINKS.read(table.get("links", {}), place.at("links")),
        others=others,
    )


def _over(
    given: tuple[NamedLink, ...], measured: tuple[NamedLink, ...], there: set[str]
) -> tuple[NamedLink, ...]:
    """Links by their ends, those that were measured in the place of others."""
    new = tuple(link for link in measured if link.ends <= there)
    ends = {link.ends for link in new}
    return (*(link for link in given if link.ends not in ends), *new)
