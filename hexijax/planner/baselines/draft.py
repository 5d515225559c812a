"""A draft: who computes together, and by which rules the rest is settled.

What a published system leaves even stays even, what it balances is balanced with the
exact helpers (``layers``, ``batches``).
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

from hexijax.planner.baselines.devices import Pipeline, Yard
from hexijax.planner.layers import Span


class Layers(enum.Enum):
    """How layers are spread over a pipeline's stages."""

    EVEN = enum.auto()
    """Equal numbers of blocks."""
    FLOPS = enum.auto()
    """By the devices' peaks."""
    TIMES = enum.auto()
    """So that the slowest stage is as fast as can be."""


class Batch(enum.Enum):
    """How the global batch is spread over replicas."""

    EVEN = enum.auto()
    """Equal microbatches, as many for every lane."""
    FLOPS = enum.auto()
    """Equal microbatches, their number by the devices' peaks."""
    FLOPS_SIZES = enum.auto()
    """As many microbatches for all, their size by the devices' peaks."""
    TIMES = enum.auto()
    """Size and number so that the last replica ends as soon as can be."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """By which the rest of a draft is settled."""

    layers: Layers = Layers.EVEN
    """Over the stages."""

    batch: Batch = Batch.EVEN
    """Over the replicas."""

    common: bool = True
    """All pipelines have the same split of layers."""

    spans: tuple[Span, ...] | None = None
    """That split, where it is settled already."""

    uniform_remat: bool = False
    """One policy for all stages, each tried; else each stage's fastest that fits."""

    any_size: bool = False
    """Microbatches of any size, where each replica has its own; else they double."""

    uneven_state: bool = False
    """State goes where room is left; else it is spread evenly."""

    @property
    def is_common_split(self) -> bool:
        """All pipelines are balanced together."""
        return self.common and self.layers is Layers.TIMES


EVEN = Rules()
"""Nothing is balanced."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """Who computes together."""

    pipelines: tuple[Pipeline, ...]
    """One a replica."""

    rules: Rules = EVEN
    """What is even and what is balanced."""


def unit(pipeline: Pipeline) -> int:
    """Samples that a microbatch of one a lane has."""
    return math.lcm(*{mesh.shape.lanes for mesh in pipeline})


def joined(yard: Yard, pipelines: Sequence[Pipeline]) -> list[Pipeline]:
    """Pipelines whose stages sit node by node beside each other, as lanes of one.

    Lanes sum their gradients in their mesh; replicas do over the links between them.
    """
    by_place: dict[object, list[Pipeline]] = {}
    for pipeline in pipelines:
        place = tuple((yard.place(mesh.block), mesh.key) for mesh in pipeline)
        by_place.setdefault(place, []).append(pipeline)
    return [
        tuple(yard.joined(meshes) for meshes in zip(*some, strict=True))
        for some in by_place.values()
    ]
