"""Seconds of transfers and sums over links."""

import itertools
from collections.abc import Sequence

from hexijax.cluster import Cluster, LinkProfile, Node


def all_reduce_s(link: LinkProfile, members: int, num_bytes: int) -> float:
    """A ring: every member sends 2 (n - 1) pieces of 1/n of the bytes."""
    if members < 2:
        return 0.0
    return 2 * (members - 1) * link.transfer_s(num_bytes // members)


def slowest_link(cluster: Cluster, devices: Sequence[str]) -> LinkProfile | None:
    """The slowest link among some devices; None for a single one.

    Nodes stand for their devices, so that large meshes cost no quadratic search.
    """
    by_node: dict[str, list[str]] = {}
    for name in devices:
        by_node.setdefault(cluster.device(name).node, []).append(name)
    pairs = [
        pair
        for names in by_node.values()
        for pair in (
            itertools.combinations(names, 2) if len(names) <= 8 else [names[:2]]
        )
    ]
    pairs += itertools.combinations((names[0] for names in by_node.values()), 2)
    links = [cluster.link(a, b) for a, b in pairs]
    return min(links, key=lambda link: link.bytes_per_s) if links else None


def transfer_s(
    cluster: Cluster, sources: Sequence[str], targets: Sequence[str], num_bytes: int
) -> float:
    """Seconds to move an array that is spread over ``sources`` to ``targets``.

    In a node the pairs of devices move their pieces at once. Between nodes they share
    the nodes' link and network cards: all bytes cross the slowest of them, each pair no
    faster than one pair may. A device that is both moves nothing.
    """
    if set(sources) == set(targets) or not num_bytes:
        return 0.0
    source = next((d for d in sources if d not in targets), sources[0])
    target = next((d for d in targets if d != source), targets[0])
    link = cluster.link(source, target)
    flows = min(len(sources), len(targets))
    ends = [cluster.node(cluster.device(name).node) for name in (source, target)]
    if ends[0] == ends[1]:
        return link.transfer_s(num_bytes // flows)
    slowest = min(way_bytes_per_s(node, link) for node in ends)
    cards_s = link.latency_s + num_bytes / slowest
    return max(shared_s(link, flows, num_bytes), cards_s)


def shared_s(link: LinkProfile, flows: int, num_bytes: int) -> float:
    """Seconds for ``flows`` pairs of devices to move all bytes over one link."""
    return max(link.transfer_s(num_bytes), link.flow_s(num_bytes // flows))


def gather_s(link: LinkProfile, members: int, num_bytes: int) -> float:
    """A ring that gives every member all bytes, of which each has its part."""
    return (members - 1) * link.transfer_s(num_bytes // members)


def way_bytes_per_s(node: Node, link: LinkProfile) -> float:
    """What a node's way carries of all its devices' copies together.

    Its network card's rate; without one, the rate of the link it leaves by.
    """
    return node.nic.bytes_per_s if node.nic else link.bytes_per_s
