"""The cold start's part of docs/performance.md, from what a run has written."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from experiments.predicted.table import Figure

ABOUT = """\
Llama of 1.35 B, 16 sequences a card and step, by the `hexijax` command alone: each part
is a process of its own, timed from its start, with empty caches of compiled programs.
The second launch finds those of the first. A launch's first step has ended when its
line is in metrics.jsonl."""


class Part(NamedTuple):
    """What is timed."""

    name: str
    figure: str
    """Its place in the results, by dots."""

    bound_s: float


PARTS = (
    Part("profile", "profile_s", 300),
    Part("plan", "plan_s", 5),
    Part("first launch, to its first step's end", "first.first_step_s", 45),
    Part("second launch, to its first step's end", "second.first_step_s", 15),
)


def times(found: Mapping[str, Any]) -> Iterator[tuple[Part, float]]:
    """Those that were measured."""
    for part in PARTS:
        row: Any = found
        for word in part.figure.split("."):
            row = (row or {}).get(word)
        if row is not None:
            yield part, row


def figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """What a cold start was to keep."""
    for part, seconds in times(found):
        yield Figure(f"cold start, {part.name}: seconds", seconds, part.bound_s, True)


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Of docs/performance.md."""
    yield ABOUT
    yield ""
    yield "| from a cold start | seconds | aim |"
    yield "|---|---|---|"
    for part, seconds in times(found):
        yield f"| {part.name} | {seconds:.1f} | < {part.bound_s:g} |"
    if "search_s" in found:
        yield ""
        yield (
            f"Of the plan's seconds the search took {found['search_s']:.1f}; the rest "
            "is Python, JAX, the model's trace and pictures."
        )


def summary(rows: Mapping[str, Any]) -> str:
    """For the one who runs it."""
    found = rows["cold"]
    lines = [*section(found)][2:]
    for name in ("first", "second", "listed"):
        row = found.get(name) or {}
        if row.get("step_s"):
            words = f"{name}: step {row['step_s']:.3f} s"
            if row.get("predicted_s"):
                words += f", predicted {row['predicted_s']:.3f} s"
            lines.append(words)
    lines += [f"FAILED {k}: {v[-400:]}" for k, v in found["failed"].items()]
    return "\n".join(lines)
