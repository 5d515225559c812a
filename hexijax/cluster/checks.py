"""What a cluster's parts must be to each other, checked when it is made."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping

from hexijax.cluster import catalog
from hexijax.cluster.errors import ClusterError
from hexijax.cluster.links import PAIR_LEVELS, Links
from hexijax.cluster.node import Device, Node
from hexijax.cluster.profile import DeviceProfile
from hexijax.errors import did_you_mean


def resolve_kinds(
    nodes: tuple[Node, ...], given: Mapping[str, DeviceProfile]
) -> tuple[tuple[Node, ...], tuple[DeviceProfile, ...]]:
    """The nodes with kinds under their own names, and a profile of each, by name.

    A given profile comes before the catalog, which knows cards by other names too.
    """
    own_name: dict[str, str] = {}
    found: dict[str, DeviceProfile] = {}
    for node in nodes:
        for kind in {group.kind for group in node.devices} - own_name.keys():
            own = kind if kind in given else catalog.match_device_kind(kind)
            if own is None:
                known = catalog.unknown_kind(kind, tuple(given))
                raise ClusterError(f"node {node.name}: {known}")
            own_name[kind] = own
            found[own] = given.get(own) or catalog.profiles()[own]
    renamed = (_renamed(node, own_name) for node in nodes)
    return tuple(renamed), tuple(found[kind] for kind in sorted(found))


def check_nodes(nodes: tuple[Node, ...], devices: tuple[Device, ...]) -> None:
    """Node names differ, a device is there, none has more memory than its kind."""
    seen: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if node.name in seen:
            raise ClusterError(
                f"nodes[{seen[node.name]}] and nodes[{i}] are both called "
                f"{node.name!r}; devices are called after their node, so names must "
                "differ. Rename one."
            )
        seen[node.name] = i
    if not devices:
        raise ClusterError(
            f"no device is left in {len(nodes)} nodes; a cluster has at least one. "
            "Take an index out of `absent`."
        )
    for device in devices:
        nominal = device.profile.nominal_memory_bytes
        if device.usable_memory_bytes > nominal:
            raise ClusterError(
                f"device {device.name} has {device.usable_memory_bytes:,} usable bytes "
                f"of memory, its kind {device.kind} {nominal:,} in all; usable is at "
                "most all. Lower usable_memory_gib."
            )


def check_links(
    nodes: tuple[Node, ...], devices: tuple[Device, ...], links: Links
) -> None:
    """Links name what there is, and something joins every two devices."""
    known = {
        "device_pairs": {device.name for device in devices},
        "node_pairs": {node.name for node in nodes},
        "site_pairs": {node.site for node in nodes},
    }
    for level in PAIR_LEVELS:
        for pair in getattr(links, level):
            _check_ends(level, pair.between, known[level])
    for node in nodes:
        if not (node.link or links.in_node):
            _check_all_pairs_named(node, devices, links)
    if links.between_nodes or all(node.nic for node in nodes):
        return
    for a, b in itertools.combinations(nodes, 2):
        if links.between(a, b) is None:
            raise ClusterError(
                f"nothing joins nodes {a.name!r} and {b.name!r}; every two nodes need "
                "a link. Give links.between_nodes, a pair in links.node_pairs or "
                "links.site_pairs, or both nodes a nic."
            )


def _check_ends(level: str, between: tuple[str, ...], known: Collection[str]) -> None:
    """Both ends exist, and differ where they must."""
    what = level.removesuffix("_pairs")
    for end in between:
        if end not in known:
            raise ClusterError(
                f"links.{level} names the {what} {end[:60]!r}, which is none of the "
                f"cluster's {len(known)}.{did_you_mean(end, known)} Correct the name, "
                "or take the link out."
            )
    if between[0] == between[1] and what != "site":
        raise ClusterError(
            f"links.{level} joins the {what} {between[0]!r} with itself; a link has "
            "two ends. Links inside a node are the node's `link`."
        )


def _check_all_pairs_named(
    node: Node, devices: tuple[Device, ...], links: Links
) -> None:
    """A node without a link of its own has every pair of its devices named."""
    inside = [device for device in devices if device.node == node.name]
    for a, b in itertools.combinations(inside, 2):
        if links.between_devices(a, b, node, node) is None:
            raise ClusterError(
                f"nothing joins devices {a.name} and {b.name}; every two devices need "
                f"a link. Give node {node.name} a `link`, or links.in_node for all."
            )


def _renamed(node: Node, own_name: Mapping[str, str]) -> Node:
    """The node with its kinds under their own names."""
    if all(group.kind == own_name[group.kind] for group in node.devices):
        return node
    groups = (
        dataclasses.replace(group, kind=own_name[group.kind]) for group in node.devices
    )
    return dataclasses.replace(node, devices=tuple(groups))
