"""A step on a timeline: devices, the busiest ways of links, and where the time goes.

Left, what each device does when; right, the same added up, with the causes of waiting.
"""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hexijax.report.judged import Judged
from hexijax.report.pictures.style import (
    BUSY,
    BUSY_WORDS,
    FONT,
    IDLE,
    IDLE_WORDS,
    figure,
    legend,
    patches,
    plain,
    time_scale,
)
from hexijax.report.rows import Row, Use, looks, merged, rows, uses_by_queue
from hexijax.report.words import seconds
from hexijax.simulator import Cause
from hexijax.simulator.uses import What

MOST_ROWS, MOST_WAYS = 40, 4
ROW_IN = 0.2


def draw_timeline(judged: Judged) -> Figure:
    """The picture."""
    events = uses_by_queue(judged)
    shown = rows(judged, events, most=MOST_ROWS)
    ways = _busiest_ways(judged, events)
    made = figure(1.5 + ROW_IN * (len(shown) + len(ways)))
    left, right = made.subplots(1, 2, width_ratios=(3.2, 1), sharey=True)
    labels = [row.label for row in shown] + [label for _, label in ways]
    for y, row in enumerate(shown):
        draw_row(left, y, events.get(row.devices[0], []), judged.step_s)
        _draw_parts(right, y, row, judged)
    for y, (way, _) in enumerate(ways, len(shown)):
        draw_row(left, y, events[way], judged.step_s, height=0.5)
    dress(left, labels, judged.step_s, max(e.end_s for e in judged.timeline.events))
    left.set_title(
        f"{judged.problem.name}: a step of {seconds(judged.step_s)}",
        fontsize=FONT + 1,
        loc="left",
    )
    right.set_title("where the step goes", fontsize=FONT + 1, loc="left")
    right.set_xlim(0, 1)
    right.set_xticks([0, 0.5, 1], ["0", "50%", "100%"])
    plain(right)
    legend(made, _patches(judged))
    return made


def draw_row(
    axes: Axes,
    y: float,
    events: list[Use],
    step_s: float,
    *,
    height: float = 0.78,
) -> None:
    """One queue's events; those too near to be told apart are one bar."""
    by_what: dict[str, list[Use]] = {}
    for event in events:
        by_what.setdefault(event.what, []).append(event)
    for what, some in by_what.items():
        spans = merged(some, step_s / 4000)
        colour = BUSY[what]
        axes.broken_barh(
            spans, (y - height / 2, height), facecolors=colour, linewidth=0
        )


def dress(axes: Axes, labels: list[str], step_s: float, end_s: float) -> None:
    """Labels and axes; a dashed line where the next step's pace ends this one."""
    factor, unit = time_scale(step_s)
    plain(axes)
    axes.set_xlim(0, max(step_s, end_s))
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_yticks(range(len(labels)), labels, fontsize=FONT)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value * factor:g} {unit}")


def _draw_parts(axes: Axes, y: float, row: Row, judged: Judged) -> None:
    device, timeline = row.devices[0], judged.timeline
    busy, idle = timeline.busy_s[device], timeline.idle_s[device]
    parts = [(BUSY[what], busy.get(what, 0.0)) for what in What]
    parts += [(IDLE[cause], idle.get(cause, 0.0)) for cause in Cause]
    at = 0.0
    for colour, time_s in parts:
        part = time_s / judged.step_s
        axes.barh(y, part, 0.78, left=at, color=colour, linewidth=0)
        at += part


def _busiest_ways(
    judged: Judged, uses: Mapping[str, list[Use]]
) -> list[tuple[str, str]]:
    """Ways of links that are in use the longest, with labels; equal ones once."""
    used_s = {
        way: sum(use.end_s - use.start_s for use in uses.get(way, ()))
        for way in judged.timeline.link_bytes
    }
    alike: dict[tuple[int, ...], list[str]] = {}
    for way in sorted(used_s, key=lambda way: -used_s[way]):
        if used_s[way]:
            alike.setdefault(looks(uses[way], judged.step_s), []).append(way)
    return [
        (ways[0], ways[0] + (f" and {len(ways) - 1} more" if len(ways) > 1 else ""))
        for ways in [*alike.values()][:MOST_WAYS]
    ]


def _patches(judged: Judged) -> list[Patch]:
    timeline = judged.timeline
    doing = {event.what for event in timeline.events}
    waiting = {
        cause
        for parts in timeline.idle_s.values()
        for cause, time_s in parts.items()
        if time_s > judged.step_s * 1e-3
    }
    return [
        *patches(BUSY, BUSY_WORDS, doing),
        *patches(IDLE, IDLE_WORDS, waiting),
    ]
