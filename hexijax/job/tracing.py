"""The last step of a run, watched, beside what was predicted of it.

    Engine -> Traced -> Loop; Judged, Traced -> drift -> Drift; both -> trace.json

A watched step is waited for, so it stands alone: what overlaps the next step in
training has nothing to overlap. The step before it is watched, too, so that tokens are
compiled.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hexijax.experiment import Batch
from hexijax.job.loop import Result
from hexijax.program.program import (
    Backward,
    Forward,
    Instruction,
    Prefetch,
    Recv,
    Send,
    Update,
    WriteBack,
)
from hexijax.report.drift import Drift, Part, Span, parts, predicted_spans
from hexijax.report.judged import Judged, with_events
from hexijax.runtime.results import Sums
from hexijax.simulator import Cause
from hexijax.simulator.trace import Slice, write_slices
from hexijax.simulator.uses import What, name

if TYPE_CHECKING:
    from hexijax.runtime.engine import Engine

WATCHED = 2
"""Last steps that are watched; the first of them compiles tokens."""


class Traced:
    """An engine whose last steps are watched."""

    def __init__(self, engine: "Engine", steps: int):
        from hexijax.runtime.tracer import Tracer

        self._engine, self._steps = engine, steps
        self._tracer = Tracer(engine)

    def step(self, batch: Batch, step: int) -> Result:
        """See ``Trainee``."""
        if step >= self._steps - WATCHED:
            return self._tracer.step(batch, step)
        return self._engine.step(batch, step)

    def sums(self, batch: Batch, number: int) -> Sums:
        """See ``Evaluator``."""
        return self._engine.sums(batch, number)

    def spans(self) -> list[Span]:
        """Of the last step."""
        return [
            Span(
                device=ran.device,
                what=_what(ran.instruction, fused=ran.fused).value,
                name=name(ran.instruction),
                start_s=ran.start_s,
                end_s=ran.end_s,
                computes=ran.computes,
                waited_s=ran.waited_s,
                waited_for=_cause(ran.waited_for),
            )
            for ran in self._tracer.events()
        ]


def drift(
    judged: Judged,
    measured_s: float,
    peak_bytes: Mapping[str, int],
    traced: Traced | None = None,
    trace: Path | None = None,
) -> Drift:
    """A run beside its prediction.

    Args:
      judged: its plan.
      measured_s: median seconds of a step.
      peak_bytes: by device, where the backend tells.
      traced: its engine, if steps were watched.
      trace: where the two timelines go, one beside the other.
    """
    found: tuple[Part, ...] = ()
    if traced is not None:
        timeline = with_events(judged).timeline
        measured = traced.spans()
        found = parts(timeline, measured, measured_s=measured_s)
        if trace is not None:
            write_slices(trace, _slices([*predicted_spans(timeline)], measured))
    return Drift(
        predicted_s=judged.step_s,
        measured_s=measured_s,
        promised_bytes={d: p.total_bytes for d, p in judged.memory.items()},
        peak_bytes=peak_bytes,
        parts=found,
        unmeasured=tuple(_unmeasured(judged)),
    )


def _unmeasured(judged: Judged) -> Iterator[str]:
    """Kinds that compute and have no times of layers."""
    cluster = judged.problem.cluster
    used = {
        cluster.device(name).kind
        for _, stage in judged.plan.stages()
        for name in stage.devices
    }
    for profile in cluster.profiles:
        if profile.kind in used and not profile.layer_times:
            yield profile.kind


def _slices(predicted: Sequence[Span], measured: Sequence[Span]) -> Iterator[Slice]:
    """A group a device: what was predicted above what was measured."""
    for when, spans in (("as predicted", predicted), ("measured", measured)):
        for span in spans:
            queue = "1 computes" if span.computes else "2 moves"
            yield Slice(
                group=span.device,
                track=f"{queue}: {when}",
                name=span.name,
                category=span.what,
                start_s=span.start_s,
                end_s=span.end_s,
            )


def _what(instruction: Instruction, *, fused: bool) -> What:
    match instruction:
        case Forward():
            return What.BOTH if fused else What.FORWARD
        case Backward():
            return What.BACKWARD
        case Send() | Recv() | Prefetch() | WriteBack():
            return What.MOVE
        case Update():
            return What.UPDATE
        case _:
            return What.SYNC


def _cause(instruction: Instruction | None) -> Cause:
    """Why a device waits for an instruction; None: for its dispatch."""
    match instruction:
        case None:
            return Cause.DISPATCH
        case Forward() | Backward():
            return Cause.PIPELINE
        case Send() | Recv() | Prefetch() | WriteBack():
            return Cause.MOVE
        case _:
            return Cause.SYNC
