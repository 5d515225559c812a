"""The exact choice over prefix and suffix counts.

    Profile -> best_counts -> Scored, with what is proved of it

Layers of one shape differ by their place alone, and what a place is good for is known:
state stays on the device for the first layers, whose gradients come last and whose new
parameters are needed first; what the host updates comes from the last ones. Residuals
that are small stand before those that are large, which are freed as gradients grow. So
a few counts say it all: layers with streamed parameters, with state on the host,
updated there, and where one way of keeping residuals follows another.

All counts are bounded at once, by sums. Some of them get orders: plain ones, those with
the least bounds, and then whatever is one count away from the best and faster. How far
the best may be from the best of all counts is what the least bound says.
"""

import dataclasses
import itertools
import math

from hexijax.planner.offload.bounds import Bounds
from hexijax.planner.offload.budget import BOUNDS, Budget
from hexijax.planner.offload.choice import Choice, Profile
from hexijax.planner.offload.near import Allowed
from hexijax.planner.offload.score import CLOSE, Rules, Scored, scored

MOST_SCORED = 8
"""Counts of the least bounds that get orders, before the best of all are varied."""

CLIMBED, FINALS = 2, 3
"""The best ones, which are varied and which get all orders."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best of all counts."""

    scored: Scored
    """The choice and its step."""
    least_s: float
    """No counts are faster: the least bound of those not looked at, or the step."""
    looked_at: int
    """Counts that got orders."""

    @property
    def gap(self) -> float:
        """By how much the step may be slower than the best of all counts."""
        return self.scored.step_s / min(self.least_s, self.scored.step_s) - 1


def best_counts(
    profile: Profile,
    allowed: Allowed | None = None,
    rules: Rules | None = None,
    *,
    most: int = MOST_SCORED,
    below_s: float = math.inf,
    budget: Budget | None = None,
) -> Best | None:
    """The fastest counts that fit; None where none do, or none is faster than asked.

    Args:
      profile: what is to be placed.
      allowed: what a choice may use.
      rules: what its schedule may do.
      most: counts that get orders.
      below_s: slower ones are not wanted.
      budget: once it is spent, the best so far has to do.
    """
    allowed, rules = allowed or Allowed(), rules or Rules()
    budget = budget or Budget()
    bounds = Bounds(profile, allowed, most)
    search = _Search(profile, rules, below_s, budget)
    for choice in bounds.starts():
        search.look(choice)
    for least_s, choice in itertools.islice(bounds.ranked(), most):
        if least_s < search.step_s * (1 - CLOSE):
            search.look(choice)
    budget.drawn += bounds.number // BOUNDS
    for start in search.good[:CLIMBED]:
        search.climb(start, bounds)
    if not search.good:
        return None
    best = search.final()
    lowest_s = bounds.lowest_s()
    return Best(
        scored=best,
        least_s=best.step_s if best.step_s <= lowest_s * (1 + CLOSE) else lowest_s,
        looked_at=len(search.looked),
    )


class _Search:
    """Choices that were looked at."""

    def __init__(
        self, profile: Profile, rules: Rules, below_s: float, budget: Budget
    ) -> None:
        self._profile, self._rules, self._below_s = profile, rules, below_s
        self._budget = budget
        self.good: list[Scored] = []
        """Best first."""
        self.looked: set[Choice] = set()

    @property
    def step_s(self) -> float:
        """The best so far."""
        return self.good[0].step_s if self.good else self._below_s

    def look(self, choice: Choice) -> Scored | None:
        """Scores a choice that is new and may be faster than the best."""
        if choice in self.looked or (self.good and self._budget.is_spent):
            return None
        self.looked.add(choice)
        found = scored(
            self._profile,
            choice,
            self._rules,
            quick=True,
            below_s=self.step_s,
            budget=self._budget,
        )
        if found:
            self.good.append(found)
            self.good.sort(key=lambda x: x.step_s)
        return found

    def climb(self, start: Scored, bounds: "Bounds") -> None:
        """From counts to faster ones nearby, while there are any."""
        at, improved = start, True
        while improved:
            improved = False
            for choice in bounds.near(at.choice):
                found = self.look(choice)
                if found and found.step_s < at.step_s * (1 - CLOSE):
                    at, improved = found, True
                    break

    def final(self) -> Scored:
        """The best with all its orders, if they may be drawn; of as good as equal ones
        that which moves the least."""
        near = [x for x in self.good if x.step_s <= self.step_s * (1 + CLOSE)]
        plain = sorted(near, key=lambda x: x.moved_s)[:FINALS]
        finals = [
            scored(self._profile, x.choice, self._rules, budget=self._budget)
            for x in plain
            if not self._budget.is_spent
        ]
        every = [x for x in (*finals, *near) if x]
        least_s = min(x.step_s for x in every) * (1 + CLOSE)
        return min(
            (x for x in every if x.step_s <= least_s),
            key=lambda x: (x.moved_s, x.step_s),
        )
