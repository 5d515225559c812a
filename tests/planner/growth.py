"""How long the search takes as clusters grow: CPU seconds of one core.

    python -m tests.planner.growth [DEVICES ...] [--json FILE] [--png FILE]

Nodes of eight cards of one kind, 25 GB/s between them; Llama-2 7B or GPT 350M where the
cards are small; four sequences a device. Wall time is longer on busy cores.
"""

import argparse
import json
import time
from pathlib import Path

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node
from hexijax.layers.known import known
from hexijax.planner.search import search

SIZES: dict[int, tuple[str, ...]] = {
    16: ("a100-40g-sxm", "v100-16g-sxm"),
    128: ("a100-40g-sxm", "v100-16g-sxm"),
    512: ("a100-40g-sxm", "v100-16g-sxm"),
    768: ("h100-80g-sxm", "a100-40g-sxm", "v100-16g-sxm"),
    10_000: ("h100-80g-sxm", "a100-80g-sxm", "a100-40g-sxm", "v100-32g-sxm"),
}
"""Devices and their kinds."""

SMALL = 512
"""Up to so many devices the small model is planned."""


def cluster(num_devices: int, kinds: tuple[str, ...]) -> Cluster:
    """As even over the kinds as nodes of eight can be."""
    num_nodes = num_devices // 8
    nodes = tuple(
        Node(
            name=f"n{i}",
            devices=(DeviceGroup(kind=kinds[i * len(kinds) // num_nodes], count=8),),
            host_memory_bytes=2**40,
            host_cores=96,
            link=LinkProfile(latency_s=1e-5, bytes_per_s=150e9),
        )
        for i in range(num_nodes)
    )
    between = LinkProfile(latency_s=2e-5, bytes_per_s=25e9)
    return Cluster(name="growth", nodes=nodes, links=Links(between_nodes=between))


def measure(num_devices: int) -> dict[str, float]:
    """Seconds of a search, and how near its plan comes to the bound."""
    chain = known("gpt-350m" if num_devices <= SMALL else "llama-2-7b")
    devices = cluster(num_devices, SIZES[num_devices])
    begun_s, wall_s = time.process_time(), time.monotonic()
    found = search(chain, devices, batch_size=4 * num_devices, dtype="bfloat16")
    assert found.plan.prediction
    return {
        "devices": num_devices,
        "kinds": len(SIZES[num_devices]),
        "cpu_s": time.process_time() - begun_s,
        "wall_s": time.monotonic() - wall_s,
        "layouts": found.layouts,
        "played": found.played,
        "of_bound": found.bound_s / found.plan.prediction.step_s,
    }


def main() -> None:
    """Prints a line a size; writes them and a plot where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", type=int, default=[*SIZES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    rows = []
    for num_devices in arguments.devices:
        row = measure(num_devices)
        rows.append(row)
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.png:
        _plot(rows, arguments.png)


def _plot(rows: list[dict[str, float]], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.loglog([r["devices"] for r in rows], [r["cpu_s"] for r in rows], "o-")
    for row in rows:
        axes.annotate(
            f"{row['cpu_s']:{'.0f' if row['cpu_s'] > 10 else '.1f'}} s, "
            f"{row['kinds']:.0f} kinds",
            (row["devices"], row["cpu_s"]),
            textcoords="offset points",
            xytext=(-8, -4) if row is rows[-1] else (6, -4),
            ha="right" if row is rows[-1] else "left",
            fontsize=8,
        )
    axes.set_xlabel("devices")
    axes.set_ylabel("search, CPU seconds of one core")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
