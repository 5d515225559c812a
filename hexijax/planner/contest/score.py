"""Who wins a contest, and what a series of them comes to."""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hexijax.plan.plan import Plan
from hexijax.planner.baselines import all_baselines
from hexijax.planner.bound import bound_s
from hexijax.planner.contest.draw import Contest
from hexijax.planner.infeasible import InfeasiblePlanError
from hexijax.planner.options import PlanOptions
from hexijax.planner.search import make_plan

GOOD = 0.90
"""Of the bound: a baseline that reaches it leaves little to win."""

GOAL = 1.10
"""Median ratio over the contests whose best baseline is below ``GOOD``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How a contest ended; a step is infinite where no plan was found."""

    contest: Contest
    """What was planned."""

    step_s: float
    """Of our plan."""

    others_s: Mapping[str, float]
    """Of each baseline's best plan."""

    bound_s: float
    """What no plan can beat."""

    search_s: float
    """Our planner's own time."""

    @property
    def best_s(self) -> float:
        """Of the best baseline."""
        return min(self.others_s.values(), default=math.inf)

    @property
    def best(self) -> str:
        """The best baseline's name."""
        return min(self.others_s, key=lambda name: self.others_s[name])

    @property
    def is_void(self) -> bool:
        """Nobody found a plan."""
        return self.best_s == self.step_s == math.inf

    @property
    def ratio(self) -> float:
        """The best baseline's step over ours; infinite where only we have a plan."""
        return self.best_s / self.step_s if self.step_s < math.inf else 0.0

    @property
    def is_open(self) -> bool:
        """The best baseline stays below ``GOOD`` of the bound."""
        return self.bound_s / self.best_s < GOOD

    def to_json(self) -> dict[str, Any]:
        """Plain data; an infinite number is null."""

        def finite(value: float) -> float | None:
            return value if value < math.inf else None

        return {
            "seed": self.contest.seed,
            "number": self.contest.number,
            "what": str(self.contest),
            "devices": len(self.contest.cluster.devices),
            "ratio": finite(self.ratio),
            "step_s": finite(self.step_s),
            "bound_s": self.bound_s,
            "search_s": self.search_s,
            "baselines": {k: finite(v) for k, v in self.others_s.items()},
        }


def match(contest: Contest, options: PlanOptions | None = None) -> Score:
    """Plans as we do and as each baseline does."""
    options = options or PlanOptions()
    begun_s = time.monotonic()
    try:
        ours = make_plan(
            contest.chain,
            contest.cluster,
            batch_size=contest.batch_size,
            dtype=contest.dtype,
            options=options,
        )
    except InfeasiblePlanError:
        ours = None
    search_s = time.monotonic() - begun_s
    others = {
        name: baseline(
            contest.chain,
            contest.cluster,
            batch_size=contest.batch_size,
            dtype=contest.dtype,
            options=options,
        )
        for name, baseline in all_baselines().items()
    }
    return Score(
        contest=contest,
        step_s=_step_s(ours),
        others_s={name: _step_s(plan) for name, plan in others.items()},
        bound_s=bound_s(
            contest.chain,
            contest.cluster,
            batch_size=contest.batch_size,
            dtype=contest.dtype,
        ),
        search_s=search_s,
    )


def _step_s(plan: Plan | None) -> float:
    return plan.prediction.step_s if plan and plan.prediction else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a series of contests comes to; void ones are left out."""

    scores: tuple[Score, ...]
    """At least one."""

    @property
    def deciles(self) -> Sequence[float]:
        """Of the ratio: the least, nine between, the greatest."""
        ratios = sorted(score.ratio for score in self.scores)
        last = len(ratios) - 1
        return [ratios[round(last * k / 10)] for k in range(11)]

    @property
    def open(self) -> Sequence[Score]:
        """Contests in which the best baseline leaves something to win."""
        return [score for score in self.scores if score.is_open]

    @property
    def open_median(self) -> float:
        """Median ratio over the open contests; infinite where there is none."""
        return statistics.median([s.ratio for s in self.open] or [math.inf])

    @property
    def lost(self) -> Sequence[Score]:
        """Contests in which a baseline has the better plan."""
        return [score for score in self.scores if score.ratio < 1 - 1e-9]

    @property
    def is_good(self) -> bool:
        """The goal is met."""
        return not self.lost and self.open_median >= GOAL

    def lines(self) -> list[str]:
        """The report, for people."""
        deciles = "  ".join(f"{ratio:.3f}" for ratio in self.deciles)
        wins: dict[str, int] = {}
        for score in self.scores:
            wins[score.best] = wins.get(score.best, 0) + 1
        by_wins = sorted(wins.items(), key=lambda item: -item[1])
        return [
            f"ratio to the best of {len(self.scores[0].others_s)} baselines, "
            f"{len(self.scores)} contests",
            f"  least, deciles, greatest   {deciles}",
            f"  best baseline below {GOOD:.2f} of the bound in "
            f"{len(self.open) / len(self.scores):.0%}; median ratio there "
            f"{self.open_median:.3f} (goal {GOAL:.2f})",
            f"  lost to a baseline         {len(self.lost)}",
            f"  the best baseline was      "
            f"{', '.join(f'{name} {count}x' for name, count in by_wins)}",
            *(f"  lost: {s.ratio:.4f} number {s.contest.number}, to {s.best}: "
              f"{s.contest}" for s in self.lost),
        ]  # fmt: skip
