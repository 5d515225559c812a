"""What a baseline's drafter asks, and what writes its sketches down.

Sketch -> Composer.plan -> Plan
"""

from collections.abc import Iterator

from hexijax.plan.plan import Plan, Replica, Stage, StateShare
from hexijax.planner.baselines.devices import Mesh, Pipeline
from hexijax.planner.baselines.draft import Draft
from hexijax.planner.baselines.fits import Fit
from hexijax.planner.baselines.ground import Ground
from hexijax.planner.baselines.runs import segment_lengths
from hexijax.planner.baselines.sketches import Sketch, Sketcher
from hexijax.planner.baselines.uneven import EVEN_STATE, state_shares, taken_of
from hexijax.planner.layers import Span


class Composer:
    """Composes the drafts of one baseline on common ground."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.chain, self.yard = ground.chain, ground.yard
        self.batch_size, self.options = ground.batch_size, ground.options
        self.sketcher = Sketcher(ground)

    @property
    def best_s(self) -> float:
        """Of all sketches taken so far, in rough seconds."""
        return self.sketcher.best_s

    def take(self, step_s: float) -> None:
        """Of a sketch that was taken."""
        self.sketcher.best_s = min(self.sketcher.best_s, step_s)

    def sketches(self, draft: Draft) -> Iterator[Sketch]:
        """All of a draft that fit, whatever their bounds."""
        if self.sketcher.key(draft) is not None:
            for _, size in self.sketcher.sizes(draft):
                yield from self.sketcher.settled(draft, size)

    def sample_s(self, mesh: Mesh) -> float:
        """Least seconds of a sample through all layers on a mesh's single lane."""
        return self.ground.bounds.sample_s(mesh)

    def stage_s(
        self, mesh: Mesh, spans: tuple[Span, ...], k: int, size: int, members: int
    ) -> float | None:
        """Seconds of stage k of a split on a mesh of one lane; None: no room."""
        ground = self.ground
        per_segment = ground.sizes.segments(members)[0]
        setting = ground.fits.setting(members, self.options.remat, per_segment)
        return ground.fits.stage_s(mesh, spans, k, size, setting)

    def plan(self, sketch: Sketch, share: float = 1.0) -> Plan | None:
        """The sketch in full, with a share of each device's memory."""
        ground, draft = self.ground, sketch.draft
        setting = sketch.setting(ground, share)
        replicas = taken_of(ground, draft, sketch.size, setting)
        state: tuple[StateShare, ...] | None = EVEN_STATE
        if draft.rules.uneven_state:
            state = state_shares(ground, draft, sketch.size, setting)
        if state is None or replicas is None:
            return None
        return Plan(
            replicas=tuple(
                Replica(
                    stages=_stages(pipeline, fit, sketch.per_segment),
                    microbatches=-(-samples // fit.option.size),
                    microbatch_size=fit.option.size,
                    samples=samples,
                )
                for pipeline, (fit, samples) in zip(
                    draft.pipelines, replicas, strict=True
                )
            ),
            batch_size=self.batch_size,
            reductions=self.options.reductions,
            state=state,
            chain=ground.chain_hash,
            cluster=ground.cluster_hash,
        )


def _stages(pipeline: Pipeline, fit: Fit, per_segment: int | None) -> tuple[Stage, ...]:
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
