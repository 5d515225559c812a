"""The plan on the cluster: above, what each device of each node does; below, layers.

Nodes that do the same are drawn once, and so are replicas that are alike.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from hexijax.cluster import Cluster
from hexijax.plan.names import fold
from hexijax.plan.plan import Plan, Stage
from hexijax.report.drawing import Alike, alike
from hexijax.report.judged import Judged
from hexijax.report.pictures.style import (
    FONT,
    SMALL,
    UNUSED,
    WIDTH_IN,
    figure,
    kind_colours,
    legend,
)

TILE, TILES_A_ROW, GAP = 0.52, 8, 0.14
"""Inches of a device's tile, tiles side by side, and inches around a node."""

HEAD, ROW_IN = 0.2, 0.46
"""Inches of a node's name, and of a replica's row."""

MOST_NODES, MOST_REPLICAS = 28, 20
"""Drawn; what is left out is said."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A node as it is drawn."""

    title: str
    """Its name, and how many do the same."""

    tiles: tuple[tuple[str, str], ...]
    """Kind and role of each device; no role: unused."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        across = min(len(self.tiles), TILES_A_ROW)
        down = -(-len(self.tiles) // TILES_A_ROW)
        text = 0.062 * len(self.title) + 0.1
        return max(across * TILE, text) + GAP, down * TILE * 0.6 + HEAD + GAP


def draw_machines(judged: Judged) -> Figure:
    """The picture."""
    cluster, plan = judged.problem.cluster, judged.plan
    colours = kind_colours(cluster)
    boxes = node_boxes(plan, cluster)
    placed, nodes_in = _flow(boxes[:MOST_NODES])
    runs = alike(plan, cluster)
    shown = runs[:MOST_REPLICAS]
    layers_in = 0.35 + ROW_IN * len(shown)
    made = figure(1.15 + nodes_in + layers_in)
    above, below = made.subplots(2, 1, height_ratios=(nodes_in, layers_in))
    _draw_nodes(above, placed, nodes_in, colours)
    more = len(boxes) - len(placed)
    above.set_title(
        f"{judged.problem.name} on {cluster.name}"
        + (f" ({more} more nodes not drawn)" if more > 0 else ""),
        fontsize=FONT + 1,
        loc="left",
    )
    _draw_layers(below, shown, judged, colours)
    more = len(runs) - len(shown)
    below.set_title(
        "layers of each replica" + (f" ({more} more not drawn)" if more else ""),
        fontsize=FONT + 1,
        loc="left",
    )
    entries = [Patch(facecolor=c, label=kind) for kind, c in colours.items()]
    if judged.unused:
        entries.append(
            Patch(facecolor=UNUSED, edgecolor="#999999", hatch="////", label="unused")
        )
    legend(made, entries)
    return made


def node_boxes(plan: Plan, cluster: Cluster) -> list[Box]:
    """The cluster's nodes; those with equal devices in equal roles as one."""
    roles = _roles(plan, cluster)
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    tiles: dict[str, list[tuple[str, str]]] = {node.name: [] for node in cluster.nodes}
    for device in cluster.devices:
        tiles[device.node].append((device.kind, roles.get(device.name, "")))
    for node, its in tiles.items():
        if its:
            found.setdefault(tuple(its), []).append(node)
    return [
        Box(
            title=names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
            tiles=its,
        )
        for its, names in found.items()
    ]


def _roles(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """What each device is, ``r0.s1``; alike replicas share the name of the first."""
    first = {
        r: run.first
        for run in alike(plan, cluster)
        for r in range(run.first, run.first + run.count)
    }
    roles: dict[str, str] = {}
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            for name in stage.devices:
                known = roles.get(name)
                roles[name] = f"{known}+{s}" if known else f"r{first[r]}.s{s}"
    return roles


def _flow(boxes: Sequence[Box]) -> tuple[list[tuple[float, float, Box]], float]:
    """Boxes from left to right, then down; and the height that takes."""
    placed: list[tuple[float, float, Box]] = []
    x, y, tallest = 0.0, 0.0, 0.0
    for box in boxes:
        width, height = box.size
        if x and x + width > WIDTH_IN - 0.4:
            x, y, tallest = 0.0, y + tallest, 0.0
        placed.append((x, y, box))
        x, tallest = x + width, max(tallest, height)
    return placed, y + tallest


def _draw_nodes(
    axes: Axes,
    placed: Sequence[tuple[float, float, Box]],
    height_in: float,
    colours: Mapping[str, str],
) -> None:
    axes.set_xlim(0, WIDTH_IN - 0.3)
    axes.set_ylim(height_in, 0)
    axes.axis("off")
    for x, y, box in placed:
        width, height = box.size
        axes.add_patch(
            FancyBboxPatch(
                (x + 0.03, y + 0.03),
                width - GAP + 0.06,
                height - GAP + 0.04,
                boxstyle="round,pad=0,rounding_size=0.05",
                facecolor="white",
                edgecolor="#aaaaaa",
                linewidth=0.7,
            )
        )
        axes.text(x + 0.08, y + 0.16, box.title, fontsize=FONT, va="center")
        for i, (kind, role) in enumerate(box.tiles):
            left = x + 0.06 + (i % TILES_A_ROW) * TILE
            top = y + HEAD + 0.06 + (i // TILES_A_ROW) * TILE * 0.6
            _draw_tile(axes, left, top, colours[kind], role)


def _draw_tile(axes: Axes, left: float, top: float, colour: str, role: str) -> None:
    width, height = TILE - 0.04, TILE * 0.6 - 0.04
    axes.add_patch(
        Rectangle(
            (left, top),
            width,
            height,
            facecolor=colour if role else UNUSED,
            edgecolor="none" if role else colour,
            hatch=None if role else "////",
            linewidth=0.8,
        )
    )
    axes.text(
        left + width / 2,
        top + height / 2,
        role,
        fontsize=SMALL if len(role) <= 7 else SMALL - 1.5,
        color="white",
        ha="center",
        va="center",
    )


def _draw_layers(
    axes: Axes, runs: Sequence[Alike], judged: Judged, colours: Mapping[str, str]
) -> None:
    chain, cluster = judged.problem.chain, judged.problem.cluster
    total = len(chain.layers)
    axes.set_xlim(0, total)
    axes.set_ylim(len(runs), 0)
    for y, run in enumerate(runs):
        for stage in run.replica.stages:
            start, stop = stage.layers
            kind = cluster.device(stage.devices[0]).kind
            axes.add_patch(
                Rectangle(
                    (start, y + 0.08),
                    stop - start,
                    0.84,
                    facecolor=colours[kind],
                    edgecolor="white",
                    linewidth=1.2,
                )
            )
            room = (stop - start) / total * (WIDTH_IN - 1.9)
            axes.text(
                (start + stop) / 2,
                y + 0.5,
                _fitting(stage, room),
                fontsize=SMALL,
                color="white",
                ha="center",
                va="center",
                linespacing=1.15,
            )
    axes.set_yticks([y + 0.5 for y in range(len(runs))], [_title(r) for r in runs])
    axes.tick_params(labelsize=FONT, length=0)
    axes.tick_params(axis="x", length=2)
    axes.set_xlabel("layer", fontsize=FONT, loc="right", labelpad=1)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _title(run: Alike) -> str:
    replica = run.replica
    what = f"r{run.first}" + (
        f" to r{run.first + run.count - 1}" if run.count > 1 else ""
    )
    return f"{what}\n{replica.microbatches} x {replica.microbatch_size}"


def _fitting(stage: Stage, room_in: float) -> str:
    """The most that fits into a box: devices, layers, lanes and tensor degree."""
    shape = [f"{stage.num_layers} layers" if stage.num_layers > 1 else "1 layer"]
    shape += [f"{stage.lanes} lanes"] if stage.lanes > 1 else []
    shape += [f"tensor {stage.tensor}"] if stage.tensor > 1 else []
    short = f"{stage.num_layers}" + (f"\nt{stage.tensor}" if stage.tensor > 1 else "")
    devices = fold(stage.devices)
    if "," in devices:
        devices = f"{devices.split(',')[0]} ..."
    for lines in (
        [devices, ", ".join(shape)],
        [devices, shape[0]],
        [shape[0], *shape[1:]][:2],
        [short],
    ):
        if max(map(len, "\n".join(lines).split("\n"))) * 0.053 < room_in:
            return "\n".join(lines)
    return ""
