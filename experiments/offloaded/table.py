"""Host offload's part of docs/performance.md, from what a run has written."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.emulated.table import Figure
from experiments.offload_table import PUBLISHED

GIB = 2**30
WHOLE = "llama-24"
"""The Llama of 5.1 B."""

FITS, LEAST_TOKENS_PER_S = 80, 12_200
"""Its cap in GiB, a whole H100's, and what is aimed at there."""

LARGE = ("gpt-4B", "gpt-6B")
"""Models that fit no cap that is tried, so that ours under the least is held against
others under the largest."""

STREAMED, KEPT = "params streamed", "params kept"

ABOUT = """\
One card of which a plan may use as much as is said, and 120 GiB of host memory. The
Llama of 5.1 B has 24 layers of width 4096 (feed-forward 11008, vocabulary 32000), 8
sequences of 2048 tokens a step, AdamW with fp32 state, nothing clipped; *-12* and *-16*
are the same with fewer layers. Steps are predicted from layers, links and host updates
that were timed on the same card. *fifo*: updates stand before the next step's first
forward; *priority*: they are due when their layer is needed."""

ABOUT_STREAMED = """\
*Params streamed*: all bf16 parameters in pinned memory, fetched for each pass; *kept*:
on the card. Full recomputation, state on the card."""

ABOUT_OVERLAP = """\
Seconds a step, by JAX's profiler over two steps, in which kernels and copies run, and
in which copies do so beside kernels."""


def ran(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(model, plan, row) of what was measured to its end."""
    for model, plans in found.get("runs", {}).items():
        for name, row in plans.items():
            if "step_s" in row:
                yield model, name, row


def figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """What was aimed at and is in this run."""
    whole = [
        row["tokens_per_s"]
        for model, _, row in ran(found)
        if model == WHOLE and row["cap_gib"] == FITS
    ]
    if whole:
        name = "Llama 5.1 B, 80 GiB: tokens/s"
        yield Figure(name, max(whole), LEAST_TOKENS_PER_S)
        for peer in found.get("peers", {}).values():
            ratio = max(whole) / peer["tokens_per_s"]
            yield Figure("the same over FSDP2 with CPU offload", ratio, 1)
    rows = {name: row["step_s"] for _, name, row in ran(found)}
    if STREAMED in rows and KEPT in rows:
        ratio = rows[STREAMED] / rows[KEPT]
        yield Figure("parameters streamed: step over resident", ratio, 1.03, True)
    for name, ratio in _losses(found):
        yield Figure(f"{name}: largest difference of a loss", ratio, 0.01, True)
    yield from _systems(found)
    errors = [abs(row["predicted_s"] / row["step_s"] - 1) for _, _, row in ran(found)]
    if errors:
        name = f"{len(errors)} offload plans: mean error of predicted steps"
        yield Figure(name, statistics.mean(errors), 0.05, True)


def _systems(found: Mapping[str, Any]) -> Iterator[Figure]:
    """How much longer others' steps take under the same cap, and than ours under the
    least."""
    for model, plans in found.get("runs", {}).items():
        steps = {n: row["step_s"] for n, row in plans.items() if "step_s" in row}
        caps = {row["cap_gib"] for n, row in plans.items() if n.startswith("ours, ")}
        for name, ratio in PUBLISHED[1].items():
            cap_gib = plans.get(name, {}).get("cap_gib", 0)
            least_gib = min(caps, default=cap_gib) if model in LARGE else cap_gib
            for ours_gib, wanted in {least_gib: 1.0, cap_gib: ratio}.items():
                ours = steps.get(f"ours, {ours_gib:g} GiB")
                if name in steps and ours:
                    words = f"{model}, {cap_gib:g} GiB: {name} over ours"
                    if ours_gib != cap_gib:
                        words += f" at {ours_gib:g} GiB"
                    yield Figure(words, steps[name] / ours, wanted)


def _losses(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for model, plans in found.get("runs", {}).items():
        if resident := plans.get("resident", {}).get("losses"):
            for name, row in plans.items():
                if name != "resident" and "losses" in row:
                    pairs = zip(row["losses"], resident, strict=False)
                    yield f"{model} {name}", max(abs(a - b) for a, b in pairs)


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """The tables of a run."""
    rows = [*ran(found)]
    if profile := found.get("profile"):
        yield ABOUT
        yield ""
        links = profile["links"]
        yield (
            f"Pinned copies reach {links['in'] / 1e9:.1f} GB/s in, "
            f"{links['out'] / 1e9:.1f} out, {links['both'] / 1e9:.1f} each way at "
            "once; Adam on the\nhost's "
            f"{profile['cores']} cores {profile['update_params_per_s'] / 1e9:.2f} "
            "billion parameters a second."
        )
        yield ""
    if rows:
        yield from _plans(rows)
    for peer in found.get("peers", {}).values():
        yield f"PyTorch: `{peer['line'].removeprefix('RESULT ')}`."
    yield from _overlaps(rows)
    yield from _late_updates(rows)


Rows = Sequence[tuple[str, str, Mapping[str, Any]]]


def _plans(rows: Rows) -> Iterator[str]:
    yield (
        "| model | plan | cap | tokens/s | step, median | least | most | predicted "
        "| over it | promised | peak |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for model, name, row in rows:
        times = " | ".join(f"{row[k]:.3f} s" for k in ("step_s", "least_s", "most_s"))
        promised = sum(row["promised_bytes"].values()) / GIB
        peak = "-"  # hidden by an earlier plan's of the same process
        if row.get("peak_bytes"):
            peak = f"{sum(row['peak_bytes'].values()) / GIB:.1f} GiB"
        yield (
            f"| {model} | {name} | {row['cap_gib']:g} GiB | {row['tokens_per_s']:,.0f} "
            f"| {times} | {row['predicted_s']:.3f} s "
            f"| {row['predicted_s'] / row['step_s']:.3f} | {promised:.1f} GiB "
            f"| {peak} |"
        )
    if any(name == STREAMED for _, name, _ in rows):
        yield ""
        yield ABOUT_STREAMED


def _late_updates(rows: Rows) -> Iterator[str]:
    """Of watched steps, what of the step before was still to be updated."""
    for model, name, row in rows:
        if "watched" not in row:
            continue
        spans = [words.rsplit(", ", 2) for words in row["watched"]]
        names = [what for what, _, _ in spans]
        first_back = next(i for i, x in enumerate(names) if x.startswith("Backward"))
        late = {
            what.removeprefix("Update ").split(" part ")[0]: float(end)
            for what, _, end in spans[:first_back]
            if what.startswith("Update ")
        }
        second = next(float(x[2]) for x in spans if x[0].startswith("Forward g1 "))
        after = [group for group, end in late.items() if end > second]
        line = (
            f"A step of {model}, {name}, watched: its second layer's forward had "
            f"ended after {second:.0f} ms. Of the step before, {len(late)} groups "
            "were updated in this one"
        )
        if after:
            last = max(late[group] for group in after)
            line += f"; {', '.join(after)} after that layer, the last of them at "
            line += f"{last:.0f} ms"
        yield ""
        yield f"{line}."


def _overlaps(every: Rows) -> Iterator[str]:
    rows = [x for x in every if x[2].get("overlap")]
    if not rows:
        return
    yield ""
    yield ABOUT_OVERLAP
    yield ""
    yield "| model | plan | kernels | in | beside kernels | out | beside kernels |"
    yield "|---|---|---|---|---|---|---|"
    for model, name, row in rows:
        (seen,) = row["overlap"].values()
        figures_s = [
            seen.get(key, 0.0) / 2
            for key in (
                "compute",
                "from host",
                "from host beside compute",
                "to host",
                "to host beside compute",
            )
        ]
        cells = " | ".join(f"{x:.3f}" for x in figures_s)
        yield f"| {model} | {name} | {cells} |"
