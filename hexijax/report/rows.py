"""Which devices share a row: those that do the same at the same times.

Timeline -> rows -> (Row, ...) in the plan's order, 1 or 128 devices alike
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from hexijax.plan.names import fold
from hexijax.report.drawing import alike
from hexijax.report.judged import Judged
from hexijax.simulator.uses import What

SAME = 100
"""Parts of a step: what begins and ends in the same ones looks the same."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Devices that are drawn as one."""

    devices: tuple[str, ...]
    """Their names; the first stands for all."""

    label: str
    """For people."""


def group(names: Sequence[str], key: Callable[[str], Hashable]) -> list[Row]:
    """Names of equal keys as one row, in the order of the first of each."""
    found: dict[Hashable, list[str]] = {}
    for name in names:
        found.setdefault(key(name), []).append(name)
    return [Row(devices=tuple(g), label=label(g)) for g in found.values()]


def label(names: Sequence[str]) -> str:
    """``n0/0-3``, ``n0/0-3, n1/0``, or ``n0/0-3 and 124 more``."""
    runs = fold(names).split(",")
    if len(runs) <= 2:
        return ", ".join(runs)
    first = 1
    while first < len(names) and fold(names[: first + 1]).count(",") == 0:
        first += 1
    return f"{runs[0]} and {len(names) - first} more"


class Use(NamedTuple):
    """One use of a device or of a way of a link."""

    start_s: float
    end_s: float
    what: What


def uses_by_queue(judged: Judged) -> dict[str, list[Use]]:
    """The uses of every device and every way of a link."""
    found: dict[str, list[Use]] = {}
    for event in judged.timeline.events:
        for queue, start_s, end_s, _ in event.queues:
            found.setdefault(queue, []).append(Use(start_s, end_s, event.what))
    return found


def rows(judged: Judged, events: dict[str, list[Use]], *, most: int) -> list[Row]:
    """The plan's devices, equal ones as one row; evenly fewer where there are many."""
    cluster, step_s = judged.problem.cluster, judged.step_s
    places: dict[str, list[tuple[int, int]]] = {}
    leader: dict[str, str] = {}
    for run in alike(judged.plan, cluster):
        for r in range(run.first, run.first + run.count):
            for s, stage in enumerate(judged.plan.replicas[r].stages):
                first = run.replica.stages[s].devices
                for name, like in zip(stage.devices, first, strict=True):
                    places.setdefault(name, []).append((run.first, s))
                    leader[name] = like

    def key(name: str) -> Hashable:
        # Of equal replicas only one may have been played.
        its = events.get(name) or events.get(leader[name], ())
        kinds = sorted({event.what for event in its})
        shapes = [looks([e for e in its if e.what == k], step_s) for k in kinds]
        return cluster.device(name).kind, tuple(places[name]), tuple(shapes)

    found = group(list(places), key)
    if len(found) <= most:
        return found
    return [found[i * len(found) // most] for i in range(most)]


def looks(events: Sequence[Use], step_s: float) -> tuple[int, ...]:
    """Where events of one kind begin and end and how much they fill, as the eye can."""
    first_s, last_s = events[0].start_s, max(event.end_s for event in events)
    total_s = sum(event.end_s - event.start_s for event in events)
    return tuple(round(x / step_s * SAME) for x in (first_s, last_s, total_s))


def merged(events: Sequence[Use], least_s: float) -> list[tuple[float, float]]:
    """Spans (start, length) of events, gaps below ``least_s`` closed."""
    spans: list[list[float]] = []
    for event in sorted(events, key=lambda e: e.start_s):
        if spans and event.start_s - spans[-1][1] < least_s:
            spans[-1][1] = max(spans[-1][1], event.end_s)
        else:
            spans.append([event.start_s, event.end_s])
    return [(start, end - start) for start, end in spans]
