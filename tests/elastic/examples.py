"""A cluster of four nodes that are alike, of one device each."""

from hexijax.cluster import Cluster

NODES = ("a", "b", "c", "d")

TEXT = (
    """\
format = 1
name = "four"

[kinds.cpu-one]
vendor = "cpu"
memory_gib = 2
peak_tflops = { float32 = 0.05 }
memory_gb_per_s = 10
host_link_gb_per_s = 10
source = "declared: stands for a forced CPU device"
"""
    + "".join(
        f"""
[[nodes]]
name = "{name}"
devices = [{{ kind = "cpu-one", count = 1 }}]
host_memory_gib = 4
host_cores = 1
island = "here"
"""
        for name in NODES
    )
    + """
[links]
between_nodes = { latency_us = 200, bandwidth_gb_per_s = 1 }
"""
)


def four() -> Cluster:
    """It."""
    return Cluster.from_toml(TEXT)
