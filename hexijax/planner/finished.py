"""Finished plans of one search: scored layouts made to fit exactly, and simulated.

    Scored -> Finished.fitted -> Plan -> Finished.add -> {Plan: cost}

What a finished plan needs is counted exactly, which the layer-by-layer estimate of the
search is not: less of each device is taken until the plan fits, and state that was left
out of the estimate goes where room is left.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence, Set

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.checks import check_batch, check_layers
from hexijax.plan.meshes import check_meshes, check_tensor_dims
from hexijax.plan.plan import Memory, Plan, PlanError, Schedule, StateShare
from hexijax.planner.effort import FEW
from hexijax.planner.found import Progress
from hexijax.planner.judge import Judge
from hexijax.planner.objective import Objective
from hexijax.planner.options import PlanOptions
from hexijax.planner.score import Scored, Scorer
from hexijax.planner.state import EVEN, state_shares

BUDGET_SHARES = (1.15, 1.0, 0.93, 0.85)
"""Of usable memory, tried in turn."""

STATELESS_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""The same where state is not in the estimate: what is left over is for state."""

SPARE = 1.05
"""More than what was promised too much: boxes are whole rows."""

FILLED = 4
"""Times that state is filled in anew, less where a device was promised too much."""

PRESSED = 0.8
"""Of usable memory: a plan that takes more would perhaps be another with less."""

MISSED = 2
"""Layouts in a row that simulation finds not worth a look before more are given up,
where devices are not few: the formula errs for them all alike."""

SLOWER = 1.03
"""Where fitting made a layout so much slower, others come first."""


class Finished:
    """Finished plans of one search, with what each costs."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        options: PlanOptions,
        *,
        progress: Progress,
        check_time: Callable[[], None],
    ) -> None:
        self.plans: dict[Plan, float] = {}
        self.reasons: list[str] = []
        """Why plans were refused that were to fit."""
        self.judge = Judge(chain, cluster, options)
        self._chain, self._cluster, self._options = chain, cluster, options
        self._progress, self._check_time = progress, check_time
        self._shortest_s = math.inf

    def least(self) -> float:
        """What the best costs; infinite: there is none."""
        return min(self.plans.values(), default=math.inf)

    def best(self) -> list[tuple[float, Plan]]:
        """The plans with their costs, best first."""
        return sorted(
            ((cost, plan) for plan, cost in self.plans.items()),
            key=lambda item: item[0],
        )

    def best_layouts(self, known: Set[Plan] = frozenset()) -> list[tuple[float, Plan]]:
        """The same, one a layout; of few devices one more of each regime. Those that
        are ``known`` are left out."""
        few = len(self._cluster.devices) <= FEW
        found: dict[object, tuple[float, Plan]] = {}
        for cost, plan in self.best():
            if plan in known:
                continue
            key = tuple(
                sorted(tuple(s.devices for s in r.stages) for r in plan.replicas)
            )
            regime = None
            if few and plan.schedule is Schedule.LAYERED:
                regime = any(stage.params for _, stage in plan.stages())
            found.setdefault((key, regime), (cost, plan))
        return [*found.values()]

    def pressed(self, plan: Plan) -> bool:
        """Whether some device is nearly full."""
        return any(
            num_bytes > PRESSED * self._cluster.device(name).usable_memory_bytes
            for name, num_bytes in self.judge.memory_bytes(plan).items()
        )

    def add(self, plan: Plan) -> float | None:
        """Plays a plan; its cost, or None where it does not fit."""
        predicted = self.judge.predicted(plan)
        if predicted is None and _is_filled_in(plan):
            again = self.stored(dataclasses.replace(plan, state=EVEN))
            predicted = again and self.judge.predicted(again)
        if predicted is None or predicted.prediction is None:
            return None
        cost = self.plans[predicted] = self.judge.cost(predicted)
        if self._options.objective is Objective.STEP:
            self._shortest_s = min(self._shortest_s, cost)
        self._progress(f"{len(self.plans)} plans simulated", self._shortest_s)
        return cost

    def fit(self, scored: Scored, scorer: Scorer) -> bool:
        """A layout, fitted exactly and simulated; whether it fits."""
        self._check_time()
        found = self.fitted(scored, scorer)
        return found is not None and self.add(found[1]) is not None

    def fit_best(
        self,
        found: Sequence[tuple[Scored, Scorer]],
        most: int,
        worth: Callable[[float], bool],
    ) -> None:
        """The best of some layouts, each by its scorer, fitted and simulated.

        Args:
          found: in any order.
          most: that are simulated.
          worth: whether a layout of some cost by formula is still worth a look.
        """
        unlike: dict[object, int] = {}
        for i, (scored, scorer) in enumerate(found):
            unlike.setdefault((id(scorer), scorer.form(scored)), i)
        queue = [(found[i][0].cost, i) for i in unlike.values()]
        heapq.heapify(queue)
        fitting: dict[int, Plan] = {}
        missed, bearable = 0, MISSED if len(self._cluster.devices) > FEW else most
        while queue and most and missed < bearable:
            cost, i = heapq.heappop(queue)
            if not worth(cost):
                return
            if i not in fitting:
                self._check_time()
                made = self.fitted(*found[i])
                if made is None:
                    continue
                again, fitting[i] = made
                if again.cost > cost * SLOWER:
                    heapq.heappush(queue, (again.cost, i))
                    continue
            played = self.add(fitting[i])
            if played is not None:
                most -= 1
                missed = 0 if worth(played) else missed + 1

    def fitted(self, scored: Scored, scorer: Scorer) -> tuple[Scored, Plan] | None:
        """The layout made to fit exactly, and its plan."""
        shares = STATELESS_SHARES if scorer.stateless else BUDGET_SHARES
        largest = max(scored.setting.budget_share, *shares)
        for share in dict.fromkeys((largest, *shares)):
            again = scored
            if share != scored.setting.budget_share:
                found = scorer.score(scored.layout, share)
                if found is None:
                    return None
                again = found
            plan = scorer.plan(again)
            try:
                for rule in (
                    check_layers,
                    check_meshes,
                    check_tensor_dims,
                    check_batch,
                ):
                    rule(plan, self._chain, self._cluster)
            except PlanError as error:
                self.reasons.append(str(error))
                return None
            if scorer.stateless:
                stored = self.stored(plan)
                if stored:
                    return again, stored
            elif self.judge.fits(plan):
                return again, plan
            elif full := self.judge.full_host(plan):
                self.reasons.append(full)
        return None

    def stored(self, plan: Plan) -> Plan | None:
        """The plan with its state where there is room; None where there is too little.

        Sums that pass through a home take room of their own, known when it is one.
        """
        usable = {d.name: d.usable_memory_bytes for d in self._cluster.devices}
        used = self.judge.stateless_bytes(plan)
        room = {name: float(usable[name] - used.get(name, 0)) for name in usable}
        for _ in range(FILLED):
            shares = state_shares(
                plan, self._chain, self._cluster, room, moments=self._options.moments
            )
            if shares is None:
                return None
            made = dataclasses.replace(plan, state=shares)
            if self.judge.fits(made):
                return made
            if full := self.judge.full_host(made):
                self.reasons.append(full)
                return None
            promised = self.judge.memory_bytes(made)
            for name, num_bytes in promised.items():
                room[name] -= max(0, num_bytes - usable[name]) * SPARE
        return None


def has_even_state(plan: Plan) -> bool:
    """Whether all state lies in even parts on the devices that compute with it."""
    return not any(share.shares or _is_away(share) for share in plan.state)


def _is_away(share: StateShare) -> bool:
    return Memory.HOST in (share.memory, share.update)


def _is_filled_in(plan: Plan) -> bool:
    """Whether state lies where there was room for it on devices."""
    return not has_even_state(plan) and not any(map(_is_away, plan.state))
