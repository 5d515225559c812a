"""Other machines: a cluster with cards added, nodes dropped, links changed.

Cluster, --add, --drop, --link -> changed -> Cluster, and what was assumed
"""

import dataclasses
import re
from collections.abc import Sequence

from hexijax.cluster import (
    Cluster,
    DeviceGroup,
    LinkProfile,
    Links,
    NamedLink,
    Node,
    catalog,
)
from hexijax.errors import UserError, did_you_mean

_ADD = re.compile(r"(?P<kind>[^:@]+):(?P<count>[0-9]+)(@(?P<node>.+))?")
_RATE = re.compile(r"(?P<number>[0-9.]+(e[0-9]+)?)\s*(?P<unit>[a-z/]*)", re.IGNORECASE)
_UNITS = {"": 1e9, "gb/s": 1e9, "gbit/s": 1e9 / 8, "gbit": 1e9 / 8, "gbps": 1e9 / 8}


def changed(
    cluster: Cluster,
    *,
    add: Sequence[str] = (),
    drop: Sequence[str] = (),
    link: Sequence[str] = (),
) -> tuple[Cluster, list[str]]:
    """The cluster with the changes, in this order, and what had to be assumed.

    Raises:
      UserError: a change that is none, or names what is not there.
    """
    assumed: list[str] = []
    for asked in add:
        cluster = _added(cluster, asked, assumed)
    if drop:
        cluster = cluster.without(*drop)
    for asked in link:
        cluster = _linked(cluster, asked)
    return cluster, assumed


def _added(cluster: Cluster, asked: str, assumed: list[str]) -> Cluster:
    match = _ADD.fullmatch(asked)
    if match is None or not int(match["count"]):
        raise UserError(
            f"--add {asked}: give a kind and a number, such as rtx3090-24g:2, and a "
            "node if they go into one: rtx3090-24g:2@box."
        )
    kind, count = match["kind"], int(match["count"])
    own = {profile.kind for profile in cluster.profiles}
    if kind not in own:
        canonical = catalog.match_device_kind(kind)
        if canonical is None:
            raise UserError(f"--add {asked}: {catalog.unknown_kind(kind, (*own,))}")
        kind = canonical
    group = DeviceGroup(kind=kind, count=count)
    into = match["node"] or (cluster.nodes[0].name if len(cluster.nodes) == 1 else None)
    if into:
        host = cluster.node(into)
        grown = dataclasses.replace(host, devices=(*host.devices, group))
        if not match["node"]:
            assumed.append(f"{count} x {kind} go into {into}, the only node")
        nodes = tuple(grown if node is host else node for node in cluster.nodes)
        return dataclasses.replace(cluster, nodes=nodes)
    model = _like(cluster, kind)
    names = {node.name for node in cluster.nodes}
    name = next(n for i in range(1, 10**6) if (n := f"added{i}") not in names)
    node = dataclasses.replace(
        model, name=name, island=name, devices=(group,), absent=()
    )
    assumed.append(
        f"{count} x {kind} stand in a node {name}, linked as {model.name} is"
    )
    return dataclasses.replace(
        cluster,
        nodes=(*cluster.nodes, node),
        links=_as_far(cluster, model, name),
    )


def _like(cluster: Cluster, kind: str) -> Node:
    """The node that a new one of this kind is modelled on."""
    same = [d.node for d in cluster.devices if d.kind == kind]
    return cluster.node(same[0]) if same else cluster.nodes[-1]


def _as_far(cluster: Cluster, model: Node, name: str) -> Links:
    """Links that give a new node the ways its model has, pair by pair where needed."""
    links = cluster.links
    new = [
        NamedLink(
            between=tuple(name if end == model.name else end for end in pair.between),
            link=pair.link,
        )
        for pair in links.node_pairs
        if model.name in pair.between
    ]
    others = [node for node in cluster.nodes if node.name != model.name]
    if links.between_nodes is None and others:  # to its model, as that to another
        link = links.between(model, others[0])
        if link and not (model.nic or links.site_pairs):
            new.append(NamedLink(between=(name, model.name), link=link))
    return dataclasses.replace(links, node_pairs=(*links.node_pairs, *new))


def _linked(cluster: Cluster, asked: str) -> Cluster:
    names, _, rate = asked.partition("=")
    ends = _ends(cluster, names, asked)
    match = _RATE.fullmatch(rate.strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None or not float(match["number"]):
        raise UserError(
            f"--link {asked}: the rate is {rate!r}; it must be GB/s, such as 12.5, or "
            "Gbit/s, such as 100Gbit/s."
        )
    a, b = (cluster.node(end) for end in ends)
    old = cluster.links.between(a, b)
    new = NamedLink(
        between=ends,
        link=LinkProfile(
            latency_s=old.latency_s if old else 50e-6,
            bytes_per_s=float(match["number"]) * unit,
        ),
    )
    kept = tuple(p for p in cluster.links.node_pairs if p.ends != new.ends)
    nodes = tuple(
        _with_nic(node, new.link) if node.name in ends else node
        for node in cluster.nodes
    )
    links = dataclasses.replace(cluster.links, node_pairs=(*kept, new))
    return dataclasses.replace(cluster, nodes=nodes, links=links)


def _with_nic(node: Node, link: LinkProfile) -> Node:
    """A card in the node that the link does not choke on."""
    if node.nic is None or node.nic.bytes_per_s >= link.bytes_per_s:
        return node
    return dataclasses.replace(node, nic=link)


def _ends(cluster: Cluster, names: str, asked: str) -> tuple[str, str]:
    """The two nodes of ``A-B``; names may hold dashes themselves."""
    known = [node.name for node in cluster.nodes]
    cuts = [i for i, letter in enumerate(names) if letter == "-"]
    for cut in cuts:
        a, b = names[:cut], names[cut + 1 :]
        if a in known and b in known and a != b:
            return a, b
    near = ""
    for part in names.split("-", 1):
        near = near or ("" if part in known else did_you_mean(part, known))
    raise UserError(
        f"--link {asked}: {names!r} is no pair of two nodes.{near} Nodes are "
        f"{', '.join(known[:12])}; write A-B=RATE."
    )
