"""What a step returns: numbers still being computed, fetched when someone looks."""

import dataclasses
import math
from collections.abc import Callable, Mapping

Sums = Mapping[str, tuple[float, float]]
"""``loss`` and each metric: the sum over samples, and the weight it is divided by."""


def means(sums: Sums) -> dict[str, float]:
    """Each sum over its weight; NaN where nothing has weight."""
    return {k: s / w if w else math.nan for k, (s, w) in sums.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and metrics of one step, not waited for until ``fetch``."""

    fetch: Callable[[], dict[str, float]]
    """Waits; gives ``loss`` and every metric as means over the global weight,
    ``grad_norm`` before clipping, ``weight``, and ``finite`` as 1 or 0."""
