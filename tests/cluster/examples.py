"""The shipped cluster files, and a small cluster to break."""

from pathlib import Path

CLUSTER_FILES = sorted(Path(__file__).parents[2].glob("experiments/clusters/*.toml"))

SMALL = """\
format = 1
name = "small"

[kinds.tiny]
vendor = "other"
memory_gib = 4
peak_tflops = { float32 = 2 }
memory_gb_per_s = 100
host_link_gb_per_s = 8

[[nodes]]
name = "a"
devices = [{ kind = "h100-80g-sxm", count = 2 }]
host_memory_gib = 256
host_cores = 32
site = "north"

[[nodes]]
name = "b"
devices = [{ kind = "tiny", count = 2 }]
host_memory_gib = 64
host_cores = 8
site = "south"

[[nodes]]
name = "c"
devices = [{ kind = "t4-16g", count = 1 }, { kind = "p40-24g", count = 1 }]
host_memory_gib = 64
host_cores = 8
site = "south"

[links]
in_node = { latency_us = 5, bandwidth_gb_per_s = 100 }
between_nodes = { latency_us = 50, bandwidth_gb_per_s = 1.25 }
"""
