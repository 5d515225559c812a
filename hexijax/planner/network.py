"""Rates of the ways between nodes and devices, as the simulator has them.

    node, node -> between -> out of one, into the other, and of the link itself

Nodes of one site and network card are alike, unless a link names them; each pair of
unlike ones is asked for once, by the first device of each.
"""

import dataclasses
import math

from hexijax.cluster import Cluster
from hexijax.costs.links import way_bytes_per_s
from hexijax.planner.mesh import Mesh


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """What carries bytes from one node to another, in each direction."""

    out_bytes_per_s: float
    """Of the one's way, which all its devices share."""

    into_bytes_per_s: float
    """Of the other's."""

    link_bytes_per_s: float
    """Of the link of these two nodes; infinite where both ways carry no more."""


class Network:
    """Of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._first: dict[str, str] = {}
        for device in cluster.devices:
            self._first.setdefault(device.node, device.name)
        named = {name for pair in cluster.links.node_pairs for name in pair.ends}
        self._like = {
            node.name: node.name if node.name in named else (node.site, node.nic)
            for node in cluster.nodes
        }
        self._between: dict[object, Between] = {}
        self._near: dict[tuple[str, ...], float] = {}

    def between(self, a: str, b: str) -> Between:
        """From a node to another."""
        key = (self._like[a], self._like[b])
        if key not in self._between:
            link = self._cluster.link(self._first[a], self._first[b])
            out, into = (way_bytes_per_s(self._cluster.node(n), link) for n in (a, b))
            rate = link.bytes_per_s
            self._between[key] = Between(
                out_bytes_per_s=out,
                into_bytes_per_s=into,
                link_bytes_per_s=rate if rate < min(out, into) else math.inf,
            )
        return self._between[key]

    def like(self, node: str) -> object:
        """Equal for nodes that all links treat alike."""
        return self._like[node]

    def near_bytes_per_s(self, mesh: Mesh) -> float:
        """Of a mesh's way to others in its node."""
        if mesh.devices not in self._near:
            others = (
                device.name
                for device in self._cluster.devices
                if device.node == mesh.node and device.name not in mesh.devices
            )
            other = next(others, None)
            self._near[mesh.devices] = (
                self._cluster.link(mesh.devices[0], other).bytes_per_s
                if other
                else math.inf
            )
        return self._near[mesh.devices]
