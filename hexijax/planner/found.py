"""What a search gives back, and what it tells on the way."""

import dataclasses
from collections.abc import Callable

from hexijax.plan.plan import Plan

Progress = Callable[[str, float], None]
"""Is told what is done now and the best step so far, in seconds (inf: none yet)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search found."""

    plan: Plan
    """The best, with its prediction."""

    runners_up: tuple[Plan, ...]
    """Of other layouts, best first, with theirs."""

    costs: tuple[float, ...]
    """What the objective counts, of the plan and then of the runners-up."""

    bound_s: float
    """What no plan's step can beat."""

    search_s: float
    """Wall time of the search."""

    layouts: int
    """Scored by formula."""

    played: int
    """Plans simulated."""

    stopped: str = ""
    """Why the search ended before its time, if it did."""
