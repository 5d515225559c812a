"""What a step returns: numbers still being computed, fetched when someone looks."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and metrics of one step, not waited for until ``fetch``."""

    fetch: Callable[[], dict[str, float]]
    """Waits; gives ``loss`` and every metric as means over the global weight,
    ``grad_norm`` before clipping, ``weight``, and ``finite`` as 1 or 0."""
