"""The islands' part of docs/performance.md, from what a run has written."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.emulated.table import Figure

ABOUT_MIXED = """\
Two islands: a card, which has the first layers, and the CPU, which has the last two. A
small Llama in fp32 with the highest matmul precision takes 20 steps on one batch;
beside it the plain program on the card alone. The limit of each leaf's gradient error
is 1e-5 of its norm plus 1e-7 of the global norm."""

ABOUT_PIPELINE = """\
The model in two stages, 16 microbatches of 4 sequences, eager 1F1B: the same plan in
one process that drives both cards, and in two islands with a card each."""

ABOUT_LIMITED = """\
The same with our sender held to a rate. The step is predicted from layers, the update
and the smallest message's latency as they were timed in the same run."""

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
    pipeline = found.get("pipeline", {})
    if {"one process", "islands"} <= pipeline.keys():
        alone, apart = pipeline["one process"], pipeline["islands"]["one"]
        ratio = apart["tokens_per_s"] / alone["tokens_per_s"]
        yield Figure("islands of a card each: part of one process's rate", ratio, 0.9)
    for rate, row in found.get("limited", {}).items():
        off = abs(row["predicted_s"] / row["step_s"] - 1)
        name = f"islands, {rate} GB/s apart: predicted step off by"
        yield Figure(name, off, 0.1, at_most=True)


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Everything there is to show."""
    parts = (_mixed, _pipeline, _limited, _paths)
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
    pipeline = found.get("pipeline", {})
    rows = {
        name: row.get("one", row) for name, row in pipeline.items() if row is not None
    }
    if not rows:
        return
    yield ABOUT_PIPELINE
    yield ""
    yield "| | tokens/s | step, median | least | most |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        times = " | ".join(f"{row[k]:.3f} s" for k in ("step_s", "least_s", "most_s"))
        yield f"| {name} | {row['tokens_per_s']:,.0f} | {times} |"


def _limited(found: Mapping[str, Any]) -> Iterator[str]:
    if not (limited := found.get("limited")):
        return
    yield ABOUT_LIMITED
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
