"""A plan as a picture in text: stages as boxes, in the order of the forward.

plan, chain, cluster -> picture -> lines; replicas that are alike are drawn once
"""

import dataclasses
from collections.abc import Iterator, Sequence

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.names import fold
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.report.words import columns

WIDTH = 72
"""Columns that a picture's layers share."""

WIDEST = 100
"""Columns of a line of boxes; a longer pipeline is drawn downwards."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alike:
    """Replicas that differ in the names of their devices only."""

    first: int
    """Index of the first."""

    count: int
    """How many follow each other, the first included."""

    replica: Replica
    """The first."""

    @property
    def title(self) -> str:
        """``replica 3`` or ``replicas 3-5, alike``."""
        if self.count == 1:
            return f"replica {self.first}"
        return f"replicas {self.first}-{self.first + self.count - 1}, alike"


def alike(plan: Plan, cluster: Cluster) -> list[Alike]:
    """The plan's replicas, in order, runs of equal ones as one."""
    runs: list[Alike] = []
    last: object = None
    for r, replica in enumerate(plan.replicas):
        form = _form(replica, cluster)
        if runs and form == last:
            runs[-1] = dataclasses.replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(Alike(first=r, count=1, replica=replica))
        last = form
    return runs


def _form(replica: Replica, cluster: Cluster) -> object:
    """The replica without the names of its devices."""
    stages = [
        (cluster.device(s.devices[0]).kind, dataclasses.replace(s, devices=()))
        for s in replica.stages
    ]
    return stages, replica.microbatches, replica.microbatch_size, replica.samples


def picture(plan: Plan, chain: Chain, cluster: Cluster) -> str:
    """Stages as boxes, as wide as their share of the layers; a line of boxes a replica.

    ```
    replica 0   5 x 8 samples
      |embed..blocks/2    |blocks/3..head           |
      |n0/0-3 fast 2x2    |n1/0 slow                |
    ```
    """
    lines: list[str] = []
    for run in alike(plan, cluster):
        replica = run.replica
        lines.append(
            f"{run.title}   {replica.microbatches} x {replica.microbatch_size} samples"
        )
        across = [f"  {line}" for line in _across(replica, chain, cluster)]
        if len(across[0]) <= WIDEST:
            lines += across
        else:
            lines += [f"  {line}" for line in _down(replica, chain, cluster)]
    return "\n".join(lines)


def _across(replica: Replica, chain: Chain, cluster: Cluster) -> Iterator[str]:
    texts = [_box(stage, chain, cluster) for stage in replica.stages]
    widths = [
        max(
            len(text) + 1,
            *(len(other) + 1 for other in pair),
            WIDTH * stage.num_layers // len(chain.layers),
        )
        for (text, *pair), stage in zip(texts, replica.stages, strict=True)
    ]
    for row in zip(*texts, strict=True):
        cells = (text.ljust(w) for text, w in zip(row, widths, strict=True))
        yield f"|{'|'.join(cells)}|"


def _down(replica: Replica, chain: Chain, cluster: Cluster) -> Iterator[str]:
    """A line a stage, its layers as a bar."""
    scale, total = WIDTH // 2, len(chain.layers)
    rows: list[Sequence[str]] = []
    for stage in replica.stages:
        start = scale * stage.layers[0] // total
        stop = max(start + 1, scale * stage.layers[1] // total)
        bar = f"{' ' * start}{'=' * (stop - start)}"
        layers, devices = _box(stage, chain, cluster)
        rows.append((f"|{bar.ljust(scale)}|", layers, devices))
    yield from columns(rows)


def _box(stage: Stage, chain: Chain, cluster: Cluster) -> tuple[str, str]:
    kind = cluster.device(stage.devices[0]).kind
    return layer_names(stage, chain), f"{fold(stage.devices)} {kind}{_shape(stage)}"


def layer_names(stage: Stage, chain: Chain) -> str:
    """``embed..blocks/2 (4)``: first, last, and how many."""
    names = [layer.name for layer in chain.layers[slice(*stage.layers)]]
    layers = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    return f"{layers} ({len(names)})"


def _shape(stage: Stage) -> str:
    parts = [f" {stage.lanes} lanes"] if stage.lanes > 1 else []
    parts += [f" tensor {stage.tensor}"] if stage.tensor > 1 else []
    return ",".join(parts)
