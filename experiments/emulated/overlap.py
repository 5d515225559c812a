"""How much of what moves runs beside compute, by a profile of JAX's own.

    jax.profiler.trace's folder -> overlaps -> by card: seconds of each, and of both

A card's streams hold kernels and copies; copies between cards, to the host and back are
told by their names. What the profiler could not see is not there.
"""

import collections
import gzip
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Spans = Sequence[tuple[float, float]]
"""Starts and ends, sorted, none touching the next."""

COPIES = {"MemcpyP2P": "peer", "MemcpyD2H": "to host", "MemcpyH2D": "from host"}
"""What copies are called, and what they are here; others stay on their card."""


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Their union."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(spans: Spans) -> float:
    """Of all together."""
    return sum(end - start for start, end in spans)


def both(first: Spans, second: Spans) -> Spans:
    """Where both are."""
    found: list[tuple[float, float]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def overlaps(folder: Path) -> dict[str, dict[str, float]]:
    """By card: seconds that kernels run, that copies run, and that both do."""
    return of_events(events_in(folder))


def events_in(folder: Path) -> list[dict[str, Any]]:
    """Events of the last profile in a folder, as the Trace Event Format has them, in
    microseconds; none where there is no profile."""
    files = sorted(folder.rglob("*.trace.json.gz"))
    if not files:
        return []
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def of_events(events: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The same of events."""
    found: dict[str, dict[str, float]] = {}
    for card, kinds in spans_of(events).items():
        if not kinds:
            continue
        compute = kinds.pop("compute", [])
        row = {"compute": length(compute)}
        for kind, copies in kinds.items():
            row[kind] = length(copies)
            row[f"{kind} beside compute"] = length(both(copies, compute))
        everything = merged(itertools.chain(compute, *kinds.values()))
        row["all"] = length(everything)
        row["span"] = everything[-1][1] - everything[0][0]
        found[card] = row
    return found


def spans_of(events: Sequence[dict[str, Any]]) -> dict[str, dict[str, Spans]]:
    """By card and kind, when something of it ran, in seconds."""
    cards: dict[Any, str] = {}
    streams = set[Any]()
    for event in events:
        name = event.get("args", {}).get("name", "")
        if event.get("name") == "process_name" and "GPU" in name:
            cards[event["pid"]] = name.split()[0].removeprefix("/device:")
        if event.get("name") == "thread_name" and name.startswith("Stream"):
            streams.add((event["pid"], event["tid"]))
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {
        card: collections.defaultdict(list) for card in cards.values()
    }
    for event in events:
        where = event.get("pid"), event.get("tid")
        if event.get("ph") != "X" or where not in streams or where[0] not in cards:
            continue
        start_s = event["ts"] / 1e6
        kind = next((k for n, k in COPIES.items() if n in event["name"]), "compute")
        spans[cards[where[0]]][kind].append((start_s, start_s + event["dur"] / 1e6))
    return {
        card: {kind: merged(each) for kind, each in kinds.items()}
        for card, kinds in spans.items()
    }
