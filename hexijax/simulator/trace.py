"""Timelines as a file that Perfetto and chrome://tracing open."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hexijax.simulator.timeline import Timeline

# The format: https://github.com/google/perfetto, "Trace Event Format".


class Slice(NamedTuple):
    """One coloured piece of a track."""

    group: str
    """Tracks of one group stand under each other, under its name; empty: no group."""

    track: str
    """Its name."""

    name: str
    """As it is written on the piece."""

    category: str
    """What can be searched for."""

    start_s: float
    """From the left."""

    end_s: float
    """Likewise."""

    num_bytes: int = 0
    """That are moved."""


def write_trace(file: Path, timeline: Timeline) -> None:
    """Writes one track a device and one a direction of each link."""
    write_slices(
        file,
        (
            Slice("", queue, event.name, event.what, start_s, end_s, num_bytes)
            for event in timeline.events
            for queue, start_s, end_s, num_bytes in event.queues
        ),
    )


def write_slices(file: Path, slices: Iterable[Slice]) -> None:
    """Writes tracks by their names, in groups by theirs."""
    slices = list(slices)
    tracks = sorted({(each.group, each.track) for each in slices})
    groups = list(dict.fromkeys(group for group, _ in tracks))
    process = {group: i for i, group in enumerate(groups)}
    thread = {track: i for i, track in enumerate(tracks)}
    names = [
        _name("process_name", group, process[group], 0) for group in groups if group
    ]
    names += [
        _name("thread_name", track[1], process[track[0]], i)
        for track, i in thread.items()
    ]
    pieces = [
        {
            "name": each.name,
            "cat": each.category,
            "ph": "X",
            "ts": each.start_s * 1e6,
            "dur": (each.end_s - each.start_s) * 1e6,
            "pid": process[each.group],
            "tid": thread[each.group, each.track],
            "args": {"bytes": each.num_bytes} if each.num_bytes else {},
        }
        for each in slices
    ]
    file.write_text(json.dumps({"traceEvents": names + pieces}), encoding="utf-8")


def _name(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    args = {"name": name}
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}
