"""What a step returns: numbers still being computed, fetched when someone looks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

Sums = Mapping[str, tuple[float, float]]
"""``loss`` and each metric: the sum over samples, and the weight it is divided by."""


def means(sums: Sums) -> dict[str, float]:
    """Each sum over its weight; NaN where nothing has weight."""
    return {k: s / w if w else math.nan for k, (s, w) in sums.items()}


def totals(found: Iterable[Mapping[str, np.ndarray]], weight: float) -> Sums:
    """What microbatches and their lanes found, added up.

    Args:
      found: of each microbatch ``sum``, ``metric:NAME`` and, of a metric with a weight
        of its own, ``metric_weight:NAME``, one a lane.
      weight: of the whole batch.
    """
    added: dict[str, float] = {}
    for scalars in found:
        for name, lanes in scalars.items():
            total = float(np.sum(lanes, dtype=np.float64))
            added[name] = added.get(name, 0.0) + total
    sums = {"loss": (added["sum"], weight)}
    for name, total in added.items():
        if name.startswith("metric:"):
            key = name.removeprefix("metric:")
            sums[key] = (total, added.get(f"metric_weight:{key}", weight))
    return sums


def numbers(sums: Sums, weight: float) -> dict[str, float]:
    """What people read of a step's samples."""
    return {**means(sums), "weight": weight}


def judged(
    *, norm: float, finite: float, scale: float | None, skips: bool
) -> dict[str, float]:
    """What people read of a step's gradient.

    Args:
      norm: of all of it, before clipping.
      finite: whether it is, 1 or 0.
      scale: of a dynamic loss scale; None: there is none.
      skips: whether a step may be left out.
    """
    found = {"grad_norm": norm, "finite": finite}
    if skips:
        found["skipped"] = 1.0 - finite
    if scale is not None:
        found["scale"] = scale
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and metrics of one step, not waited for until ``fetch``."""

    fetch: Callable[[], dict[str, float]]
    """Waits; gives ``loss`` and every metric as means over the global weight,
    ``grad_norm`` before clipping, ``weight``, and ``finite`` as 1 or 0; where steps may
    be left out ``skipped`` as 1 or 0, and a dynamic loss ``scale``, this step's."""

    reads: Any = None
    """A tree of the arrays that it waits for."""


class Numbers(Mapping[str, float]):
    """A step's numbers, waited for when first read, and then kept."""

    def __init__(self, fetch: Callable[[], dict[str, float]]):
        self._fetch: Callable[[], dict[str, float]] | None = fetch
        self._found: dict[str, float] = {}

    def wait(self) -> None:
        """Until the step is computed."""
        if self._fetch is not None:
            self._found = self._fetch()
            self._fetch = None  # it holds what is on the devices

    def __getitem__(self, name: str) -> float:
        self.wait()
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        self.wait()
        return iter(self._found)

    def __len__(self) -> int:
        self.wait()
        return len(self._found)

    def __repr__(self) -> str:
        return repr(dict(self))
