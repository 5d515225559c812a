"""The islands' part of docs/performance.md, from what a run has written."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.emulated.table import Figure
from experiments.islanded.settings import SLOW

ALONE, APART = "one process", "islands"
"""How a plan ran."""

ABOUT_MIXED = """\
Two islands: a card, which has the first layers, and the CPU, which has the last two. A
small Llama in fp32 with the highest matmul precision takes 20 steps on one batch;
beside it the plain program on the card alone. The limit of each leaf's gradient error
is 1e-5 of its norm plus 1e-7 of the global norm."""

ABOUT_PIPELINE = """\
The model in two stages, 16 microbatches of 4 sequences, eager 1F1B: the same plan in
one process that drives both cards, and in two islands with a card each."""

ABOUT_SLOW = """\
The model in two stages on unlike cards, 16 microbatches of 4 sequences, eager 1F1B:
multiprocessors of the second card were held by another program under NVIDIA MPS
(`experiments/peers/slow_card.py`), and the plan gives it fewer layers. One process and
islands ran one after the other while it was held; the products of both cards were timed
before and after."""

ABOUT_LIMITED = """\
The pipeline on equal cards, in islands, with our sender held to a rate. The step is
predicted from layers and the update as they were timed in the same run {latency}."""
TIMED, ASSUMED = "and the smallest\nmessage's latency", "and a latency\nof 0.2 ms"

ABOUT_PATHS = """\
Rates by size of a message, in GB/s of what one card sends; the smallest as its time.
Between islands JAX's transfer server sends, in 8 streams and chunks of 4 MiB unless it
says otherwise; *at once*: four messages are fetched together."""

OURS = {"streams": 8, "chunk_bytes": 2**22}
SMALLEST = 65536


def figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """What was aimed at and is in this run."""
    if mixed := found.get("mixed"):
        worst = mixed["one"]["worst_error_over_limit"]
        name = "islands of a card and the CPU: worst gradient error over its limit"
        yield Figure(name, worst, 1, at_most=True)
    unlike = f"islands of a card each, 1 : {SLOW.speed}"
    for part, name in (("pipeline", "islands of a card each"), ("slow", unlike)):
        runs = found.get(part, {})
        if {ALONE, APART} <= runs.keys():
            alone, apart = runs[ALONE], runs[APART]["one"]
            ratio = apart["tokens_per_s"] / alone["tokens_per_s"]
            yield Figure(f"{name}: part of one process's rate", ratio, 0.9)
    for rate, row in found.get("limited", {}).items():
        off = abs(row["predicted_s"] / row["step_s"] - 1)
        name = f"islands, {rate} GB/s apart: predicted step off by"
        yield Figure(name, off, 0.1, at_most=True)


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Everything there is to show."""
    parts = (_mixed, _pipeline, _limited, _slow, _paths)
    shown = [lines for part in parts if (lines := "\n".join(part(found)))]
    if failed := found.get("failed"):
        shown.append(f"What was to be measured too and failed: {', '.join(failed)}.")
    yield "\n\n".join(shown)


def _mixed(found: Mapping[str, Any]) -> Iterator[str]:
    if not (mixed := found.get("mixed")):
        return
    one = mixed["one"]
    yield ABOUT_MIXED
    yield ""
    yield "| worst gradient error over its limit | losses off by at most | loss |"
    yield "|---|---|---|"
    yield (
        f"| {one['worst_error_over_limit']:.3f} | {one['worst_loss_error']:.1e} "
        f"| {one['losses'][0]:.3f} to {one['losses'][-1]:.3f} |"
    )


def _pipeline(found: Mapping[str, Any]) -> Iterator[str]:
    if rows := _rows(found.get("pipeline", {})):
        yield ABOUT_PIPELINE
        yield ""
        yield from _rates(rows)


def _slow(found: Mapping[str, Any]) -> Iterator[str]:
    slow = found.get("slow", {})
    if not (rows := _rows(slow)):
        return
    yield ABOUT_SLOW
    yield ""
    yield from _rates(rows)
    checks = {when: slow[when] for when in ("before", "after") if when in slow}
    if checks:
        yield ""
        yield f"| held: {slow['held']} of 132 multiprocessors | first card | second |"
        yield "|---|---|---|"
    for when, check in checks.items():
        first, second = (x / 1e12 for x in check["product_flops_per_s"])
        yield f"| products {when} | {first:.0f} TFLOP/s | {second:.0f} TFLOP/s |"


def _rows(runs: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Those that ended; of islands what the first saw."""
    return {
        how: runs[how].get("one", runs[how]) for how in (ALONE, APART) if how in runs
    }


def _rates(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "| | tokens/s | step, median | least | most |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        times = " | ".join(f"{row[k]:.3f} s" for k in ("step_s", "least_s", "most_s"))
        yield f"| {name} | {row['tokens_per_s']:,.0f} | {times} |"


def _limited(found: Mapping[str, Any]) -> Iterator[str]:
    if not (limited := found.get("limited")):
        return
    timed = found.get("paths", {}).get("between")
    yield ABOUT_LIMITED.format(latency=TIMED if timed else ASSUMED)
    yield ""
    yield "| GB/s | step | predicted | over measured |"
    yield "|---|---|---|---|"
    for rate, row in limited.items():
        step_s, predicted_s = row["step_s"], row["predicted_s"]
        ratio = predicted_s / step_s
        yield f"| {rate} | {step_s:.3f} s | {predicted_s:.3f} s | {ratio:.3f} |"


def _paths(found: Mapping[str, Any]) -> Iterator[str]:
    measured = found.get("paths", {})
    lines: dict[str, dict[int, float]] = {}
    for row in measured.get("inside", ()):
        lines.setdefault(row["path"], {})[row["bytes"]] = row["s"]
    for where in ("between", "to the CPU"):
        for row in measured.get(where, ()):
            ours = all(row[k] == v for k, v in OURS.items())
            how = f"{row['streams']} streams, {row['chunk_bytes'] >> 20} MiB"
            name = row["path"] if where == "between" else f"{row['path']}, {where}"
            name += "" if ours else f", {how}"
            lines.setdefault(name, {})[row["bytes"]] = row["s"]
    if not lines:
        return
    sizes = sorted({size for row in lines.values() for size in row})
    yield ABOUT_PATHS
    yield ""
    yield f"| | {' | '.join(map(_bytes, sizes))} |"
    yield "|---|" + "---|" * len(sizes)
    for name, row in lines.items():
        cells = [_cell(size, row[size]) if size in row else "" for size in sizes]
        yield f"| {name} | {' | '.join(cells)} |"


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"


def _cell(size: int, seconds: float) -> str:
    if size < SMALLEST:
        return f"{seconds * 1e6:,.0f} us"
    return f"{size / seconds / 1e9:.3g}"
