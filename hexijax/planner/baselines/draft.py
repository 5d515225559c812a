"""A draft says who computes together; the composer adds layers, remat and batch.

    Draft -> Composer.sketches -> (Sketch: rough seconds) -> Composer.plan -> Plan

What a published system leaves even stays even here, what it balances is balanced with
the exact helpers (``layers``, ``batches``). A sketch's seconds are ideal 1F1B and a sum
over the slowest node link: enough to tell which plans are worth the judge's time.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from hexijax.cluster import LinkProfile
from hexijax.costs.activations import enter_bytes
from hexijax.costs.compute import layer_times
from hexijax.costs.links import slowest_link, transfer_s
from hexijax.costs.memory import GRAD_BYTES, STATE_BYTES, flying_bytes
from hexijax.costs.rates import HOST_CALL_S
from hexijax.layers.chain import ITEM_BYTES, Chain, Remat
from hexijax.plan.plan import Place, Plan, Replica, Stage, StateShare, stage_place
from hexijax.planner.baselines.devices import Mesh, Pipeline, Yard
from hexijax.planner.baselines.runs import Load, RunCosts, even_spans, segment_lengths
from hexijax.planner.batches import BatchOption, end_s, split_batch
from hexijax.planner.layers import Span, split_layers
from hexijax.planner.options import PlanOptions
from hexijax.program.buckets import SHARED_SIZE

OVERLAPPED = 4
"""Layers of a segment where gradients are summed beside the backward."""


MOST_SIZES = 64
"""Samples of a microbatch up to which every size is tried where any will do."""

UNEVEN_SHARES = (0.95, 0.8, 0.65, 0.5, 0.35)
"""Of a device's memory, for all but the state: what to try where state is uneven."""


WORTH = 1.15
"""Of the best rough seconds so far: a draft whose bound is beyond is left."""


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """Who computes together, and by which rules the rest is settled."""

    pipelines: tuple[Pipeline, ...]
    """One a replica."""

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """Layers and remat of a pipeline for one microbatch size, and its pace."""

    spans: tuple[Span, ...]
    remat: tuple[Remat, ...]
    option: BatchOption


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """A plan not yet written down."""

    step_s: float
    """Rough seconds of a step."""

    draft: Draft
    size: int | None
    """Samples of a lane's microbatch; None: each replica's own."""

    policies: tuple[Remat, ...]
    """Remat to choose from."""

    per_segment: int | None
    """Most layers of a segment."""

    share: float = 1.0
    """Of each device's memory that was left for all but uneven state."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Setting:
    """What fits of one sketch have in common."""

    members: int
    policies: tuple[Remat, ...]
    per_segment: int | None
    share: float
    stateless: bool


class Composer:
    """Composes drafts of one chain on one cluster; equal pipelines are fitted once."""

    def __init__(
        self, chain: Chain, yard: Yard, batch_size: int, options: PlanOptions
    ) -> None:
        self.chain, self.yard = chain, yard
        self.batch_size, self.options = batch_size, options
        self._costs = RunCosts(chain)
        self._flops = np.cumsum(
            [0.0, *(x.forward_flops + x.backward_flops for x in chain.layers)]
        )
        self._links: dict[LinkProfile, int] = {}
        self._slowest = functools.cache(self._slowest_between)
        self._between = functools.cache(self._link_between)
        self._sample_s: dict[int, float] = {}
        self.best_s = math.inf
        """Of all sketches so far, in rough seconds."""
        self._keys: dict[Pipeline, tuple[int, ...]] = {}
        self._fits: dict[object, Fit | None] = {}
        self._even = functools.cache(lambda stages: even_spans(chain, stages))

    def sketches(self, draft: Draft) -> Iterator[Sketch]:
        """One for each microbatch size and remat policy that fits."""
        members = len(draft.pipelines)
        if members > self.batch_size or not members:
            return
        classes = self._classes(draft)
        sync_s = self._sync_s(draft)
        if self._bound_s(draft, classes) + sync_s > self.best_s * WORTH:
            return
        choices = [self.options.remat]
        if draft.uniform_remat:
            choices = [(policy,) for policy in self.options.remat]
        crowd = self._crowd(draft)
        sizes = [None] if draft.batch is Batch.TIMES else self._sizes(draft)
        for size in sizes:
            # The first that fits is the fastest: less remat, then longer segments.
            shares = UNEVEN_SHARES if draft.uneven_state else (1.0,)
            for share, policies, per_segment in itertools.product(
                shares, choices, self._segments(members)
            ):
                setting = _Setting(
                    members, policies, per_segment, share, draft.uneven_state
                )
                step = self._step(draft, classes, size, setting)
                if step is None or (
                    draft.uneven_state
                    and self._state_shares(draft, size, setting) is None
                ):
                    continue
                compute_s, microbatches, fit = step
                calls = 2 * sum(
                    len(segment_lengths(b - a, per_segment)) for a, b in fit.spans
                )
                dispatch_s = microbatches * crowd * calls * HOST_CALL_S / len(fit.spans)
                yield Sketch(
                    step_s=max(compute_s, dispatch_s) + sync_s,
                    draft=draft,
                    size=size,
                    policies=policies,
                    per_segment=per_segment,
                    share=share,
                )
                break

    def plan(self, sketch: Sketch, share: float = 1.0) -> Plan | None:
        """The sketch in full, with a share of each device's memory."""
        draft = sketch.draft
        setting = _Setting(
            len(draft.pipelines),
            sketch.policies,
            sketch.per_segment,
            share * sketch.share,
            draft.uneven_state,
        )
        state: tuple[StateShare, ...] | None = (StateShare(groups=("*",), shares={}),)
        if draft.uneven_state:
            state = self._state_shares(draft, sketch.size, setting)
        if state is None:
            return None
        options = self._options(draft, sketch.size, setting)
        if options is None:
            return None
        taken = self._taken(draft, options)
        if taken is None:
            return None
        return Plan(
            replicas=tuple(
                Replica(
                    stages=self._stages(pipeline, fit, sketch.per_segment),
                    microbatches=-(-samples // fit.option.size),
                    microbatch_size=fit.option.size,
                    samples=samples,
                )
                for pipeline, (fit, samples) in zip(draft.pipelines, taken, strict=True)
            ),
            batch_size=self.batch_size,
            reductions=self.options.reductions,
            state=state,
            chain=self.chain.fingerprint(),
            cluster=self.yard.cluster.fingerprint(),
        )

    # Classes of equal pipelines.

    def _classes(self, draft: Draft) -> dict[tuple[int, ...], tuple[Pipeline, int]]:
        counts = collections.Counter(map(self.key, draft.pipelines))
        first = {self.key(pipeline): pipeline for pipeline in draft.pipelines}
        return {key: (first[key], count) for key, count in counts.items()}

    def key(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Equal for pipelines of equal meshes and links."""
        if pipeline not in self._keys:
            links = [
                self._between(a.block.node, b.block.node)
                for a, b in itertools.pairwise(pipeline)
            ]
            self._keys[pipeline] = (*(mesh.key for mesh in pipeline), *links)
        return self._keys[pipeline]

    def _link_between(self, a: str, b: str) -> int:
        if a == b:
            return -1
        cluster = self.yard.cluster
        link = cluster.links.between(cluster.node(a), cluster.node(b))
        assert link, f"{a} and {b} were checked when the cluster was made"
        return self._links.setdefault(link, len(self._links))

    # Fits.

    def _segments(self, members: int) -> Sequence[int | None]:
        asked = self.options.layers_per_segment
        if asked is not None:
            return [asked]
        return [None, OVERLAPPED, 1] if members == 1 else [OVERLAPPED, 1]

    def _sizes(self, draft: Draft) -> list[int]:
        """Doubling up to a replica's whole part of an even batch."""
        units = sum(map(unit, draft.pipelines))
        most = max(-(-self.batch_size // units), 1)
        cap = self.options.max_microbatch_size
        if cap is not None:
            widest = max(unit(p) // min(m.lanes for m in p) for p in draft.pipelines)
            most = min(most, cap // widest)
        sizes = {2**k for k in range(max(most, 0).bit_length())}
        return sorted({*sizes, most} - {0})

    def _own_sizes(self, pipeline: Pipeline, draft: Draft) -> list[int]:
        most = -(-self.batch_size // unit(pipeline))
        cap = self.options.max_microbatch_size
        if cap is not None:
            most = min(most, cap * min(m.lanes for m in pipeline) // unit(pipeline))
        doubling = {2**k for k in range(most.bit_length())}
        if not draft.any_size:
            return sorted(doubling)
        return sorted(doubling | set(range(1, min(most, MOST_SIZES) + 1)))

    def _step(
        self,
        draft: Draft,
        classes: dict[tuple[int, ...], tuple[Pipeline, int]],
        size: int | None,
        setting: _Setting,
    ) -> tuple[float, int, Fit] | None:
        """Seconds of the slowest replica, its microbatches, and a fit."""
        options = self._options(draft, size, setting)
        if options is None:
            return None
        if draft.batch is Batch.TIMES:
            lists = [[f.option for f in options[self.key(p)]] for p in draft.pipelines]
            shares = split_batch(self.batch_size, lists)
            if shares is None:
                return None
            most = max(share.microbatches for share in shares)
            return end_s(shares, lists), most, next(iter(options.values()))[0]
        total = sum(
            count * self._weight(draft, pipeline, options[key][0])
            for key, (pipeline, count) in classes.items()
        )
        worst: tuple[float, int, Fit] | None = None
        for key, (pipeline, _) in classes.items():
            fit = options[key][0]
            part = self.batch_size * self._weight(draft, pipeline, fit) / total
            microbatches = max(math.ceil(part / fit.option.size - 1e-9), 1)
            ends_s = fit.option.end_s(microbatches)
            if worst is None or ends_s > worst[0]:
                worst = ends_s, microbatches, fit
        return worst

    def _weight(self, draft: Draft, pipeline: Pipeline, fit: Fit) -> float:
        """A replica's part of the batch, any scale."""
        if draft.batch is Batch.FLOPS:
            return sum(mesh.peak_flops_per_s for mesh in pipeline)
        return fit.option.size

    def _options(
        self, draft: Draft, size: int | None, setting: _Setting
    ) -> dict[tuple[int, ...], list[Fit]] | None:
        """Fits by pipeline class: one of the size, or each of its own sizes."""
        found: dict[tuple[int, ...], list[Fit]] = {}
        firsts = {self.key(pipeline): pipeline for pipeline in draft.pipelines}
        slowest = min(
            sum(m.peak_flops_per_s for m in p) / unit(p) for p in firsts.values()
        )
        spans = draft.spans
        if spans is None and draft.common and draft.layers is Layers.TIMES:
            assert size is not None, "a common split is made for one size"
            spans = self._common_spans(list(firsts.values()), size, setting)
            if spans is None:
                return None
        for key, pipeline in firsts.items():
            sizes = [size] if size is not None else self._own_sizes(pipeline, draft)
            if draft.batch is Batch.FLOPS_SIZES and size is not None:
                speed = sum(m.peak_flops_per_s for m in pipeline) / unit(pipeline)
                sizes = [max(1, round(size * speed / slowest))]
            fits = [
                fit
                for one in sizes
                if (fit := self.fit(pipeline, one, draft.layers, spans, setting))
            ]
            if not fits:
                return None
            found[key] = fits
        return found

    def fit(
        self,
        pipeline: Pipeline,
        size: int,
        layers: Layers,
        spans: tuple[Span, ...] | None,
        setting: _Setting,
    ) -> Fit | None:
        """One pipeline for one size of a lane's microbatch."""
        key = (self.key(pipeline), size, layers, spans, setting)
        if key not in self._fits:
            self._fits[key] = self._fit(pipeline, size, layers, spans, setting)
        return self._fits[key]

    def _fit(
        self,
        pipeline: Pipeline,
        size: int,
        layers: Layers,
        spans: tuple[Span, ...] | None,
        setting: _Setting,
    ) -> Fit | None:
        if len(pipeline) > len(self.chain.layers):
            return None
        whole = size * unit(pipeline)
        spans = spans or self._spans(pipeline, whole, layers, setting)
        if spans is None:
            return None
        seconds: list[float] = []
        remat: list[Remat] = []
        for k, (mesh, span) in enumerate(zip(pipeline, spans, strict=True)):
            load = self._load(pipeline, k, whole, setting)
            runs = self._costs.runs(mesh.key, mesh.shape, whole // mesh.lanes)
            stage = runs.stage(span, load)
            if stage is None:
                return None
            seconds.append(stage[0])
            remat.append(stage[1])
        borders_s = self._borders_s(pipeline, spans, whole)
        return Fit(
            spans=spans,
            remat=tuple(remat),
            option=BatchOption(
                size=whole,
                first_s=sum(seconds) + 2 * sum(borders_s),
                next_s=max(*seconds, *borders_s, 0.0),
            ),
        )

    def _load(self, pipeline: Pipeline, k: int, whole: int, setting: _Setting) -> Load:
        mesh = pipeline[k]
        most = -(-self.batch_size // whole)
        per_home = (
            mesh.shape.tensor if self.options.whole_leaves else mesh.shape.num_devices
        )
        return Load(
            live=min(len(pipeline) - k, most),
            members=setting.members,
            homes=0 if setting.stateless else setting.members * per_home,
            moments=self.options.moments,
            per_segment=setting.per_segment,
            policies=setting.policies,
            budget_bytes=int(mesh.block.usable_memory_bytes * setting.share),
        )

    def _spans(
        self, pipeline: Pipeline, whole: int, layers: Layers, setting: _Setting
    ) -> tuple[Span, ...] | None:
        if layers is Layers.EVEN:
            return self._even(len(pipeline))
        tables = [
            self._table(pipeline, k, whole, setting) for k in range(len(pipeline))
        ]
        if layers is Layers.FLOPS:
            work_FS = self._flops[None, :] - self._flops[:-1, None]
            tables = [
                np.where(np.isfinite(table), work_FS / mesh.peak_flops_per_s, np.inf)
                for table, mesh in zip(tables, pipeline, strict=True)
            ]
        return split_layers(tables)

    def _common_spans(
        self, pipelines: Sequence[Pipeline], size: int, setting: _Setting
    ) -> tuple[Span, ...] | None:
        """The split that is best for the slowest of unlike pipelines."""
        if len(pipelines[0]) > len(self.chain.layers):
            return None
        return split_layers(
            [
                functools.reduce(
                    np.maximum,
                    [self._table(p, k, size * unit(p), setting) for p in pipelines],
                )
                for k in range(len(pipelines[0]))
            ]
        )

    def _table(
        self, pipeline: Pipeline, k: int, whole: int, setting: _Setting
    ) -> np.ndarray:
        mesh = pipeline[k]
        runs = self._costs.runs(mesh.key, mesh.shape, whole // mesh.lanes)
        return runs.table(self._load(pipeline, k, whole, setting))

    def _borders_s(
        self, pipeline: Pipeline, spans: Sequence[Span], whole: int
    ) -> list[float]:
        return [
            transfer_s(
                self.yard.cluster,
                a.devices,
                b.devices,
                enter_bytes(self.chain, span[1], a.shape.dtype, whole),
            )
            for (a, b), span in zip(
                itertools.pairwise(pipeline), spans[:-1], strict=True
            )
        ]

    # What all replicas pay together.

    def _sync_s(self, draft: Draft) -> float:
        """Into the busiest node: gradients, and parameters for every lane."""
        members = len(draft.pipelines)
        if members == 1:
            return 0.0
        nodes: dict[str, float] = {}
        for pipeline in draft.pipelines:
            for mesh in pipeline:
                node = mesh.block.node
                item = ITEM_BYTES[mesh.shape.dtype]
                each = (GRAD_BYTES + item * mesh.lanes) / len(pipeline)
                nodes[node] = nodes.get(node, 0.0) + each
        link = self._slowest(frozenset(nodes))
        if link is None:
            link = slowest_link(
                self.yard.cluster, [p[0].devices[0] for p in draft.pipelines[:2]]
            )
        assert link, "two replicas have two devices"
        once = self.chain.num_params * (members - 1) / members
        return link.transfer_s(int(max(nodes.values()) * once))

    def _slowest_between(self, nodes: frozenset[str]) -> LinkProfile | None:
        """Of the links between some nodes."""
        kinds = {self._between(a, b) for a, b in itertools.combinations(nodes, 2)}
        links = [link for link, kind in self._links.items() if kind in kinds]
        return min(links, key=lambda link: link.bytes_per_s, default=None)

    def _crowd(self, draft: Draft) -> int:
        """Meshes of the busiest island: one host dispatches for all of them."""
        cluster = self.yard.cluster
        return max(
            collections.Counter(
                cluster.node(mesh.block.node).island
                for pipeline in draft.pipelines
                for mesh in pipeline
            ).values()
        )

    def stage_s(
        self, mesh: Mesh, spans: tuple[Span, ...], k: int, size: int, members: int
    ) -> float | None:
        """Seconds of stage k of a split on a mesh of one lane; None: no room."""
        setting = _Setting(
            members, self.options.remat, self._segments(members)[0], 1.0, False
        )
        load = self._load((mesh,) * len(spans), k, size, setting)
        runs = self._costs.runs(mesh.key, mesh.shape, size)
        found = runs.stage(spans[k], load)
        return found[0] if found else None

    def _bound_s(
        self, draft: Draft, classes: dict[tuple[int, ...], tuple[Pipeline, int]]
    ) -> float:
        """Rough seconds of a step in which no device of a replica ever waits."""
        rates = {
            key: sum(mesh.lanes / self.sample_s(mesh) for mesh in pipeline)
            for key, (pipeline, _) in classes.items()
        }
        if draft.batch is not Batch.EVEN:
            total = sum(rates[key] * count for key, (_, count) in classes.items())
            return self.batch_size / total
        units = sum(unit(pipeline) * count for pipeline, count in classes.values())
        return max(
            self.batch_size * unit(pipeline) / units / self._even_rate(draft, pipeline)
            for pipeline, _ in classes.values()
        )

    def _even_rate(self, draft: Draft, pipeline: Pipeline) -> float:
        """Samples per second of one replica."""
        rates = [mesh.lanes / self.sample_s(mesh) for mesh in pipeline]
        even = draft.layers is Layers.EVEN
        return len(rates) * min(rates) if even else sum(rates)

    def sample_s(self, mesh: Mesh) -> float:
        """Least seconds of a sample through all layers on a mesh's single lane."""
        if mesh.key not in self._sample_s:
            self._sample_s[mesh.key] = min(
                sum(t.total_s() for t in layer_times(self.chain, mesh.shape, n)) / n
                for n in (1, 2, 4, 8, 16, 32, 64)
            )
        return self._sample_s[mesh.key]

    # Writing it down.

    def _state_shares(
        self, draft: Draft, size: int | None, setting: _Setting
    ) -> tuple[StateShare, ...] | None:
        """State in proportion to the room left; None where there is not enough."""
        options = self._options(draft, size, setting)
        taken = options and self._taken(draft, options)
        if not taken:
            return None
        shares: dict[Place, float] = {}
        for r, (pipeline, (fit, _)) in enumerate(
            zip(draft.pipelines, taken, strict=True)
        ):
            for k, (mesh, span) in enumerate(zip(pipeline, fit.spans, strict=True)):
                load = self._load(pipeline, k, fit.option.size, setting)
                samples = fit.option.size // mesh.lanes
                runs = self._costs.runs(mesh.key, mesh.shape, samples)
                used = runs.stateless_bytes(span, load, fit.remat[k])
                room = max(mesh.block.usable_memory_bytes - used, 0)
                shares[stage_place(r, k)] = float(room * len(mesh.devices))
        need = self.chain.num_params * STATE_BYTES * (1 + self.options.moments)
        item = max(ITEM_BYTES[m.shape.dtype] for p in draft.pipelines for m in p)
        need += min(self.chain.num_params, SHARED_SIZE) * flying_bytes(
            1, 0, setting.members, item
        )
        if need > sum(shares.values()):
            return None
        return (StateShare(groups=("*",), shares=shares),)

    def _taken(
        self, draft: Draft, options: dict[tuple[int, ...], list[Fit]]
    ) -> list[tuple[Fit, int]] | None:
        """The fit and the samples of every replica."""
        fits = [options[self.key(pipeline)] for pipeline in draft.pipelines]
        if draft.batch is Batch.TIMES:
            shares = split_batch(
                self.batch_size, [[fit.option for fit in some] for some in fits]
            )
            if shares is None:
                return None
            return [
                (some[share.option], share.samples)
                for some, share in zip(fits, shares, strict=True)
            ]
        weights = [
            self._weight(draft, pipeline, some[0])
            for pipeline, some in zip(draft.pipelines, fits, strict=True)
        ]
        samples = apportion(self.batch_size, weights)
        if min(samples) < 1:
            return None
        return [(some[0], count) for some, count in zip(fits, samples, strict=True)]

    def _stages(
        self, pipeline: Pipeline, fit: Fit, per_segment: int | None
    ) -> tuple[Stage, ...]:
        return tuple(
            Stage(
                devices=mesh.devices,
                layers=span,
                lanes=mesh.shape.lanes,
                tensor=mesh.shape.tensor,
                dtype=mesh.shape.dtype,
                segments=segment_lengths(span[1] - span[0], per_segment),
                remat=(policy,) * (span[1] - span[0]),
            )
            for mesh, span, policy in zip(pipeline, fit.spans, fit.remat, strict=True)
        )


def unit(pipeline: Pipeline) -> int:
    """Samples that a microbatch of one a lane has."""
    return math.lcm(*(mesh.shape.lanes for mesh in pipeline))


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to weights that sum to the total."""
    scale = total / sum(weights)
    counts = [math.floor(weight * scale) for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda i: counts[i] - weights[i] * scale)
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


def joined(yard: Yard, pipelines: Sequence[Pipeline]) -> list[Pipeline]:
    """Pipelines whose stages sit node by node beside each other, as lanes of one.

    Lanes sum their gradients in their mesh; replicas do over the links between them.
    """
    by_place: dict[object, list[Pipeline]] = {}
    for pipeline in pipelines:
        place = tuple(
            (m.block.node, m.block.kind, m.block.usable_memory_bytes, m.key)
            for m in pipeline
        )
        by_place.setdefault(place, []).append(pipeline)
    return [
        tuple(yard.joined(meshes) for meshes in zip(*some, strict=True))
        for some in by_place.values()
    ]
