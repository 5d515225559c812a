"""Timelines of several plans under each other, on one axis of time."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from hexijax.report.judged import Judged
from hexijax.report.pictures.style import (
    BUSY,
    BUSY_WORDS,
    FONT,
    figure,
    legend,
    patches,
)
from hexijax.report.pictures.timeline import draw_row, dress
from hexijax.report.rows import rows, uses_by_queue
from hexijax.report.words import seconds

MOST_ROWS = 16
"""Of one plan."""

ROW_IN, HEAD_IN = 0.17, 0.52


def draw_side_by_side(judged: Sequence[Judged]) -> Figure:
    """The picture; two columns where there are more than three plans."""
    events = [uses_by_queue(one) for one in judged]
    shown = [
        rows(one, found, most=MOST_ROWS)
        for one, found in zip(judged, events, strict=True)
    ]
    wide = 1 if len(judged) <= 3 else 2
    lines = [range(i, min(i + wide, len(judged))) for i in range(0, len(judged), wide)]
    heights = [HEAD_IN + ROW_IN * max(len(shown[i]) for i in line) for line in lines]
    made = figure(0.6 + sum(heights))
    grid = made.subplots(
        len(lines), wide, squeeze=False, sharex=True, height_ratios=heights
    )
    end_s = max(one.step_s for one in judged) * 1.02
    for i, one in enumerate(judged):
        axes = grid[i // wide][i % wide]
        for y, row in enumerate(shown[i]):
            draw_row(axes, y, events[i].get(row.devices[0], []), end_s)
        dress(axes, [row.label for row in shown[i]], end_s, end_s)
        axes.axvline(one.step_s, color="black", lw=0.8, ls=(0, (2, 2)))
        ratio = one.step_s / judged[0].step_s
        axes.set_title(
            f"{one.name}: {seconds(one.step_s)}, {ratio:.2f}x",
            fontsize=FONT + 1,
            loc="left",
        )
        axes.tick_params(labelbottom=True)
    for i in range(len(judged), len(lines) * wide):
        grid[i // wide][i % wide].set_visible(False)
    doing = {event.what for one in judged for event in one.timeline.events}
    legend(made, patches(BUSY, BUSY_WORDS, doing - {"move"}), columns=6)
    return made
