"""What each device holds over a step, beside what was promised and what it can use.

Judged with memory -> draw_curves -> a strip a device, equal ones once

The lower part never leaves: the optimizer's state. What comes and goes lies on it, and
the dashed line that it stays below is the plan's promise.
"""

import bisect
from collections.abc import Hashable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hexijax.report.judged import Judged
from hexijax.report.pictures.style import (
    FONT,
    SMALL,
    figure,
    legend,
    plain,
    time_scale,
)
from hexijax.report.rows import Row, group
from hexijax.report.words import gib
from hexijax.simulator.memory import MemoryCurve

MOST_ROWS = 12
STRIP_IN = 0.75
LOOKS = 24
"""Times at which two curves are compared."""

STATE, HELD, PROMISED = "#3f8f4f", "#b79fd4", "#8a5ab5"


def draw_curves(judged: Judged) -> Figure:
    """The picture."""
    shown = _rows(judged)
    made = figure(0.9 + STRIP_IN * len(shown))
    grid = made.subplots(len(shown), 1, sharex=True, squeeze=False)
    strips: list[Axes] = [*grid.flat]
    for axes, row in zip(strips, shown, strict=True):
        _draw(axes, row, judged)
    factor, unit = time_scale(judged.step_s)
    last = strips[-1]
    last.set_xlim(0, judged.step_s)
    last.xaxis.set_major_formatter(lambda value, _: f"{value * factor:g} {unit}")
    strips[0].set_title(
        f"{judged.problem.name}: what each device holds over a step",
        fontsize=FONT + 1,
        loc="left",
    )
    entries = [
        Patch(facecolor=STATE, label="optimizer state"),
        Patch(facecolor=HELD, label="parameters, gradients, activations"),
        Line2D([], [], color=PROMISED, lw=1.2, ls="--", label="promised peak"),
        Line2D([], [], color="black", lw=1.2, label="usable"),
    ]
    legend(made, entries)
    return made


def _rows(judged: Judged) -> list[Row]:
    """Devices whose curves look alike share a strip, in the plan's order; evenly fewer
    of many."""
    curves, cluster = judged.timeline.memory, judged.problem.cluster

    def key(name: str) -> Hashable:
        device, curve = cluster.device(name), curves[name]
        scale = 50 / device.usable_memory_bytes
        times_s = [i * judged.step_s / LOOKS for i in range(LOOKS)]
        looks = tuple(round(at(curve, time_s) * scale) for time_s in times_s)
        return device.kind, device.usable_memory_bytes, looks

    stages = [name for _, stage in judged.plan.stages() for name in stage.devices]
    order = dict.fromkeys([*stages, *curves])
    found = group([name for name in order if name in curves], key)
    count = min(len(found), MOST_ROWS)
    return [found[i * len(found) // count] for i in range(count)]


def at(curve: MemoryCurve, time_s: float) -> int:
    """What is held at a time of the step."""
    return curve.num_bytes[bisect.bisect_right(curve.times_s, time_s) - 1]


def _draw(axes: Axes, row: Row, judged: Judged) -> None:
    name = row.devices[0]
    device, curve = judged.problem.cluster.device(name), judged.timeline.memory[name]
    parts = judged.memory[name]
    times_s = [*curve.times_s, judged.step_s]
    held = [size / 2**30 for size in (*curve.num_bytes, curve.num_bytes[-1])]
    state = parts.state_bytes / 2**30
    axes.fill_between(times_s, held, step="post", color=HELD, linewidth=0)
    axes.fill_between(
        times_s,
        [min(state, size) for size in held],
        step="post",
        color=STATE,
        linewidth=0,
    )
    usable = device.usable_memory_bytes / 2**30
    axes.axhline(parts.total_bytes / 2**30, color=PROMISED, lw=1.2, ls="--")
    axes.axhline(usable, color="black", lw=1.2)
    plain(axes)
    axes.set_ylim(0, max(usable, max(held)) * 1.08)
    axes.set_yticks([0, usable], ["0", f"{usable:.3g} GiB"], fontsize=SMALL)
    axes.text(
        0.995,
        0.06,
        f"{row.label}  {device.kind}: at most {gib(curve.peak_bytes)} held, "
        f"{gib(parts.total_bytes)} promised",
        transform=axes.transAxes,
        ha="right",
        fontsize=SMALL,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1.5},
    )
