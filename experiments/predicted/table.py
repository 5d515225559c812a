"""What was predicted beside what was measured, from what a run has written.

rows -> figures -> targets; rows -> section -> Markdown; rows -> summary, for people
"""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

GIB = 2**30

ABOUT = """\
Plans drawn at random for two cards and the Llama of 1.35 B: batches unlike on the
cards, unlike stages under several schedules, tensor degree 2, layers recomputed or not,
state and parameters in host memory. The list, `docs/predicted/{file}`, was committed
before any of them was measured: its steps and memory follow from one `hexijax profile`
of the two cards. A step is the median of the measured ones, beside the least and the
most; memory is that of each card that the plan uses."""


class Figure(NamedTuple):
    """A figure that was aimed at."""

    name: str
    measured: float
    bound: float
    at_most: bool


def ran(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Plans whose steps were measured."""
    return {k: v for k, v in found.get("plans", {}).items() if "step_s" in v}


def off_by(row: Mapping[str, Any]) -> float:
    """Part by which a prediction differs from its measurement."""
    return row["predicted_s"] / row["step_s"] - 1


def ratios(row: Mapping[str, Any]) -> list[float]:
    """Promised memory over the peak, of each device; none where none was counted."""
    peaks = row.get("peak_bytes", {})
    return [row["promised_bytes"][name] / peak for name, peak in peaks.items()]


def figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """What the plans were to keep."""
    rows = ran(found)
    if not rows:
        return
    errors = [abs(off_by(row)) for row in rows.values()]
    memory = [ratio for row in rows.values() for ratio in ratios(row)]
    what = f"{len(rows)} plans predicted before"
    yield Figure(f"{what}: mean error of a step", statistics.mean(errors), 0.03, True)
    yield Figure(f"{what}: largest error of a step", max(errors), 0.1, True)
    if memory:
        yield Figure(f"{what}: promised memory over peak, least", min(memory), 1, False)
        yield Figure(
            f"{what}: promised memory over peak, most", max(memory), 1.08, True
        )


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Of docs/performance.md."""
    yield ABOUT.format(file=found["list"]["file"])
    yield ""
    yield (
        "| plan | predicted | step, median | least | most | predicted over it "
        "| promised over peak |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, row in ran(found).items():
        times = " | ".join(
            f"{row[k]:.3f} s" for k in ("predicted_s", "step_s", "least_s", "most_s")
        )
        yield f"| {name} | {times} | {1 + off_by(row):.3f} | {_memory(row)} |"
    missing = [name for name, row in found["plans"].items() if "step_s" not in row]
    if missing:
        yield ""
        yield f"On the list and not measured: {', '.join(missing)}."


def _memory(row: Mapping[str, Any]) -> str:
    found = ratios(row)
    if not found:
        return "not read"
    if len(found) == 1:
        return f"{found[0]:.3f}"
    return f"{min(found):.3f} to {max(found):.3f}"


def summary(rows: Mapping[str, Any]) -> str:
    """For the one who runs it."""
    found = rows["predicted"]
    lines = []
    for name, row in found["plans"].items():
        if "step_s" not in row:
            lines.append(f"{name:18} predicted {row['predicted_s']:.3f} s, did not run")
            continue
        lines.append(
            f"{name:18} predicted {row['predicted_s']:.3f} s, measured "
            f"{row['step_s']:.3f} ({row['least_s']:.3f} to {row['most_s']:.3f}) "
            f"{off_by(row):+.1%}; promised over peak {_memory(row)}; compiled in "
            f"{row['compile_s']:.0f} s, state in {row['init_s']:.0f} s"
        )
    lines += [
        f"{f.name}: {f.measured:.3f}, aimed at {f.bound:g}" for f in figures(found)
    ]
    lines.append(f"not run: {', '.join(found.get('left', ())) or 'none'}")
    for name, error in found["failed"].items():
        lines.append(f"FAILED {name}: {error[-300:]}")
    return "\n".join(lines)
