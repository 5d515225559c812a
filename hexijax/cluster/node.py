"""Hosts and the devices in them."""

import dataclasses
from collections.abc import Iterator, Mapping

from hexijax.cluster.errors import ClusterError
from hexijax.cluster.link import LINK, LinkProfile
from hexijax.cluster.profile import DeviceProfile
from hexijax.cluster.record import Key, Record
from hexijax.cluster.units import BANDWIDTH, MEMORY, UPDATES, whole
from hexijax.cluster.values import NAME, ListOf, Text

MAX_DEVICES = 1024
_COUNT = whole(most=MAX_DEVICES, hint=" Leave the entry out where there is no device.")
HOST = Text(
    pattern=r"[A-Za-z0-9_][A-Za-z0-9._@:-]{0,252}",
    rule="a host as ssh knows it, `name` or `user@name`",
)
_INDEX = whole(least=0, most=MAX_DEVICES * 16)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup:
    """Some equal devices of a node."""

    kind: str
    """Their kind: of the catalog, or declared."""

    count: int
    """How many there are."""

    usable_memory_bytes: int | None = None
    """What JAX can use on each here; None: the kind's figure."""

    def __post_init__(self) -> None:
        GROUP.settle(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host."""

    name: str
    """Its name; devices are ``name/0``, ``name/1``, ..."""

    devices: tuple[DeviceGroup, ...]
    """Its devices, in the order of their indices."""

    host_memory_bytes: int
    """Host memory that training may use."""

    host_cores: int
    """Processor cores that training may use."""

    link: LinkProfile | None = None
    """Between devices of this node; None: the cluster's ``in_node``."""

    nic: LinkProfile | None = None
    """The network card that all its devices share; None: no limit beside the links."""

    host_link_bytes_per_s: float | None = None
    """Bandwidth from host memory to a device here, as measured; None: what is usual of
    the kind's figure."""

    host_out_bytes_per_s: float | None = None
    """The way back, as measured; None: as the way there."""

    host_update_params_per_s: float | None = None
    """Parameters a second that the optimizer updates on all cores together; None: a
    rule by their number."""

    host_return_bytes_per_s: float | None = None
    """Bandwidth of what the host has updated to a device, as measured; None: what is
    usual."""

    site: str = "here"
    """Where it stands; links can be given by pairs of sites."""

    island: str = ""
    """The JAX client that drives it; empty: one of its own, called as the node."""

    host: str | None = None
    """What ssh calls it; None: as the node."""

    absent: tuple[int, ...] = ()
    """Indices of devices that are broken, gone or not to be used."""

    def __post_init__(self) -> None:
        if not self.island:
            object.__setattr__(self, "island", self.name)
        object.__setattr__(self, "absent", tuple(sorted(set(self.absent))))
        NODE.settle(self)
        if self.absent and self.absent[-1] >= self.num_slots:
            raise ClusterError(
                f"node {self.name} lacks its device {self.absent[-1]} but has only "
                f"{self.num_slots} devices, 0 to {self.num_slots - 1}. Take the index "
                "out of `absent`."
            )

    @property
    def num_slots(self) -> int:
        """Devices it has, absent ones included."""
        return sum(group.count for group in self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator in its place."""

    node: str
    """Name of its node."""

    index: int
    """Its place in the node; it keeps it when others leave."""

    profile: DeviceProfile
    """What its kind can do."""

    usable_memory_bytes: int
    """What JAX can use here."""

    host_link_bytes_per_s: float
    """Bandwidth to host memory here, one way."""

    island: str
    """The JAX client that drives it."""

    @property
    def name(self) -> str:
        """``node/index``."""
        return f"{self.node}/{self.index}"

    @property
    def kind(self) -> str:
        """Name of its kind."""
        return self.profile.kind


def devices_of(node: Node, profiles: Mapping[str, DeviceProfile]) -> Iterator[Device]:
    """The node's present devices, by index."""
    groups = [group for group in node.devices for _ in range(group.count)]
    absent = set(node.absent)
    for index, group in enumerate(groups):
        if index in absent:
            continue
        profile = profiles[group.kind]
        usable_bytes = group.usable_memory_bytes or profile.usable_memory_bytes
        yield Device(
            node=node.name,
            index=index,
            profile=profile,
            usable_memory_bytes=usable_bytes,
            host_link_bytes_per_s=(
                node.host_link_bytes_per_s or profile.host_link_bytes_per_s
            ),
            island=node.island,
        )


GROUP = Record(
    make=DeviceGroup,
    what="a group of devices",
    keys=(
        Key("kind", "kind", Text()),
        Key("count", "count", _COUNT),
        Key("usable_memory_gib", "usable_memory_bytes", MEMORY),
    ),
)
NODE = Record(
    make=Node,
    what="a node",
    keys=(
        Key("name", "name", NAME),
        Key("devices", "devices", ListOf(item=GROUP, least=1, most=16)),
        Key("host_memory_gib", "host_memory_bytes", MEMORY),
        Key("host_cores", "host_cores", whole(most=65_536)),
        Key("link", "link", LINK),
        Key("nic", "nic", LINK),
        Key("host_link_gb_per_s", "host_link_bytes_per_s", BANDWIDTH),
        Key("host_out_gb_per_s", "host_out_bytes_per_s", BANDWIDTH),
        Key("host_update_mparams_per_s", "host_update_params_per_s", UPDATES),
        Key("host_return_gb_per_s", "host_return_bytes_per_s", BANDWIDTH),
        Key("site", "site", NAME),
        Key("island", "island", NAME),
        Key("host", "host", HOST),
        Key("absent", "absent", ListOf(item=_INDEX)),
    ),
)
