"""What a device and its host do together: copies both ways, updates on the host.

    cluster, device -> host_side -> HostSide

A node's own figures are measurements and are taken as they are. Where it gives none,
what is usual of the kind's nominal link and of the node's cores.
"""

import dataclasses

from hexijax.cluster import Cluster
from hexijax.costs.hosts import usable_host_bytes

IN_SHARE, OUT_SHARE = 52 / 63, 46 / 63
"""Of a nominal host link, what pinned copies reach into a device and out of it: 52 and
46 GB/s of PCIe 5 x16, on an H100 SXM, both directions at once without loss."""

PARAMS_PER_CORE_S = 1e8
"""Parameters that Adam updates on one core of a host in a second, and hands back: 1.61
billion on 16, 3.2 billion on 32 without the way back, by the CPU backend in parts
(H200's hosts, JAX 0.11; docs/performance.md). Fewer cores are taken as their share."""

MOST_CORES = 32
"""Beyond these nobody measured, and memory is the limit: an update moves 28 bytes a
parameter, 90 GB/s at that rate."""

RETURN_BYTES_PER_S = 9e9
"""Bytes a second from an array of the CPU backend into a device, by way of pinned
memory and part by part: 9.2 to 10 GB/s of 134 MB beside other copies (three H200s'
hosts, JAX 0.11), 14 without."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostSide:
    """The host as one of its devices sees it, all devices of the node at work."""

    in_bytes_per_s: float
    """From pinned memory into the device."""

    out_bytes_per_s: float
    """From the device to pinned memory, at the same time."""

    return_bytes_per_s: float
    """From what the host computed into the device."""

    update_params_per_s: float
    """Parameters that the device's share of the cores updates."""

    memory_bytes: int
    """The device's share of host memory that may be used."""

    has_pinned: bool
    """Whether JAX can place arrays in pinned host memory beside the device."""

    source: str
    """Where the rates come from."""


def host_side(cluster: Cluster, device: str, *, sharing: int | None = None) -> HostSide:
    """The host of a device.

    Args:
      cluster: where it is.
      device: its name.
      sharing: devices that share the node's memory and cores; None: all of them.
    """
    found = cluster.device(device)
    node = cluster.node(found.node)
    if sharing is None:
        sharing = cluster.num_devices(node.name)
    declared = found.profile.vendor == "cpu"
    measured = node.host_link_bytes_per_s
    nominal = found.host_link_bytes_per_s
    inward = nominal if measured or declared else nominal * IN_SHARE
    outward = nominal if measured or declared else nominal * OUT_SHARE
    outward = node.host_out_bytes_per_s or outward
    returns = node.host_return_bytes_per_s or RETURN_BYTES_PER_S
    updates = node.host_update_params_per_s or (
        PARAMS_PER_CORE_S * min(node.host_cores, MOST_CORES)
    )
    return HostSide(
        in_bytes_per_s=inward,
        out_bytes_per_s=outward,
        return_bytes_per_s=min(inward, returns),
        update_params_per_s=updates / sharing,
        memory_bytes=usable_host_bytes(cluster, node.name) // sharing,
        has_pinned=found.profile.jax_runs and found.profile.vendor in HAVE_PINNED,
        source=" and ".join(
            (
                "the node's measured link" if measured else "a usual share of the link",
                "its measured updates"
                if node.host_update_params_per_s
                else "100 million parameters/s a core",
            )
        ),
    )


HAVE_PINNED = ("nvidia", "amd", "google", "cpu")
"""Vendors whose backend has the memory kind ``pinned_host``."""
