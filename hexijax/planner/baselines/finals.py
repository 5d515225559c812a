"""Sketches of one baseline in, its best plan out: the judge decides.

    sketches -> the best by rough seconds -> fits? estimate -> simulated -> Plan

Sketches of unlike numbers of replicas are kept beside each other: rough seconds are
least sure of what many replicas pay to sum their gradients.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable

from hexijax.plan.checks import check
from hexijax.plan.plan import Plan, PlanError, Prediction
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.sketches import Sketch
from hexijax.planner.effort import num_instructions
from hexijax.planner.judge import Judge

BUDGET_SHARES = (1.0, 0.95, 0.88)
"""Of usable memory, tried in turn: sketches promise by a bound, the judge exactly."""

KEPT = 8
"""Sketches of each number of replicas that reach the judge."""

WORTH = 1.25
"""Of the best sketch's seconds: one beyond is not written down."""

MOST_STAGES = 1000
"""Of all plans together that are estimated; more plans where plans are small."""

MOST_PLAYED = 32_000
"""Instructions that are simulated, roughly, over all finalists; the first always is."""

FINALISTS = 4
"""Plans that are simulated, at most."""


class Finals:
    """Keeps the best sketches of one baseline."""

    def __init__(self, composer: Composer, judge: Judge) -> None:
        self.composer, self._judge = composer, judge
        self._kept: dict[int, list[tuple[float, int, Sketch]]] = {}
        self._order = itertools.count()
        self._seen: set[object] = set()

    def add(self, sketches: Iterable[Sketch]) -> None:
        """Takes those among the best of their number of replicas."""
        for sketch in sketches:
            alike = (sketch.step_s, sketch.draft.rules, sketch.size, sketch.per_segment)
            if alike in self._seen:
                continue
            self._seen.add(alike)
            heap = self._kept.setdefault(len(sketch.draft.pipelines), [])
            entry = (-sketch.step_s, -next(self._order), sketch)
            self.composer.take(sketch.step_s)
            if len(heap) < KEPT:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)

    def plan(self) -> Plan | None:
        """The fastest that fits, with its prediction."""
        plans = self._estimated()
        played: list[Plan] = []
        left = MOST_PLAYED
        for plan in _unlike(plans):
            cost = num_instructions(plan)
            if (cost <= left or not played) and len(played) < FINALISTS:
                left -= cost
                played.append(self._played(plan))
        return min(played, key=_step_s, default=None)

    def _estimated(self) -> list[Plan]:
        """Plans that fit, the best by the later of estimate and sketch first.

        Both are ideal in parts of their own: what one leaves out the other may have.
        """
        sketches = [sketch for heap in self._kept.values() for _, _, sketch in heap]
        sketches.sort(key=lambda sketch: sketch.step_s)
        found: list[tuple[float, Plan]] = []
        left = MOST_STAGES
        for sketch in sketches:
            too_slow = sketch.step_s > WORTH * sketches[0].step_s
            if (left <= 0 or too_slow) and found:
                break
            left -= sum(map(len, sketch.draft.pipelines))
            for one in self._segmented(sketch):
                plan = self._fitting(one)
                if plan:
                    found.append((max(_step_s(plan), sketch.step_s), plan))
        return [plan for _, plan in sorted(found, key=lambda pair: pair[0])]

    def _segmented(self, sketch: Sketch) -> list[Sketch]:
        """The sketch, and with whole stages as segments, which cost fewer calls."""
        whole = dataclasses.replace(sketch, per_segment=None)
        asked = self.composer.options.layers_per_segment
        return [sketch] if asked or sketch == whole else [sketch, whole]

    def _fitting(self, sketch: Sketch) -> Plan | None:
        for share in BUDGET_SHARES:
            plan = self.composer.plan(sketch, share)
            if plan is None:
                return None
            memory_bytes = self._judge.memory_bytes(plan)
            if self._judge.fits(plan):
                prediction = Prediction(
                    step_s=self._judge.estimate_s(plan), memory_bytes=memory_bytes
                )
                plan = dataclasses.replace(plan, prediction=prediction)
                try:
                    check(plan, self._judge.chain, self._judge.cluster)
                except PlanError:
                    return None
                return plan
        return None

    def _played(self, plan: Plan) -> Plan:
        assert plan.prediction
        prediction = dataclasses.replace(
            plan.prediction, step_s=self._judge.step_s(plan)
        )
        return dataclasses.replace(plan, prediction=prediction)


def _unlike(plans: Iterable[Plan]) -> list[Plan]:
    """The first of those that differ in the names of devices alone."""
    found: dict[object, Plan] = {}
    for plan in plans:
        forms = sorted(
            (
                replica.samples,
                replica.microbatch_size,
                tuple(
                    (s.layers, s.lanes, s.tensor, s.segments) for s in replica.stages
                ),
            )
            for replica in plan.replicas
        )
        state = any(share.shares for share in plan.state)
        found.setdefault((_step_s(plan), state, str(forms)), plan)
    return list(found.values())


def _step_s(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_s
