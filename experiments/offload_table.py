"""GPTs on one card, or four with sharded state: our placement beside other systems'.

Run:     python -m experiments.offload_table [--card a100-40g-sxm] [--cards 4]
         [--models 4B 6B] [--caps 12 24 40] [--host-gib 410] [--json FILE]
Needs:   no device; some minutes
Expect:  docs/offload.md, "Beside other systems"; the figures are predictions
"""

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from experiments.offload_gpt import SHAPES
from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Node, catalog
from hexijax.cluster.profile import usable_by_rule_bytes
from hexijax.layers.chain import Chain
from hexijax.layers.known import gpt
from hexijax.plan.plan import Stage
from hexijax.planner.offload.choice import Choice, Profile
from hexijax.planner.offload.profile import stage_profile
from hexijax.planner.offload.score import Scored
from hexijax.planner.offload.systems import SYSTEMS

LENGTH, BATCH, MOMENTS = 1024, 8, 2
PUBLISHED = {
    1: {"zero-offload-like": 1.85, "patrickstar-like": 1.63, "stronghold-like": 1.32},
    4: {"zero-offload-like": 2.23, "patrickstar-like": 1.65, "stronghold-like": 1.44},
}
"""AutoHete's mean ratios, by cards (arXiv 2503.01890)."""

MICROBATCHES = (1, 2)
"""Of a batch of eight: smaller ones stream, and wait, more often."""


def chain(model: str) -> Chain:
    """The model of a size."""
    depth, width, heads = SHAPES[model]
    return gpt(depth=depth, width=width, num_heads=heads, length=LENGTH, name=model)


def machine(card: str, cards: int, host_gib: float, cores: int) -> Cluster:
    """One host of equal cards."""
    link = LinkProfile(latency_s=1e-5, bytes_per_s=NVLINK_BYTES_PER_S)
    node = Node(
        name="host",
        devices=(DeviceGroup(kind=card, count=cards),),
        host_memory_bytes=int(host_gib * 2**30),
        host_cores=cores,
        link=link,
    )
    return Cluster(name="offload", nodes=(node,))


NVLINK_BYTES_PER_S = 245e9
"""Between two cards of a host: measured on H100s, 82% of an A100's figure."""


def profiles(
    model: Chain, cluster: Cluster, cap_gib: float, *, layered: bool
) -> list[Profile]:
    """One for each microbatch size; the batch is each card's."""
    stage = Stage(
        devices=tuple(device.name for device in cluster.devices),
        layers=(0, len(model.layers)),
        lanes=len(cluster.devices),
        dtype="bfloat16",
    )
    device = cluster.devices[0]
    usable = min(
        usable_by_rule_bytes(int(cap_gib * 2**30), device.profile.vendor),
        device.usable_memory_bytes,
    )
    return [
        stage_profile(
            model,
            cluster,
            stage,
            samples=BATCH // count,
            microbatches=count,
            moments=MOMENTS,
            device_bytes=usable,
            layered=layered,
        )
        for count in MICROBATCHES
    ]


def best(system: str, found: list[Profile]) -> tuple[Scored, int] | None:
    """A system's best step over microbatch sizes, and how many microbatches."""
    least: tuple[Scored, int] | None = None
    for count, profile in zip(MICROBATCHES, found, strict=True):
        below_s = least[0].step_s if least else math.inf
        scored = SYSTEMS[system](profile, below_s)
        if scored and scored.step_s < below_s:
            least = scored, count
    return least


def described(choice: Choice) -> str:
    """Runs of equal layers."""
    words = (f"{c.weights} {c.state} {c.kept}" for c in choice)
    runs = ((word, len([*group])) for word, group in itertools.groupby(words))
    return ", ".join(f"{count} x {word}" for word, count in runs)


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One a model, cap and system."""
    cluster = machine(
        arguments.card, arguments.cards, arguments.host_gib, arguments.cores
    )
    found: list[dict[str, Any]] = []
    for model, cap in itertools.product(arguments.models, arguments.caps):
        for system in SYSTEMS:
            layered = system == "ours"  # no other goes through microbatches so
            sizes = profiles(chain(model), cluster, cap, layered=layered)
            made = best(system, sizes)
            row: dict[str, Any] = {"model": model, "cap_gib": cap, "system": system}
            if made:
                scored, count = made
                row |= {
                    "step_s": scored.step_s,
                    "tokens_per_s": BATCH * LENGTH / scored.step_s,
                    "microbatches": count,
                    "device_gib": scored.device_bytes / 2**30,
                    "host_gib": scored.host_bytes / 2**30,
                    "layers": described(scored.choice),
                }
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def ratios(made: list[dict[str, Any]]) -> dict[str, float]:
    """Mean over cells in which both fit of our rate over another's."""
    cells = {(r["model"], r["cap_gib"], r["system"]): r.get("step_s") for r in made}
    found: dict[str, float] = {}
    for system in SYSTEMS:
        both = [
            seconds / ours
            for (model, cap, name), seconds in cells.items()
            if name == system and seconds and (ours := cells[model, cap, "ours"])
        ]
        found[system] = statistics.mean(both) if both else math.nan
    return found


def main() -> None:
    """Prints a row a line, then the mean ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", default="a100-40g-sxm", choices=catalog.kinds())
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--caps", nargs="+", type=float, default=[12, 24, 40])
    parser.add_argument("--host-gib", type=float, default=440e9 / 2**30)
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    made = rows(arguments)
    published = PUBLISHED.get(arguments.cards, {})
    for system, ratio in ratios(made).items():
        theirs = f"  AutoHete's {published[system]}" if system in published else ""
        print(f"{system:20} {ratio:.2f}{theirs}")
    if arguments.json:
        arguments.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
