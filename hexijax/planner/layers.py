"""Splits a run of layers over stages whose devices differ in speed and memory.

    seconds of every run of layers on each stage -> split_layers -> ((start, stop), ...)

Exact: dynamic programming over (stage, first layer), O(S * L^2) for S stages and L
layers. The slowest stage sets the pace, so it is made as fast as can be; of all splits
with that pace, the one whose stages take the least together fills and drains first.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

Span = tuple[int, int]
"""First layer and the one past the last."""

SpanSeconds = Float[np.ndarray, "layers stops"]
"""``[first, stop]``: seconds of a stage with these layers; infinite where they do not
fit, or are none."""


def split_layers(
    costs: Sequence[SpanSeconds], slack: float = 0.0
) -> tuple[Span, ...] | None:
    """The best split into stages of at least one layer each, or None if none fits.

    Args:
      costs: for each stage, a square with one more column: ``stop`` goes up to L.
      slack: how much slower than the best pace the slowest stage may be, relatively:
        with few microbatches, filling and draining weigh more than the pace.
    """
    return next(iter(splits(costs, (slack,))), None)


def splits(
    costs: Sequence[SpanSeconds], slacks: Sequence[float]
) -> list[tuple[Span, ...]]:
    """The best split for each slack, or none if none fits."""
    found = _best(costs, np.maximum)
    if found is None:
        return []
    made: list[tuple[Span, ...]] = []
    for slack in slacks:
        pace_s = found[1] * (1 + slack)
        unlike = {id(cost): cost for cost in costs}
        within_pace = {
            key: np.where(cost <= pace_s, cost, np.inf) for key, cost in unlike.items()
        }
        best = _best([within_pace[id(cost)] for cost in costs], np.add)
        assert best, "the split that set the pace is one of them"
        made.append(best[0])
    return made


def _best(
    costs: Sequence[SpanSeconds], combine: np.ufunc
) -> tuple[tuple[Span, ...], float] | None:
    """The split whose combined cost is least, and that cost; the first of equals."""
    num_layers = costs[0].shape[0]
    # later[stop]: least cost of layers stop.. on the stages after this one.
    later = np.full(num_layers + 1, np.inf)
    later[num_layers] = 0.0
    stops: list[np.ndarray] = []
    whole, firsts = np.empty_like(costs[0]), np.arange(num_layers)
    for cost in reversed(costs):
        combine(cost, later, out=whole)
        stops.append(whole.argmin(axis=1))
        later[:-1] = whole[firsts, stops[-1]]
        later[-1] = np.inf
    if later[0] == np.inf:
        return None
    spans: list[Span] = []
    first = 0
    for stop_of in reversed(stops):
        stop = int(stop_of[first])
        spans.append((first, stop))
        first = stop
    return tuple(spans), float(later[0])
