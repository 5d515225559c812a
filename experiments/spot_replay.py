"""Spot machines vanish and return: how much of the training is done all the same.

Run:     python -m experiments.spot_replay [TRACE.json ...]
Needs:   no device; seconds
Expect:  0.9 or more of what restarts for free would give, at published rates

Sixteen nodes of one V100 each train a Llama of 1.35 B parameters, 256 sequences of 2048
tokens a step. Without a trace, losses are drawn at the rates that Bamboo (Thorpe et
al., NSDI 2023) reports of spot GPUs: 10, 16 and 33% of the nodes an hour; three of ten
take another node along. A trace counts machines at regular times, as those of
github.com/skypilot-org/spot-traces do: {"metadata": {"gap_seconds": 300},
"data": [16, ...]}.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node
from hexijax.elastic.replay import Costs, Replayed, Turn, drawn, from_counts, replay

NODES = tuple(f"n{i:02d}" for i in range(16))
HOURS = 24
RATES = (0.10, 0.16, 0.33)

PARAMS, TOKENS = 1.35e9, 256 * 2048
FLOPS_PER_S = 50e12
"""Of a V100 in float16, reckoned: 0.4 of its peak."""
BYTES_PER_S = 1.25e9
"""Of the 10 Gbit/s between such nodes."""


def step_s(nodes: int) -> float:
    """Computing in parallel; gradients and new parameters over each node's link."""
    return 6 * PARAMS * TOKENS / (nodes * FLOPS_PER_S) + 2 * 2 * PARAMS / BYTES_PER_S


COSTS = Costs(
    step_s=step_s,
    state_bytes=12 * PARAMS,  # masters and two moments in float32
    least_nodes=4,
    detect_s=10.0,
    plan_s=60.0,
    compile_s=20.0,
    start_s=120.0,
    copy_every=1,
    far_every=50,
    local_bytes_per_s=BYTES_PER_S,
    far_bytes_per_s=0.5e9,
)


def cluster() -> Cluster:
    """Sixteen nodes that are alike."""
    return Cluster(
        name="spot",
        nodes=tuple(
            Node(
                name=name,
                devices=(DeviceGroup(kind="v100-16g-sxm", count=1),),
                host_memory_bytes=61 * 2**30,
                host_cores=8,
            )
            for name in NODES
        ),
        links=Links(
            between_nodes=LinkProfile(latency_s=50e-6, bytes_per_s=BYTES_PER_S)
        ),
    )


def read(file: Path) -> tuple[list[Turn], float]:
    """A trace of counts, and its length in seconds."""
    raw = json.loads(file.read_text())
    gap_s, counts = float(raw["metadata"]["gap_seconds"]), raw["data"]
    return from_counts(counts, gap_s, NODES), gap_s * len(counts)


def rows(files: Iterable[Path]) -> list[tuple[str, Replayed]]:
    """What came of each trace."""
    where, found = cluster(), list[tuple[str, Replayed]]()
    for file in files:
        turns, until_s = read(file)
        found.append((file.stem, replay(where, turns, COSTS, until_s=until_s)))
    if found:
        return found
    for rate in RATES:
        until_s = HOURS * 3600.0
        turns = drawn(NODES, lost_per_hour=rate, back_s=900.0, until_s=until_s)
        name = f"drawn, {rate:.0%} an hour"
        found.append((name, replay(where, turns, COSTS, until_s=until_s)))
    return found


def render(found: Iterable[tuple[str, Replayed]]) -> str:
    """A Markdown table."""
    lines = [
        "| trace | steps | of free restarts | re-plans | steps again | all stopped |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {r.steps:,} | {r.kept:.3f} | {r.replans} | {r.again} | "
        f"{r.stopped} |"
        for name, r in found
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(render(rows(map(Path, sys.argv[1:]))))
