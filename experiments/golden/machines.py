"""Clusters of whole nodes of one kind each, as the published cases have them."""

from collections.abc import Mapping

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node

PER_NODE = 8
"""Cards of a full node."""

IN_NODE_BYTES_PER_S = {
    "a100-80g-sxm": 300e9,
    "h800-80g-sxm": 200e9,
    "h20-96g-sxm": 450e9,
    "mi210-64g": 50e9,
}
"""One way: half of what data sheets sum over both. H800's NVLink is cut to 400 GB/s;
MI210 cards are bridged in groups of four, and eight speak over PCIe in part."""

LATENCY_IN_NODE_S, LATENCY_BETWEEN_S = 5e-6, 10e-6
"""Assumed: NCCL or RCCL, and RDMA."""

HOST_MEMORY_BYTES, HOST_CORES = 2**40, 64
"""Of each node; assumed."""


def make_cluster(counts: Mapping[str, int], between_bytes_per_s: float) -> Cluster:
    """Cards of each kind in full nodes, the last node with what is left."""
    nodes: list[Node] = []
    for kind, count in counts.items():
        link = LinkProfile(
            latency_s=LATENCY_IN_NODE_S, bytes_per_s=IN_NODE_BYTES_PER_S[kind]
        )
        short = kind.partition("-")[0]
        nodes += [
            Node(
                name=f"{short}-{start // PER_NODE}",
                devices=(DeviceGroup(kind=kind, count=min(PER_NODE, count - start)),),
                host_memory_bytes=HOST_MEMORY_BYTES,
                host_cores=HOST_CORES,
                link=link,
            )
            for start in range(0, count, PER_NODE)
        ]
    return Cluster(
        name="-".join(f"{n}-{kind.partition('-')[0]}" for kind, n in counts.items()),
        nodes=tuple(nodes),
        links=Links(
            between_nodes=LinkProfile(
                latency_s=LATENCY_BETWEEN_S, bytes_per_s=between_bytes_per_s
            )
        ),
    )
