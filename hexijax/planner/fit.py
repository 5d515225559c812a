"""Layers, remat and pace of one replica's meshes for one microbatch size.

meshes, microbatch size -> Fitter.fit -> Fitted, or None where it does not fit
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.activations import enter_bytes, live_microbatches
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.costs.links import transfer_s
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Replica, Schedule, Stage
from hexijax.planner.batches import BatchOption
from hexijax.planner.estimate import pipeline_s
from hexijax.planner.grouping import Layout, Mesh
from hexijax.planner.layers import Span, split_layers
from hexijax.planner.options import PlanOptions
from hexijax.planner.segments import segments
from hexijax.planner.spans import LayerArrays, Load, SpanTable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Stages of a replica, and how long its microbatches take."""

    spans: tuple[Span, ...]
    """Layers of each stage."""

    remat: tuple[tuple[Remat, ...], ...]
    """Policies of each stage."""

    option: BatchOption
    """The microbatch size, and its pace."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the replicas of one layout have in common."""

    batch_size: int
    """Of the whole step."""

    state_devices: int
    """Devices over which each parameter's state is spread."""

    members: int
    """Stages over which each gradient is summed, one a replica."""

    per_segment: int | None
    """Most layers of a segment."""

    budget_share: float = 1.0
    """Of usable memory; below 1 where a first plan promised too much."""


class Fitter:
    """Fits replicas; equal ones are fitted once."""

    def __init__(self, chain: Chain, cluster: Cluster, options: PlanOptions) -> None:
        self._chain = chain
        self._cluster = cluster
        self._options = options
        self._arrays: dict[tuple[MeshShape, int], LayerArrays] = {}
        self._tables: dict[tuple[MeshShape, Load], SpanTable] = {}
        self._bounds: dict[object, float] = {}
        self._splits: dict[object, tuple[Span, ...] | None] = {}

    def fit(
        self,
        meshes: Sequence[Mesh],
        size: int,
        setting: Setting,
        own_split: tuple[int, ...] | None = None,
    ) -> Fitted | None:
        """The best stages on these meshes, in this order."""
        meshes = [*meshes] * self.rounds(meshes)
        tables = self.tables(meshes, size, setting)
        spans = self._spans(tables, own_split)
        if spans is None:
            return None
        stage_s = [
            table.seconds(*span) for table, span in zip(tables, spans, strict=True)
        ]
        num_sets = len({mesh.devices for mesh in meshes})
        borders_s = self._borders_s(meshes, spans, size)
        first_s, next_s = pipeline_s(stage_s, borders_s, num_sets)
        return Fitted(
            spans=spans,
            remat=tuple(t.remat(*span) for t, span in zip(tables, spans, strict=True)),
            option=BatchOption(size=size, first_s=first_s, next_s=next_s),
        )

    def bound_s(self, layout: Layout, samples: Sequence[int]) -> float:
        """Seconds a sample that no plan of the layout can beat.

        Every device computes all the time, at the best of some microbatch sizes.
        """
        rates = (
            mesh.shape.lanes / self._sample_s(mesh.shape, samples)
            for meshes in layout
            for mesh in meshes
        )
        return 1 / sum(rates)

    def _sample_s(self, shape: MeshShape, samples: Sequence[int]) -> float:
        """Seconds of one sample through all layers, remat and calls left out."""
        key = (shape, tuple(samples))
        if key not in self._bounds:
            self._bounds[key] = min(
                sum(t.total_s() for t in layer_times(self._chain, shape, count)) / count
                for count in samples
            )
        return self._bounds[key]

    def rounds(self, meshes: Sequence[Mesh]) -> int:
        """Stages each mesh holds."""
        interleaved = self._options.schedule is Schedule.INTERLEAVED
        return self._options.rounds if interleaved and len(meshes) > 1 else 1

    def tables(
        self, meshes: Sequence[Mesh], size: int, setting: Setting
    ) -> list[SpanTable]:
        """What runs of layers cost on each stage's mesh."""
        most = -(-setting.batch_size // size)
        live = self._live(meshes, most)
        sharing = len(meshes) // len({mesh.devices for mesh in meshes})
        return [
            self._table(
                mesh.shape,
                Load(
                    samples=size // mesh.shape.lanes,
                    live=live[k],
                    state_devices=setting.state_devices,
                    members=setting.members,
                    moments=self._options.moments,
                    per_segment=setting.per_segment,
                    remat=self._options.remat,
                    budget_bytes=int(
                        mesh.shape.usable_memory_bytes * setting.budget_share / sharing
                    ),
                ),
            )
            for k, mesh in enumerate(meshes)
        ]

    def _table(self, shape: MeshShape, load: Load) -> SpanTable:
        remat = self._options.remat
        if (shape, load.samples) not in self._arrays:
            arrays = LayerArrays(self._chain, shape, load.samples, remat)
            self._arrays[shape, load.samples] = arrays
        if (shape, load) not in self._tables:
            arrays = self._arrays[shape, load.samples]
            self._tables[shape, load] = SpanTable(arrays, load)
        return self._tables[shape, load]

    def _live(self, meshes: Sequence[Mesh], most: int) -> list[int]:
        """Live microbatches of each stage, were all the batch this replica's."""
        if self._options.schedule is Schedule.INTERLEAVED:
            most = min(most, 4 * len(meshes))  # more are never alive at once
        return live_microbatches(
            self._options.schedule,
            Replica(
                stages=tuple(Stage(devices=m.devices, layers=(0, 1)) for m in meshes),
                microbatches=most,
                microbatch_size=1,
                samples=most,
            ),
        )

    def _spans(
        self, tables: Sequence[SpanTable], own_split: tuple[int, ...] | None
    ) -> tuple[Span, ...] | None:
        if own_split is not None:
            edges = [sum(own_split[:k]) for k in range(len(own_split) + 1)]
            spans = tuple(itertools.pairwise(edges))
            fits = all(
                table.seconds(*span) < math.inf
                for table, span in zip(tables, spans, strict=True)
            )
            return spans if fits else None
        key = tuple(map(id, tables))  # tables live as long as the fitter
        if key not in self._splits:
            costs = [table.seconds_FS for table in tables]
            self._splits[key] = split_layers(costs)
        return self._splits[key]

    def _borders_s(
        self, meshes: Sequence[Mesh], spans: Sequence[Span], size: int
    ) -> list[float]:
        return [
            transfer_s(
                self._cluster,
                meshes[k].devices,
                meshes[k + 1].devices,
                enter_bytes(self._chain, spans[k][1], meshes[k].shape.dtype, size),
            )
            for k in range(len(spans) - 1)
        ]


def stages(
    meshes: Sequence[Mesh], fitted: Fitted, per_segment: int | None
) -> tuple[Stage, ...]:
    """The fitted stages, as the plan has them."""
    rounds = len(fitted.spans) // len(meshes)
    return tuple(
        Stage(
            devices=mesh.devices,
            layers=span,
            lanes=mesh.shape.lanes,
            tensor=mesh.shape.tensor,
            dtype=mesh.shape.dtype,
            segments=segments(span[1] - span[0], per_segment),
            remat=remat,
        )
        for mesh, span, remat in zip(
            [*meshes] * rounds, fitted.spans, fitted.remat, strict=True
        )
    )
