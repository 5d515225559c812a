"""The cluster: which devices there are, and how fast bytes move between them.

    cluster.toml -> Cluster.from_toml -> planner, simulator, runtime

No JAX here: a cluster is planned for where nobody owns it.
"""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hexijax.cluster import catalog, toml
from hexijax.cluster.checks import check_links, check_nodes, resolve_kinds
from hexijax.cluster.document import load_measured, read_parts, write_parts
from hexijax.cluster.errors import ClusterError, Form, Place
from hexijax.cluster.link import LinkProfile
from hexijax.cluster.links import NO_LINKS, Links
from hexijax.cluster.node import Device, Node, devices_of
from hexijax.cluster.profile import DeviceProfile
from hexijax.cluster.values import NAME
from hexijax.errors import did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All devices that one job may use."""

    name: str
    """What people call it."""

    nodes: tuple[Node, ...]
    """Its hosts; devices count through them in this order."""

    links: Links = NO_LINKS
    """How nodes and devices are joined."""

    profiles: tuple[DeviceProfile, ...] = ()
    """The kinds in use, by name. Given ones come first, the catalog has the rest; kinds
    that no node has are dropped."""

    devices: tuple[Device, ...] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    """Every present device, node by node."""

    _device_by_name: dict[str, Device] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    _node_by_name: dict[str, Node] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    _devices_by_node: Mapping[str, int] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        place = Place(source="Cluster", form=Form.DATA)
        NAME.read(self.name, place.at("name"))
        given = {profile.kind: profile for profile in self.profiles}
        nodes, profiles = resolve_kinds(self.nodes, given)
        by_kind = {profile.kind: profile for profile in profiles}
        devices = tuple(d for node in nodes for d in devices_of(node, by_kind))
        for field, value in {
            "nodes": nodes,
            "profiles": profiles,
            "devices": devices,
            "_device_by_name": {device.name: device for device in devices},
            "_node_by_name": {node.name: node for node in nodes},
            "_devices_by_node": collections.Counter(d.node for d in devices),
        }.items():
            object.__setattr__(self, field, value)
        check_nodes(nodes, devices)
        check_links(nodes, devices, self.links)

    @classmethod
    def from_toml(cls, source: toml.Source) -> "Cluster":
        """The cluster in a TOML file, or in TOML text.

        A path object is a file; so is a one-line ``str`` that ends in ``.toml``.
        """
        raw, name, folder = toml.load(source, called="cluster")
        place = Place(source=name, form=Form.FILE)
        return cls._made(read_parts(raw, place, folder), place)

    def to_toml(self) -> str:
        """TOML text that ``from_toml`` reads back as an equal cluster.

        Kinds as the catalog has them are named only; others are written whole.
        """
        return toml.dumps(self._document(Form.FILE))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Cluster":
        """The cluster that ``to_json`` wrote; the catalog plays no part in it."""
        place = Place(source="cluster", form=Form.DATA)
        return cls._made(read_parts(data, place, Path()), place)

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON: every figure of every kind, in bytes and seconds."""
        return self._document(Form.DATA)

    def fingerprint(self) -> str:
        """Twelve hex digits that change when anything in the cluster does."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def with_profiles(
        self, source: toml.Source, *, of_others: bool = True
    ) -> "Cluster":
        """The cluster with the figures of a profile file (or text) over its own: of
        kinds, and of the nodes and pairs that it names.

        Raises:
          ClusterError: the file is none, or, unless ``of_others``, it has figures of
            other machines alone.
        """
        mine = {profile.kind: profile for profile in self.profiles}
        measured = load_measured(source, {**catalog.profiles(), **mine})
        if not of_others and not measured.concerns(self.nodes):
            there = ", ".join(sorted({node.name for node in self.nodes})[:8])
            kinds = ", ".join(sorted({d.profile.kind for d in self.devices})[:8])
            raise ClusterError(
                f"The profile measured nothing of cluster {self.name}: that has "
                f"{kinds} in {there}, and the file is of {measured.whose()}. Measure "
                "this cluster by `hexijax profile EXPERIMENT`, or plan by data "
                "sheets, without the file."
            )
        return dataclasses.replace(
            self,
            profiles=tuple({**mine, **measured.kinds}.values()),
            **measured.over(self.nodes, self.links),
        )

    def device(self, name: str) -> Device:
        """The device called ``name``, ``node/index``."""
        if name not in self._device_by_name:
            raise ClusterError(self._unknown("device", name, self._device_by_name))
        return self._device_by_name[name]

    def node(self, name: str) -> Node:
        """The node called ``name``."""
        if name not in self._node_by_name:
            raise ClusterError(self._unknown("node", name, self._node_by_name))
        return self._node_by_name[name]

    def num_devices(self, node: str) -> int:
        """Present devices of a node."""
        return self._devices_by_node[self.node(node).name]

    def link(self, a: Device | str, b: Device | str) -> LinkProfile:
        """What joins two devices, either way: the first that is given counts.

        The pair's own > in the node > the two nodes' > the two sites' > between nodes.
        """
        a = self.device(a) if isinstance(a, str) else a
        b = self.device(b) if isinstance(b, str) else b
        if a.name == b.name:
            raise ClusterError(
                f"cluster {self.name}: a link from {a.name} to itself was asked for; a "
                "link joins two devices, and what stays on one moves no byte."
            )
        link = self.links.between_devices(a, b, self.node(a.node), self.node(b.node))
        assert link, f"{a.name} and {b.name} were checked when the cluster was made"
        return link

    @property
    def islands(self) -> dict[str, tuple[str, ...]]:
        """Names of the devices that each JAX client drives."""
        members: dict[str, list[str]] = collections.defaultdict(list)
        for device in self.devices:
            members[device.island].append(device.name)
        return {island: tuple(names) for island, names in members.items()}

    @property
    def on_cpu(self) -> bool:
        """Its kinds are declared ones that forced CPU devices stand in for."""
        return all(profile.vendor == "cpu" for profile in self.profiles)

    def without(self, *names: str) -> "Cluster":
        """The cluster less some nodes or devices; the others keep their names."""
        known = [*self._node_by_name, *self._device_by_name]
        for name in names:
            if name not in known:
                raise ClusterError(self._unknown("node or device", name, known))
        gone = frozenset(names)
        left = {d.name for d in self.devices if not {d.name, d.node} & gone}
        if not left:
            raise ClusterError(
                f"cluster {self.name}: nothing is left without "
                f"{', '.join(sorted(names))}; a cluster has at least one device of its "
                f"{len(self.devices)}. Keep one."
            )
        nodes = []
        for node in self.nodes:
            slots = range(node.num_slots)
            absent = tuple(i for i in slots if f"{node.name}/{i}" not in left)
            if len(absent) < node.num_slots:
                nodes.append(dataclasses.replace(node, absent=absent))
        links = self.links.among(
            devices=left,
            nodes={node.name for node in nodes},
            sites={node.site for node in nodes},
        )
        return dataclasses.replace(self, nodes=tuple(nodes), links=links)

    @classmethod
    def _made(cls, parts: dict[str, Any], place: Place) -> "Cluster":
        """The cluster of these fields; says where they came from if they clash."""
        try:
            return cls(**parts)
        except ClusterError as error:
            place.fail(str(error))

    def _unknown(self, what: str, name: str, known: Iterable[str]) -> str:
        """What to say of a name that nothing here has."""
        known = list(known)
        some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        return (
            f"cluster {self.name} has no {what} {name[:60]!r}."
            f"{did_you_mean(name, known)} It has {len(known)}: {some}."
        )

    def _document(self, form: Form) -> dict[str, Any]:
        """The document that describes this cluster."""
        return write_parts(
            name=self.name,
            nodes=self.nodes,
            links=self.links,
            profiles=self.profiles,
            form=form,
        )
