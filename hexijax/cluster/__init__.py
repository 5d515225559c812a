"""What machines there are: devices, links, nodes, the cluster; and a catalog of cards.

    cluster.toml + catalog (+ profile file) -> Cluster

Nothing here imports JAX. ``docs/cluster.md`` describes the file, key by key.
"""

from hexijax.cluster import catalog
from hexijax.cluster.cluster import Cluster
from hexijax.cluster.errors import ClusterError
from hexijax.cluster.link import LinkProfile
from hexijax.cluster.links import Links, NamedLink
from hexijax.cluster.node import Device, DeviceGroup, Node
from hexijax.cluster.profile import DeviceProfile

__all__ = [
    "Cluster",
    "ClusterError",
    "Device",
    "DeviceGroup",
    "DeviceProfile",
    "LinkProfile",
    "Links",
    "NamedLink",
    "Node",
    "catalog",
]
