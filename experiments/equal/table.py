"""Equal cards' part of docs/performance.md, from what a run has written."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.predicted.table import Figure, ratios

ABOUT = """\
The Llama of 1.35 B on two equal cards, {batch_size} sequences of 2048 a step, no norm
clipped. *Ours* is the planner's plan from one `hexijax profile` of the two cards, its
prediction committed before (`docs/predicted/{file}`). *Plain JAX* is one program for
both cards (`experiments/peers/plain_lanes.py`). *FSDP2* is
`experiments/peers/torch_fsdp.py`: checkpointing (of no block, of every second, of all)
and microbatch were tried on steps of 32 sequences a card; the fastest, and the fastest
under full checkpointing, ran whole steps. A step is the median of the measured ones."""


PARTS = {"ours": "ours", "plain": "plain JAX", "fsdp": "FSDP2"}
"""What there is to measure, with its name for people."""


def whole(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """FSDP2's whole steps, the fastest first."""
    rows = [row for row in found.get("fsdp", ()) if row["what"] == "whole"]
    return sorted(rows, key=lambda row: -row["tokens_per_s"])


def figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """What equal cards were to reach."""
    rate = found.get("ours", {}).get("tokens_per_s")
    if not rate:
        return
    rows = whole(found)
    full = [row for row in rows if row["remat"] == "full"]
    if full:
        part = rate / full[0]["tokens_per_s"]
        yield Figure(
            "two equal cards: ours over FSDP2, full checkpointing", part, 1.28, False
        )
    if rows:
        part = rate / rows[0]["tokens_per_s"]
        yield Figure("two equal cards: ours over FSDP2's best", part, 1.05, False)
    if "plain" in found:
        part = rate / found["plain"]["tokens_per_s"]
        yield Figure("two equal cards: ours over plain JAX", part, 0.98, False)


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Of docs/performance.md."""
    yield ABOUT.format(file=found["list"]["file"], batch_size=found["batch_size"])
    yield ""
    yield "| | tokens/s | step, median | least | most | ours over it |"
    yield "|---|---|---|---|---|---|"
    rate = found.get("ours", {}).get("tokens_per_s")
    for name, row in _rows(found).items():
        times = " | ".join(f"{row[k]:.3f} s" for k in ("step_s", "least_s", "most_s"))
        over = f"{rate / row['tokens_per_s']:.3f}" if rate and name != "ours" else ""
        yield f"| {name} | {row['tokens_per_s']:,.0f} | {times} | {over} |"
    ours = found.get("ours", {})
    if rate:
        memory = max(ratios(ours), default=0.0)
        least = min(ratios(ours), default=0.0)
        yield ""
        yield (
            f"Ours was predicted to take {ours['predicted_s']:.3f} s; promised memory "
            f"over peak is {least:.3f} to {memory:.3f}."
        )
    missing = [name for part, name in PARTS.items() if not found.get(part)]
    if missing:
        yield ""
        yield f"What was to be measured too and was not: {', '.join(missing)}."
    tried = [row for row in found.get("fsdp", ()) if row["what"] == "try"]
    if tried:
        cells = "; ".join(
            f"{row['remat']} {row['microbatch']:.0f}: {row['tokens_per_s']:,.0f}"
            for row in tried
        )
        yield ""
        yield f"FSDP2 as tried, checkpointing and microbatch, tokens/s: {cells}."


def _rows(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    if "tokens_per_s" in found.get("ours", {}):
        rows["ours"] = found["ours"]
    if "plain" in found:
        plain = found["plain"]
        rows[f"plain JAX, microbatches of {plain['microbatch']}"] = plain
    for row in whole(found):
        what = f"FSDP2, checkpointing {row['remat']}, {row['microbatch']:.0f}"
        rows[what] = row
    return rows


def summary(rows: Mapping[str, Any]) -> str:
    """For the one who runs it."""
    found = rows["equal"]
    lines = [*section(found)][2:]
    lines += [
        f"{f.name}: {f.measured:.3f}, aimed at {f.bound:g}" for f in figures(found)
    ]
    lines += [f"FAILED {k}: {v[-400:]}" for k, v in found["failed"].items()]
    return "\n".join(lines)
