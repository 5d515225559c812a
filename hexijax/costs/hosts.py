"""What a plan has in each node's host memory, against what the node has.

memory parts by device, cluster -> host_bytes -> node -> bytes
"""

from collections.abc import Mapping

from hexijax.cluster import Cluster
from hexijax.costs.parts import MemoryParts

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""GiB that XLA may pin for GPUs; read before JAX starts."""

LIMIT_BYTES = 64 * 2**30
"""What it pins where the variable is not set."""


POOLED = 1.1
"""Of what rests there, that XLA pins: its pool is not filled to the last byte, and
grows to the limit it was given."""

PROCESS_BYTES = 7 * 2**30
"""Of a process with cards beside what its plan counts: its programs, CUDA and the
compiler had 5.4 to 6.9 GiB resident (GPT of 2 to 6 B on an H200, JAX 0.11)."""

MOST_PARTS, CORES_EACH = 8, 2
"""Of an array that a host's processor updates. XLA runs one element-wise loop on four
threads of sixteen cores; eight parts were 3.3 times as fast on 32 of them, sixteen no
faster (H200, JAX 0.11)."""


def host_parts(cores: int | None) -> int:
    """CPU devices of a process whose host may update parameters beside its cards."""
    return max(1, min(MOST_PARTS, (cores or 1) // CORES_EACH))


def usable_host_bytes(cluster: Cluster, node: str) -> int:
    """What may wait and rest in a node's host memory, of what training may use there.

    Where cards are, their process and XLA's pool take the rest. CPU devices are in host
    memory themselves and have a share of their own.
    """
    has = cluster.node(node).host_memory_bytes
    if all(d.profile.vendor == "cpu" for d in cluster.devices if d.node == node):
        return has
    return int(max(0, has - PROCESS_BYTES) / POOLED)


def host_bytes(memory: Mapping[str, MemoryParts], cluster: Cluster) -> dict[str, int]:
    """Of all devices of a node together, where there is something."""
    found: dict[str, int] = {}
    for name, parts in memory.items():
        if parts.host_bytes:
            node = cluster.device(name).node
            found[node] = found.get(node, 0) + parts.host_bytes
    return found


def full_host(memory: Mapping[str, MemoryParts], cluster: Cluster) -> str:
    """Which node's host has too little, with both numbers; empty: none."""
    for node, num_bytes in host_bytes(memory, cluster).items():
        has = cluster.node(node).host_memory_bytes
        usable = usable_host_bytes(cluster, node)
        if num_bytes > usable:
            room = f"{has:,}"
            if usable < has:
                room = f"{usable:,} beside its process and XLA's pool, of {room}"
            return (
                f"The plan has {num_bytes:,} bytes wait or rest in host memory on "
                f"{node}, which has {room}. Let less of it leave the device, or give "
                "its devices fewer samples."
            )
    return ""
