"""A step that was watched, beside what was predicted of it: a picture.

Run:     python -m experiments.timeline_picture trace.json picture.png --title WORDS
Needs:   trace.json from the folder of a `hexijax run --trace`
Expect:  docs/performance.md has one

A device has two rows of what it computes, and two of what leaves or reaches it: as
predicted above, as measured below.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hexijax.report.pictures.style import (
    BUSY,
    BUSY_WORDS,
    FONT,
    figure,
    legend,
    patches,
    png,
)
from hexijax.report.pictures.timeline import ROW_IN, draw_row, dress
from hexijax.report.rows import Use
from hexijax.report.words import seconds
from hexijax.simulator.uses import What

Event = Mapping[str, Any]


class Track(NamedTuple):
    """One row of the picture."""

    device: str
    queue: str
    """``computes`` or ``moves``."""

    when: str
    """``predicted`` or ``measured``."""

    uses: list[Use]

    @property
    def end_s(self) -> float:
        """Of the last use."""
        return max(use.end_s for use in self.uses)


def tracks(events: Sequence[Event]) -> list[Track]:
    """The tracks of a trace file, in the file's order: devices, then queues, predicted
    before measured."""
    names: dict[tuple[str, int, int], str] = {}
    found: dict[tuple[int, int], list[Use]] = {}
    for event in events:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            continue
        start_s, length_s = event["ts"] / 1e6, event["dur"] / 1e6
        use = Use(start_s, start_s + length_s, What(event["cat"]))
        found.setdefault((event["pid"], event["tid"]), []).append(use)
    made: list[Track] = []
    for (pid, tid), uses in sorted(found.items()):
        queue, when = names["thread_name", pid, tid].split(": ")
        device = names["process_name", pid, 0]
        made.append(Track(device, queue.split()[-1], when.removeprefix("as "), uses))
    return made


def picture(events: Sequence[Event], title: str) -> bytes:
    """PNG."""
    shown = tracks(events)
    ends_s = {
        when: max(track.end_s for track in shown if track.when == when)
        for when in ("predicted", "measured")
    }
    made = figure(1.2 + ROW_IN * 1.1 * len(shown))
    axes = made.subplots()
    step_s = max(ends_s.values())
    labels: list[str] = []
    for y, track in enumerate(shown):
        height = 0.78 if track.queue == "computes" else 0.5
        draw_row(axes, y, track.uses, step_s, height=height)
        labels.append(f"{track.device} {track.queue}, {track.when}")
    dress(axes, labels, step_s, step_s)
    words = ", ".join(f"{when} {seconds(end_s)}" for when, end_s in ends_s.items())
    axes.set_title(f"{title}: {words}", fontsize=FONT + 1, loc="left")
    doing = {use.what for track in shown for use in track.uses}
    legend(made, patches(BUSY, BUSY_WORDS, doing))
    return png(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="A step alone")
    args = parser.parse_args()
    events = json.loads(args.trace.read_text(encoding="utf-8"))["traceEvents"]
    args.picture.write_bytes(picture(events, args.title))


if __name__ == "__main__":
    main()
