"""How all pictures look: colours by meaning, one font size, no frame that says nothing.

What computes is strong, what waits is pale; colours keep their order in grey.
"""

import io
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hexijax.cluster import Cluster
from hexijax.simulator import Cause
from hexijax.simulator.uses import What

FONT, SMALL = 8.0, 6.5
"""Points."""

WIDTH_IN = 10.0
"""Of every picture: a page's width, at a size that still reads when halved."""

DPI = 150

BUSY: Mapping[str, str] = {
    What.FORWARD: "#6aa5dc",
    What.BACKWARD: "#24588f",
    What.BOTH: "#3f7cbc",
    What.UPDATE: "#3f8f4f",
    What.SYNC: "#8a5ab5",
    What.SKIP: "#b3cde6",
    What.MOVE: "#d1642b",
}
"""What a device or a link does."""

IDLE: Mapping[str, str] = {
    Cause.PIPELINE: "#d9d9d9",
    Cause.MOVE: "#f2b590",
    Cause.SYNC: "#cdb5e3",
    Cause.DISPATCH: "#e8d274",
}
"""Why a device waits."""

BUSY_WORDS: Mapping[str, str] = {
    What.FORWARD: "forward",
    What.BACKWARD: "backward",
    What.BOTH: "forward and backward",
    What.UPDATE: "update",
    What.SYNC: "sums and gathers",
    What.SKIP: "more of the same microbatches",
    What.MOVE: "activations on a link",
}

IDLE_WORDS: Mapping[str, str] = {
    Cause.PIPELINE: "waits: pipeline",
    Cause.MOVE: "waits: activations",
    Cause.SYNC: "waits: gradients, parameters",
    Cause.DISPATCH: "waits: dispatch",
}

_KINDS = ("#4c78a8", "#e39c37", "#5fa35a", "#c8605f", "#8e6bb0", "#7d6a5b", "#3aa0a8")
UNUSED = "#f4f4f4"


def kind_colours(cluster: Cluster) -> dict[str, str]:
    """A colour a kind, in the order of the cluster."""
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    return {kind: _KINDS[i % len(_KINDS)] for i, kind in enumerate(kinds)}


def figure(height_in: float) -> Figure:
    """An empty picture."""
    made = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(made)
    return made


def png(made: Figure) -> bytes:
    """The picture as a file's bytes; equal pictures are equal bytes."""
    file = io.BytesIO()
    made.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def plain(axes: Axes) -> None:
    """Takes the frame away, all but the line below."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#888888")
    axes.tick_params(labelsize=FONT, length=2, color="#888888")
    axes.tick_params(axis="y", length=0)


def legend(
    made: Figure, patches: Sequence[Patch | Line2D], *, columns: int = 5
) -> None:
    """A legend below everything."""
    made.legend(
        handles=list(patches),
        loc="outside lower center",
        ncols=min(columns, len(patches)),
        fontsize=FONT,
        frameon=False,
        handlelength=1.2,
        handleheight=0.9,
    )


def patches(
    colours: Mapping[str, str], words: Mapping[str, str], seen: Iterable[str]
) -> list[Patch]:
    """Legend entries of what a picture shows, in the order of the table."""
    shown = set(seen)
    return [
        Patch(facecolor=colour, label=words[key])
        for key, colour in colours.items()
        if key in shown
    ]


def time_scale(longest_s: float) -> tuple[float, str]:
    """What to multiply seconds by, and the unit that gives."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if longest_s * factor >= 2:
            return factor, unit
    return 1e6, "us"
