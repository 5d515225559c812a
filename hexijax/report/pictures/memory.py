"""How full each device is at its peak, part by part, beside what it can use."""

import dataclasses
from collections.abc import Hashable, Iterable

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hexijax.costs.parts import MemoryParts
from hexijax.report.judged import Judged
from hexijax.report.pictures.style import FONT, figure, legend, plain
from hexijax.report.rows import group

PARTS = {
    "params_bytes": ("parameters", "#2f6fb0"),
    "passes_bytes": ("parameters of two passes", "#7fa8d6"),
    "grads_bytes": ("gradients", "#d1642b"),
    "leaving_bytes": ("gradients of two passes", "#eaa383"),
    "state_bytes": ("optimizer state", "#3f8f4f"),
    "activations_bytes": ("activations", "#8a5ab5"),
    "transient_bytes": ("inside one segment", "#c9a9e6"),
    "sync_bytes": ("sums on their way", "#b8b8b8"),
    "gaps_bytes": ("the allocator's gaps", "#e3e3e3"),
}
"""Field of ``MemoryParts`` -> its name for people, and its colour."""

ON_HOST = {"host_bytes"}
"""Fields that are no part of a device's peak."""

MOST_ROWS = 40
NOMINAL = "#b5b5b5"


def draw_memory(judged: Judged) -> Figure:
    """The picture."""
    cluster = judged.problem.cluster

    def key(name: str) -> Hashable:
        """Within 2% of the device's memory, parts look the same."""
        device, parts = cluster.device(name), judged.memory[name]
        scale = 50 / device.usable_memory_bytes
        sizes = tuple(round(getattr(parts, field) * scale) for field in PARTS)
        return device.kind, device.usable_memory_bytes, sizes

    found = group(list(judged.memory), key)
    count = min(len(found), MOST_ROWS)
    shown = [found[i * len(found) // count] for i in range(count)]
    made = figure(1.4 + 0.24 * len(shown))
    axes = made.subplots()
    for y, row in enumerate(shown):
        device = cluster.device(row.devices[0])
        left = 0.0
        for field, (_, colour) in PARTS.items():
            size = getattr(judged.memory[device.name], field) / 2**30
            axes.barh(y, size, 0.7, left=left, color=colour, linewidth=0)
            left += size
        usable, nominal = (
            size / 2**30
            for size in (
                device.usable_memory_bytes,
                device.profile.nominal_memory_bytes,
            )
        )
        ends = [y - 0.45, y + 0.45]
        axes.plot([nominal, nominal], ends, color=NOMINAL, lw=3.5)
        axes.plot([usable, usable], ends, color="black", lw=1.2)  # may be the same
    plain(axes)
    axes.set_yticks(
        range(len(shown)),
        [f"{row.label}  {cluster.device(row.devices[0]).kind}" for row in shown],
        fontsize=FONT,
    )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} GiB")
    axes.set_title(
        f"{judged.problem.name}: promised memory of each device",
        fontsize=FONT + 1,
        loc="left",
    )
    legend(made, _entries(judged.memory.values()), columns=8)
    return made


def _entries(memory: Iterable[MemoryParts]) -> list[Patch | Line2D]:
    assert {f.name for f in dataclasses.fields(MemoryParts)} == PARTS.keys() | ON_HOST
    held = [*memory]
    return [
        *(
            Patch(facecolor=colour, label=words)
            for field, (words, colour) in PARTS.items()
            if any(getattr(parts, field) for parts in held)
        ),
        Line2D([], [], color="black", lw=1.2, label="usable"),
        Line2D([], [], color=NOMINAL, lw=3.5, label="nominal"),
    ]
