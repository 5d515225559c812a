"""Sketches of one baseline in, its best plan out: the judge decides.

    sketches -> the best by rough seconds -> fits? estimate -> simulated -> Plan

Sketches of unlike numbers of replicas are kept beside each other: rough seconds are
least sure of what many replicas pay to sum their gradients.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable

from hexijax.cluster import Cluster
from hexijax.plan.checks import check
from hexijax.plan.plan import Plan, PlanError, Prediction
from hexijax.planner.baselines.draft import Composer, Sketch
from hexijax.planner.judge import Judge

BUDGET_SHARES = (1.0, 0.95, 0.88)
"""Of usable memory, tried in turn: sketches promise by a bound, the judge exactly."""

KEPT = 3
"""Sketches of each number of replicas that reach the judge."""

MOST_STAGES = 1500
"""Of all plans together that are estimated; more plans where plans are small."""

MOST_PLAYED = 24_000
"""Instructions that are simulated, roughly, over all finalists. Where not even the
first may be, its estimate stands."""

FINALISTS = 4
"""Plans that are simulated, at most."""


class Finals:
    """Keeps the best sketches of one baseline."""

    def __init__(self, composer: Composer, judge: Judge) -> None:
        self.composer, self._judge = composer, judge
        self._kept: dict[int, list[tuple[float, int, Sketch]]] = {}
        self._order = itertools.count()

    def add(self, sketches: Iterable[Sketch]) -> None:
        """Takes those among the best of their number of replicas."""
        for sketch in sketches:
            heap = self._kept.setdefault(len(sketch.draft.pipelines), [])
            entry = (-sketch.step_s, -next(self._order), sketch)
            best_s = min(self.composer.best_s, sketch.step_s)
            self.composer.best_s = best_s
            if len(heap) < KEPT:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)

    def plan(self) -> Plan | None:
        """The fastest that fits, with its prediction."""
        plans = self._estimated()
        played: list[Plan] = []
        left = MOST_PLAYED
        for plan in plans[:FINALISTS]:
            left -= _num_instructions(plan, self._judge.cluster)
            if left < 0:
                break
            played.append(self._played(plan))
        return min(played or plans[:1], key=_step_s, default=None)

    def _estimated(self) -> list[Plan]:
        """Plans that fit, the best by the later of estimate and sketch first.

        Both are ideal in parts of their own: what one leaves out the other may have.
        """
        sketches = [sketch for heap in self._kept.values() for _, _, sketch in heap]
        sketches.sort(key=lambda sketch: sketch.step_s)
        found: list[tuple[float, Plan]] = []
        left = MOST_STAGES
        for sketch in sketches:
            if left <= 0 and found:
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
            if self._judge.fits(memory_bytes):
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


def _step_s(plan: Plan) -> float:
    assert plan.prediction
    return plan.prediction.step_s


def _num_instructions(plan: Plan, cluster: Cluster) -> int:
    """What the simulator would play, roughly: equal replicas are played once."""
    unlike = {
        (
            replica.microbatches,
            replica.microbatch_size,
            *(
                (cluster.device(s.devices[0]).kind, s.layers, s.lanes, s.tensor)
                for s in replica.stages
            ),
        ): replica
        for replica in plan.replicas
    }
    return 2 * sum(
        len(stage.segments) * (replica.microbatches + len(unlike))
        for replica in unlike.values()
        for stage in replica.stages
    )
