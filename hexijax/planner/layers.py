"""Splits a run of layers over stages whose devices differ in speed and memory.

    seconds of (stage, first, stop) -> split_layers -> ((start, stop), ...)

Exact: dynamic programming over (stage, first layer), O(S * L^2) for S stages and L
layers. The slowest stage sets the pace, so it is made as fast as can be; of all splits
with that pace, the one whose stages take the least together fills and drains first.
"""

import math
from collections.abc import Callable

Span = tuple[int, int]
"""First layer and the one past the last."""

StageCost = Callable[[int, int, int], float]
"""Seconds of a stage with layers ``first`` to ``stop``; infinite if they do not fit."""


def split_layers(
    num_layers: int, num_stages: int, cost_s: StageCost
) -> tuple[Span, ...] | None:
    """The best split into stages of at least one layer each, or None if none fits."""
    if not 0 < num_stages <= num_layers:
        return None
    pace_s = _best(num_layers, num_stages, cost_s, max)
    if pace_s is None:
        return None

    def within_pace(stage: int, first: int, stop: int) -> float:
        seconds = cost_s(stage, first, stop)
        return seconds if seconds <= pace_s[1] else math.inf

    best = _best(num_layers, num_stages, within_pace, lambda a, b: a + b)
    assert best, "the split that set the pace is one of them"
    return best[0]


def _best(
    num_layers: int,
    num_stages: int,
    cost_s: StageCost,
    combine: Callable[[float, float], float],
) -> tuple[tuple[Span, ...], float] | None:
    """The split whose combined cost is least, and that cost; the first of equals."""
    # best[first]: least cost of layers first.. on the stages from this one on.
    best = [math.inf] * num_layers + [0.0]
    stops: list[list[int]] = []
    for stage in reversed(range(num_stages)):
        later, best = best, [math.inf] * (num_layers + 1)
        stop_of = [0] * (num_layers + 1)
        # Stages before this one, and after it, take at least one layer each.
        after = num_stages - stage - 1
        for first in range(stage, num_layers - after):
            for stop in range(first + 1, num_layers - after + 1):
                if later[stop] < math.inf:
                    cost = combine(cost_s(stage, first, stop), later[stop])
                    if cost < best[first]:
                        best[first], stop_of[first] = cost, stop
        stops.append(stop_of)
    if best[0] == math.inf:
        return None
    spans: list[Span] = []
    first = 0
    for stop_of in reversed(stops):
        spans.append((first, stop_of[first]))
        first = stop_of[first]
    return tuple(spans), best[0]
