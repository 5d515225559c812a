"""What a layout is worth: layers, remat, microbatches and batch shares, then seconds.

    Layout -> Scorer.score -> Scored -> Scorer.plan -> Plan

A formula, for thousands of layouts; the few best are played by the simulator. All that
follows the layout is exact under it: dynamic programming for layers, whole numbers for
the batch.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.links import all_reduce_s, way_bytes_per_s
from hexijax.costs.memory import GRAD_BYTES, STATE_BYTES
from hexijax.costs.rates import HOST_CALL_S
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.plan.plan import Plan, Replica
from hexijax.planner.batches import BatchShare, end_s, split_batch
from hexijax.planner.exposed import Piece, exposed_s, pieces
from hexijax.planner.fit import Fitted, Fitter, Setting, stages
from hexijax.planner.layers import Span
from hexijax.planner.mesh import Layout, Mesh
from hexijax.planner.options import PlanOptions
from hexijax.planner.segments import layers_per_segment, shorter

FORWARD_SHARE = 1 / 3
"""Of a stage's time; the backward makes two products for each of the forward's."""

FINE_DEVICES = 4
"""Up to so many devices every microbatch size is scored."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A layout with all that was decided for it."""

    layout: Layout
    """Meshes of each replica."""

    fitted: tuple[Fitted, ...]
    """Stages of each replica."""

    shares: tuple[BatchShare, ...]
    """What each replica takes of the batch."""

    setting: Setting
    """What they have in common."""

    step_s: float
    """By formula."""


class Scorer:
    """Scores layouts of one chain on one cluster."""

    def __init__(
        self, chain: Chain, cluster: Cluster, batch_size: int, options: PlanOptions
    ) -> None:
        coarse = len(cluster.devices) > FINE_DEVICES
        self.fitter = Fitter(chain, cluster, options, coarse=coarse)
        self.count = 0
        self._chain = chain
        self._cluster = cluster
        self._batch_size = batch_size
        self._options = options
        self._seen: dict[object, Scored | None] = {}
        self._nic: dict[str, float] = {}

    def score(self, layout: Layout, budget_share: float = 1.0) -> Scored | None:
        """The layout at its best, or None where it cannot be."""
        key = (tuple(tuple(map(id, meshes)) for meshes in layout), budget_share)
        if key not in self._seen:
            self.count += 1
            self._seen[key] = self._score(layout, budget_share)
        return self._seen[key]

    def _score(self, layout: Layout, budget_share: float) -> Scored | None:
        if not self._possible(layout):
            return None
        splits = self._own_splits(layout)
        if splits is None:
            return None
        wanted = layers_per_segment(len(layout), self._options.layers_per_segment)
        for per_segment in shorter(wanted, self._options.layers_per_segment):
            found = self._with_segments(layout, splits, per_segment, budget_share)
            if found:
                return found
        return None

    def _with_segments(
        self,
        layout: Layout,
        splits: Sequence[tuple[int, ...] | None],
        per_segment: int | None,
        budget_share: float,
    ) -> Scored | None:
        state_devices = sum(min(m.shape.num_devices for m in x) for x in layout)
        setting = Setting(
            batch_size=self._batch_size,
            state_devices=_below(state_devices),
            members=_above(len(layout)),
            per_segment=per_segment,
            budget_share=budget_share,
        )
        fits: list[tuple[Fitted, ...]] = []
        for meshes, split in zip(layout, splits, strict=True):
            found = self.fitter.fits(meshes, setting, split)
            if not found:
                return None
            fits.append(found)
        options = [[f.option for f in found] for found in fits]
        shares = split_batch(self._batch_size, options)
        if shares is None:
            return None
        fitted = tuple(
            found[share.option] for found, share in zip(fits, shares, strict=True)
        )
        compute_s = end_s(shares, options)
        step_s = max(compute_s, self._dispatch_s(layout, fitted, shares, per_segment))
        step_s += self._after_s(layout, fitted, per_segment)
        return Scored(
            layout=layout,
            fitted=fitted,
            shares=shares,
            setting=setting,
            step_s=step_s,
        )

    def plan(self, scored: Scored) -> Plan:
        """The plan, not judged yet."""
        return Plan(
            replicas=tuple(
                Replica(
                    stages=stages(meshes, fitted, scored.setting.per_segment),
                    microbatches=share.microbatches,
                    microbatch_size=fitted.option.size,
                    samples=share.samples,
                )
                for meshes, fitted, share in zip(
                    scored.layout, scored.fitted, scored.shares, strict=True
                )
            ),
            batch_size=self._batch_size,
            schedule=self._options.schedule,
            reductions=self._options.reductions,
        )

    def _possible(self, layout: Layout) -> bool:
        """Whether every stage can have a layer and every replica a sample."""
        num_layers = len(self._chain.layers)
        return 0 < len(layout) <= self._batch_size and all(
            len(meshes) * self.fitter.rounds(meshes) <= num_layers for meshes in layout
        )

    def _own_splits(self, layout: Layout) -> list[tuple[int, ...] | None] | None:
        """The user's split of each replica; None if the layout is of another form."""
        asked = self._options.layers_per_stage
        if asked is None:
            return [None] * len(layout)
        if len(asked) not in (1, len(layout)):
            return None
        splits = list(asked) * (len(layout) if len(asked) == 1 else 1)
        for split, meshes in zip(splits, layout, strict=True):
            if len(split) != len(meshes) * self.fitter.rounds(meshes):
                return None
        return [*splits]

    def _dispatch_s(
        self,
        layout: Layout,
        fitted: Sequence[Fitted],
        shares: Sequence[BatchShare],
        per_segment: int | None,
    ) -> float:
        """What the busiest island's host needs to dispatch all calls."""
        calls: dict[str, int] = {}
        for meshes, fit, share in zip(layout, fitted, shares, strict=True):
            for mesh, span in zip(itertools.cycle(meshes), fit.spans, strict=False):
                island = self._cluster.device(mesh.devices[0]).island
                made = 2 * share.microbatches * num_segments(span, per_segment)
                calls[island] = calls.get(island, 0) + made
        return max(calls.values()) * HOST_CALL_S

    def _after_s(
        self, layout: Layout, fitted: Sequence[Fitted], per_segment: int | None
    ) -> float:
        """What sums, updates and new parameters take beyond the backward."""
        num_replicas = len(layout)
        one_node = len({mesh.node for meshes in layout for mesh in meshes}) == 1
        part = (num_replicas - 1) / num_replicas
        found: list[Piece] = []
        for meshes, fit in zip(layout, fitted, strict=True):
            before_s = [0.0, 0.0]
            for k, span in enumerate(fit.spans):
                mesh, stage_s = meshes[k % len(meshes)], fit.stage_s[k]
                shape, params = mesh.shape, fit.params[k]
                own_s = (stage_s * FORWARD_SHARE, stage_s * (1 - FORWARD_SHARE))
                num_bytes = params * (GRAD_BYTES + ITEM_BYTES[shape.dtype])
                travel_s = 0.0
                if num_replicas > 1:
                    sent = num_bytes * shape.tensor * part
                    if one_node:
                        sent /= shape.num_devices
                    travel_s = sent / self._bytes_per_s(mesh, layout, one_node)
                found += pieces(
                    way=mesh.devices[0] if one_node else mesh.node,
                    before_s=(before_s[0], before_s[1]),
                    own_s=own_s,
                    travel_s=travel_s,
                    program_s=self._programs_s(mesh, params, num_replicas),
                    num_segments=num_segments(span, per_segment),
                )
                before_s = [before_s[0] + own_s[0], before_s[1] + own_s[1]]
        return exposed_s(found)

    def _programs_s(self, mesh: Mesh, params: float, num_replicas: int) -> float:
        """Sums over a stage's lanes, its part of the update, and joining parameters."""
        shape, lanes_s = mesh.shape, 0.0
        num_bytes = params * (GRAD_BYTES + ITEM_BYTES[shape.dtype])
        if shape.lanes > 1 and shape.link:
            # Sums go home and parameters come back: each half an all-reduce.
            lanes_s = all_reduce_s(shape.link, shape.lanes, int(num_bytes) // 2)
        held = params * shape.tensor / shape.num_devices / num_replicas
        per_param = 2 * STATE_BYTES * (1 + self._options.moments)
        per_param += GRAD_BYTES + STATE_BYTES
        moved = held * per_param
        if num_replicas > 1:  # cut, added up, joined
            moved += 2 * num_bytes
        return lanes_s + moved / shape.profile.memory_bytes_per_s

    def _bytes_per_s(self, mesh: Mesh, layout: Layout, one_node: bool) -> float:
        """Of a mesh's way to other replicas: its node's, or its own."""
        if one_node:
            other = layout[0][0] if layout[0][0] is not mesh else layout[1][0]
            return self._cluster.link(mesh.devices[0], other.devices[0]).bytes_per_s
        if mesh.node not in self._nic:
            others = (m for meshes in layout for m in meshes if m.node != mesh.node)
            link = self._cluster.link(mesh.devices[0], next(others).devices[0])
            node = self._cluster.node(mesh.node)
            self._nic[mesh.node] = way_bytes_per_s(node, link)
        return self._nic[mesh.node]


def num_segments(span: Span, per_segment: int | None) -> int:
    """Segments of a stage with these layers."""
    length = span[1] - span[0]
    return -(-length // (per_segment or length))


def _below(count: int) -> int:
    """A power of two: settings are few, and memory is never promised too little."""
    return 1 << (count.bit_length() - 1)


def _above(count: int) -> int:
    return 1 << (count - 1).bit_length()
