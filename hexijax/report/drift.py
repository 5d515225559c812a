"""A run beside its prediction: step, memory, and which instructions differ.

Timeline, measured step and spans -> drift -> Drift -> words, report.json, trace
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hexijax.report.words import gib, seconds
from hexijax.simulator import Cause, Timeline

TOLERATED = 0.1
"""Of the predicted step: more is explained."""

MOST_DEVICES = 8
"""Whose memory is printed."""

WAITS = "waits"
"""How words begin for what a device does when it does nothing."""

REST = f"{WAITS} for the next step"
"""What a watched step does not show: it stands alone."""

Busy = dict[tuple[str, str], float]
"""Seconds of a step by device and kind of instruction."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One device's time for one instruction."""

    device: str
    """Its name."""

    what: str
    """Kind of instruction: forward, backward, both, move, sync, update."""

    name: str
    """The instruction as a person reads it."""

    start_s: float
    """From the step's first start."""

    end_s: float
    """Likewise."""

    computes: bool
    """A program, and no copy."""

    waited_s: float = 0.0
    """For which the device had nothing to do before it."""

    waited_for: Cause | None = None
    """Why."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A device's time for one kind of instruction in a step."""

    device: str
    """Whose."""

    what: str
    """Kind of instruction, or what the device waits for."""

    predicted_s: float
    """By the simulator."""

    measured_s: float
    """In a step that was watched."""

    @property
    def more_s(self) -> float:
        """Measured beyond predicted."""
        return self.measured_s - self.predicted_s


def predicted_spans(timeline: Timeline) -> Iterator[Span]:
    """Of a simulated step: what devices compute, and what their ways carry."""
    for event in timeline.events:
        for queue, start_s, end_s, _ in event.queues:
            device, *way = queue.split(" ")
            yield Span(
                device=device,
                what=event.what.value,
                name=event.name,
                start_s=start_s,
                end_s=end_s,
                computes=not way,
            )


def busy(spans: Iterable[Span]) -> Busy:
    """Seconds that devices compute, by kind."""
    found: dict[tuple[str, str], float] = collections.defaultdict(float)
    for span in spans:
        if span.computes:
            found[span.device, span.what] += span.end_s - span.start_s
    return dict(found)


def waits(spans: Iterable[Span]) -> Busy:
    """Seconds that devices have nothing to do before what they compute, by cause."""
    found: dict[tuple[str, str], float] = collections.defaultdict(float)
    for span in spans:
        if span.computes and span.waited_for is not None:
            found[span.device, f"{WAITS} for {span.waited_for}"] += span.waited_s
    return dict(found)


def parts(
    predicted: Timeline, measured: Sequence[Span], *, measured_s: float
) -> tuple[Part, ...]:
    """Each device's kinds of instructions and its waits, the largest difference first.

    Args:
      predicted: a step.
      measured: of a step.
      measured_s: seconds of a step.
    """
    expected: Busy = {
        (device, what.value): busy_s
        for device, kinds in predicted.busy_s.items()
        for what, busy_s in kinds.items()
    }
    expected |= {
        (device, f"{WAITS} for {cause}"): idle_s
        for device, causes in predicted.idle_s.items()
        for cause, idle_s in causes.items()
    }
    seen = busy(measured) | waits(measured)
    found = [
        Part(
            device=device,
            what=what,
            predicted_s=expected.get((device, what), 0.0),
            measured_s=seen.get((device, what), 0.0),
        )
        for device, what in dict.fromkeys((*expected, *seen))
    ]
    for device in dict.fromkeys(part.device for part in found):
        mine = [part for part in found if part.device == device]
        rest_s = measured_s - sum(p.measured_s for p in mine)
        if rest_s > 0:  # a watched step stands alone and may take longer
            last = Part(device=device, what=REST, predicted_s=0.0, measured_s=rest_s)
            found.append(last)
    # What was not seen explains nothing: it comes last.
    return tuple(sorted(found, key=lambda part: (part.what == REST, -abs(part.more_s))))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """A run beside what its plan was predicted to do."""

    predicted_s: float
    """Seconds of a step."""

    measured_s: float
    """Median seconds of a step."""

    promised_bytes: Mapping[str, int]
    """By device."""

    peak_bytes: Mapping[str, int]
    """By device; empty where the backend does not tell."""

    parts: tuple[Part, ...] = ()
    """Of a step that was watched; empty: none was."""

    unmeasured: tuple[str, ...] = ()
    """Kinds whose layers were never timed: the prediction is of data sheets."""

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s

    @property
    def explanation(self) -> str:
        """Which instructions make the difference; empty where it is tolerated."""
        if abs(self.ratio - 1) <= TOLERATED:
            return ""
        if not self.parts:
            trace = "run with --trace to see which instructions make the difference"
            if not self.unmeasured:
                return trace
            kinds = " or ".join(self.unmeasured)
            return (
                f"no layer was timed on {kinds}, whose figures are data sheets' or "
                f"declared: `hexijax profile` measures them; {trace}"
            )
        return "; ".join(map(_told, _those_that_tell(self.parts)))

    def report(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "predicted_step_s": self.predicted_s,
            "measured_step_s": self.measured_s,
            "ratio": self.ratio,
            "memory": {
                device: {
                    "promised_bytes": promised,
                    "peak_bytes": self.peak_bytes.get(device),
                }
                for device, promised in self.promised_bytes.items()
            },
            "explanation": self.explanation,
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield (
            f"  beside its prediction of {seconds(self.predicted_s)} a step: "
            f"{self.ratio - 1:+.1%}"
        )
        if self.explanation:
            yield f"    {self.explanation}"
        known = [d for d in self.promised_bytes if d in self.peak_bytes]
        for device in known[:MOST_DEVICES]:
            yield (
                f"    {device}: {gib(self.peak_bytes[device])} of "
                f"{gib(self.promised_bytes[device])} promised"
            )
        if len(known) > MOST_DEVICES:
            yield f"    and {len(known) - MOST_DEVICES} more, in report.json"


def _those_that_tell(parts: Sequence[Part]) -> Sequence[Part]:
    """The instructions that differ most; the waits only where they differ more than
    all instructions do."""
    work = [part for part in parts if not part.what.startswith(WAITS)]
    if parts[0].what.startswith(WAITS) and work:
        return (parts[0], work[0])
    return parts[:2]


def _told(part: Part) -> str:
    what = part.what
    if what.startswith(WAITS):
        what = f"it {what},"
    return (
        f"{part.device}: {what} {seconds(part.measured_s)}, predicted "
        f"{seconds(part.predicted_s)}"
    )
