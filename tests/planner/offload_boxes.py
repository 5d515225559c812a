"""A host of H100s that have so much of their memory."""

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Node

MIB = 2**20


def machine(*usable_mib: int, host_gib: float = 16) -> Cluster:
    """One host of H100s with so much of their memory."""
    groups = tuple(
        DeviceGroup(kind="h100-80g-sxm", count=1, usable_memory_bytes=each * MIB)
        for each in usable_mib
    )
    node = Node(
        name="box",
        devices=groups,
        host_memory_bytes=int(host_gib * 2**30),
        host_cores=16,
        link=LinkProfile(latency_s=1e-5, bytes_per_s=1e11),
    )
    return Cluster(name="box", nodes=(node,))
