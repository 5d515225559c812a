"""How one pipeline holds the model: layers of each stage, remat, and its pace.

    pipeline, microbatch size, rule, setting -> Fits.fit -> Fit, or None: no room

Everything is kept by the class of the pipeline, so that drafts that differ in the place
of their devices alone cost nothing. A new split is dynamic programming over its stages.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from hexijax.costs.activations import enter_bytes
from hexijax.layers.chain import Chain, Remat
from hexijax.planner.baselines.devices import Mesh, Pipeline
from hexijax.planner.baselines.draft import Layers, unit
from hexijax.planner.baselines.runs import Load, RunCosts, Runs, even_spans
from hexijax.planner.baselines.ways import Ways
from hexijax.planner.batches import BatchOption
from hexijax.planner.layers import Span, split_layers
from hexijax.planner.options import PlanOptions
from hexijax.planner.pace import pipeline_s

Spans = tuple[Span, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """Layers and remat of a pipeline for one microbatch size, and its pace."""

    spans: Spans
    remat: tuple[Remat, ...]
    option: BatchOption


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Setting:
    """What fits of one sketch have in common; ``Fits.setting`` makes each once."""

    members: int
    """Replicas."""

    policies: tuple[Remat, ...]
    """Remat to choose from, the fastest first."""

    per_segment: int | None
    """Most layers of a segment."""

    share: float = 1.0
    """Of each device's memory."""

    stateless: bool = False
    """State is no part of it: it goes where room is left."""


class Fits:
    """Fits of one chain's pipelines; equal ones are made once."""

    def __init__(
        self, chain: Chain, ways: Ways, batch_size: int, options: PlanOptions
    ) -> None:
        self._chain, self._ways = chain, ways
        self._batch_size, self._options = batch_size, options
        self._costs = RunCosts(chain)
        self._flops = np.cumsum(
            [0.0, *(x.forward_flops + x.backward_flops for x in chain.layers)]
        )
        self._fits: dict[object, Fit | None] = {}
        self._commons: dict[object, Spans | None] = {}
        self._even = functools.cache(lambda stages: even_spans(chain, stages))
        self._load_of = functools.cache(self._make_load)
        self._settings: dict[tuple[object, ...], Setting] = {}

    def setting(
        self,
        members: int,
        policies: tuple[Remat, ...],
        per_segment: int | None,
        share: float = 1.0,
        *,
        stateless: bool = False,
    ) -> Setting:
        """The same one for the same values."""
        key = (members, policies, per_segment, share, stateless)
        if key not in self._settings:
            self._settings[key] = Setting(
                members=members,
                policies=policies,
                per_segment=per_segment,
                share=share,
                stateless=stateless,
            )
        return self._settings[key]

    def fit(
        self,
        pipeline: Pipeline,
        size: int,
        layers: Layers,
        spans: Spans | None,
        setting: Setting,
    ) -> Fit | None:
        """One pipeline for one size of a lane's microbatch."""
        key = (self._ways.key(pipeline), size, layers, spans, setting)
        if key not in self._fits:
            self._fits[key] = self._fit(pipeline, size, layers, spans, setting)
        return self._fits[key]

    def has_place(
        self,
        pipeline: Pipeline,
        size: int,
        layers: Layers,
        spans: Spans | None,
        setting: Setting,
    ) -> bool:
        """Whether all layers fit somehow: quickly told."""
        if spans or layers is Layers.EVEN:
            return self.fit(pipeline, size, layers, spans, setting) is not None
        return len(pipeline) <= len(self._chain.layers) and self._has_room(
            pipeline, size * unit(pipeline), setting
        )

    def common_spans(
        self, pipelines: Sequence[Pipeline], size: int, setting: Setting
    ) -> Spans | None:
        """The split that is best for the slowest of unlike pipelines."""
        key = (tuple(map(self._ways.key, pipelines)), size, setting)
        if key not in self._commons:
            self._commons[key] = self._common_spans(pipelines, size, setting)
        return self._commons[key]

    def stage_s(
        self, mesh: Mesh, spans: Spans, k: int, size: int, setting: Setting
    ) -> float | None:
        """Seconds of stage k of a split on a mesh of one lane; None: no room."""
        load = self._load(mesh, len(spans) - k, size, setting)
        found = self._runs(mesh, size).stage(spans[k], load)
        return found[0] if found else None

    def stateless_bytes(
        self, pipeline: Pipeline, k: int, fit: Fit, setting: Setting
    ) -> int:
        """All that a device of stage k holds but the state."""
        whole = fit.option.size
        load = self._load(pipeline[k], len(pipeline) - k, whole, setting)
        runs = self._runs(pipeline[k], whole)
        return runs.stateless_bytes(fit.spans[k], load, fit.remat[k])

    def _fit(
        self,
        pipeline: Pipeline,
        size: int,
        layers: Layers,
        spans: Spans | None,
        setting: Setting,
    ) -> Fit | None:
        stages = len(pipeline)
        if stages > len(self._chain.layers):
            return None
        whole = size * unit(pipeline)
        spans = spans or self._spans(pipeline, whole, layers, setting)
        if spans is None:
            return None
        seconds: list[float] = []
        remat: list[Remat] = []
        for k, (mesh, span) in enumerate(zip(pipeline, spans, strict=True)):
            load = self._load(mesh, stages - k, whole, setting)
            stage = self._runs(mesh, whole).stage(span, load)
            if stage is None:
                return None
            seconds.append(stage[0])
            remat.append(stage[1])
        borders_s = self._borders_s(pipeline, spans, whole)
        first_s, next_s = pipeline_s(seconds, borders_s, stages)
        return Fit(
            spans=spans,
            remat=tuple(remat),
            option=BatchOption(size=whole, first_s=first_s, next_s=next_s),
        )

    def _runs(self, mesh: Mesh, whole: int) -> Runs:
        return self._costs.runs(mesh.key, mesh.shape, whole // mesh.lanes)

    def _load(self, mesh: Mesh, to_end: int, whole: int, setting: Setting) -> Load:
        """Of the stage that has so many stages to the end, itself included."""
        shape = mesh.shape
        return self._load_of(
            min(to_end, -(-self._batch_size // whole)),
            shape.tensor if self._options.whole_leaves else shape.num_devices,
            mesh.block.usable_memory_bytes,
            setting,
        )

    def _make_load(
        self, live: int, per_home: int, usable_bytes: int, setting: Setting
    ) -> Load:
        return Load(
            live=live,
            members=setting.members,
            homes=0 if setting.stateless else setting.members * per_home,
            moments=self._options.moments,
            per_segment=setting.per_segment,
            policies=setting.policies,
            budget_bytes=int(usable_bytes * setting.share),
        )

    def _spans(
        self, pipeline: Pipeline, whole: int, layers: Layers, setting: Setting
    ) -> Spans | None:
        stages = len(pipeline)
        if layers is Layers.EVEN:
            return self._even(stages)
        if not self._has_room(pipeline, whole, setting):
            return None
        tables = [
            self._table(mesh, stages - k, whole, setting)
            for k, mesh in enumerate(pipeline)
        ]
        if layers is Layers.FLOPS:
            work_FS = self._flops[None, :] - self._flops[:-1, None]
            tables = [
                np.where(np.isfinite(table), work_FS / mesh.peak_flops_per_s, np.inf)
                for table, mesh in zip(tables, pipeline, strict=True)
            ]
        return split_layers(tables)

    def _has_room(self, pipeline: Pipeline, whole: int, setting: Setting) -> bool:
        """Whether stages as long as can be reach the last layer: quickly told."""
        first, num_layers = 0, len(self._chain.layers)
        for k, mesh in enumerate(pipeline):
            load = self._load(mesh, len(pipeline) - k, whole, setting)
            first = self._runs(mesh, whole).reach(load)[first]
            if first >= num_layers:
                return True
        return False

    def _common_spans(
        self, pipelines: Sequence[Pipeline], size: int, setting: Setting
    ) -> Spans | None:
        stages = len(pipelines[0])
        if stages > len(self._chain.layers):
            return None
        wholes = [size * unit(pipeline) for pipeline in pipelines]
        for pipeline, whole in zip(pipelines, wholes, strict=True):
            if not self._has_room(pipeline, whole, setting):
                return None
        worst: list[np.ndarray] = []
        for k in range(stages):
            tables = {
                id(table): table
                for pipeline, whole in zip(pipelines, wholes, strict=True)
                for table in [self._table(pipeline[k], stages - k, whole, setting)]
            }
            worst.append(functools.reduce(np.maximum, tables.values()))
        return split_layers(worst)

    def _table(
        self, mesh: Mesh, to_end: int, whole: int, setting: Setting
    ) -> np.ndarray:
        return self._runs(mesh, whole).table(self._load(mesh, to_end, whole, setting))

    def _borders_s(
        self, pipeline: Pipeline, spans: Sequence[Span], whole: int
    ) -> list[float]:
        return [
            self._ways.border_s(
                a, b, enter_bytes(self._chain, span[1], a.shape.dtype, whole)
            )
            for (a, b), span in zip(
                itertools.pairwise(pipeline), spans[:-1], strict=True
            )
        ]
