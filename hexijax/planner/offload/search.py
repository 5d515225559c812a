"""The part of a search that uses host memory, and when it is worth it.

    plans that memory presses, layouts that do not fit -> with room for all -> Placer
      -> simulator -> one count away, while that is faster

They are looked at where they would be clearly faster than what fits were memory no
matter, or where nothing fits.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.host_rates import host_side
from hexijax.layers.chain import Chain
from hexijax.plan.meshes import comes_again
from hexijax.plan.plan import Memory, Plan, Schedule, Stage
from hexijax.planner.effort import Effort
from hexijax.planner.judge import Judge
from hexijax.planner.mesh import Layout
from hexijax.planner.objective import Objective
from hexijax.planner.offload.budget import Budget
from hexijax.planner.offload.place import Placer
from hexijax.planner.options import PlanOptions
from hexijax.planner.regime import LAYERED, PLAIN
from hexijax.planner.score import Scorer

ROOMY = 8.0
"""Of usable memory, for a skeleton whose parameters may go to the host as well."""

LAYOUTS = 4
"""That are looked at, most."""

GAIN = 0.03
"""What all the memory that is wanted would save at least, of what fits: a host gives
back but a part of it."""

SIZES = 3
"""Microbatch sizes of a layout, from the fastest by formula to smaller ones."""

VARIED = 16
"""Plans one count away that are simulated, of each layout."""

FEW, CLOSE = 2, 1.05
"""Skeletons whose best plan is varied: so many, if they come so close to the best."""

BRIEF = 8
"""By which a brief search places and varies less."""

BETTER = 1e-3
"""By which a plan is faster than the one it is varied from."""


class Offloading:
    """Looks at layouts of one search."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        options: PlanOptions,
        judge: Judge,
        scorer: Scorer,
        *,
        add: Callable[[Plan], float | None],
        check_time: Callable[[], None],
    ) -> None:
        """``add`` simulates a plan and tells its cost; None: it does not fit."""
        self._options, self._judge = options, judge
        part = BRIEF if options.brief else 1
        self._most, self._varied = Effort.of(cluster).offloaded // part, VARIED // part
        self._add, self._check_time = add, check_time
        self._placer = Placer(chain, cluster, options, judge)
        self._layered_budget, self._plain_budget = Budget(), Budget()
        asked = options.schedule
        self._layered = options.layered and asked in (None, Schedule.LAYERED)
        regimes = [LAYERED] if self._layered else []
        regimes += [PLAIN] if asked is not Schedule.LAYERED else []
        self._scorers = [
            scorer.under(options, stateless=True, regime=regime) for regime in regimes
        ]

    @property
    def reasons(self) -> list[str]:
        """Why stages could not be placed."""
        return self._placer.reasons

    def look(
        self,
        pressed: Sequence[Plan],
        layouts: Sequence[Layout],
        least: float,
        formula: float,
    ) -> None:
        """Plans that use their hosts.

        Args:
          pressed: of those that fit, the best ones whose devices are nearly full.
          layouts: in which nothing fits, best first.
          least: what the best plan costs; infinite: nothing fits.
          formula: what the best layout that fits costs by formula.
        """
        if least < math.inf:
            self._limit()
        most = LAYOUTS * len(self._scorers)  # a layout is there under each regime
        made = dict.fromkeys(x for p in pressed[:most] for x in self._relaxed(p))
        limit = least * (1 - GAIN)
        relaxed = [x for x in made if self._judge.costs_less(x, limit)]
        for skeleton in relaxed:
            least = min(least, self._look([skeleton], least))
        for layout in layouts[:LAYOUTS]:
            # Each regime by itself: what one has found by sums is no bound on another.
            found = [
                self._look(self._skeletons(layout, scorer, formula), least)
                for scorer in self._scorers
            ]
            least = min(least, *found)

    def _look(self, skeletons: Iterable[Plan], least: float) -> float:
        """The least, or what the best of some skeletons costs once it is placed."""
        found: list[tuple[float, Plan]] = []
        for skeleton in skeletons:
            self._check_time()
            known = min([least, *(cost for cost, _ in found)])
            costs: list[tuple[float, Plan]] = []
            for plan in self._placed(skeleton, known):
                cost = self._add(plan)
                if cost is not None:
                    self._limit()
                    costs.append((cost, plan))
            found += [min(costs, key=lambda each: each[0])] if costs else []
        found.sort(key=lambda each: each[0])
        if not found or found[0][0] >= least:
            return least
        for cost, plan in found[:FEW]:
            if cost < found[0][0] * CLOSE:
                self._vary(cost, plan)
        return found[0][0]

    def _relaxed(self, plan: Plan) -> Iterator[Plan]:
        """The plan with all that is wanted kept, whether it fits or not; and layered,
        which leaves more time for what passes."""
        kept = self._options.remat[0]

        def relaxed(stage: Stage) -> Stage:
            return dataclasses.replace(
                stage,
                remat=(kept,) * stage.num_layers,
                params=(),
                waits=(),
                residuals=(),
            )

        replicas = tuple(
            dataclasses.replace(replica, stages=tuple(map(relaxed, replica.stages)))
            for replica in plan.replicas
        )
        made = dataclasses.replace(plan, replicas=replicas, prediction=None)
        if self._options.schedule is not Schedule.LAYERED and not comes_again(plan):
            plain = plan.schedule is Schedule.LAYERED
            usual = Schedule.ONE_F_ONE_B if plain else plan.schedule
            yield dataclasses.replace(made, schedule=usual)
        if self._layered:
            yield dataclasses.replace(made, schedule=Schedule.LAYERED)

    def _skeletons(
        self, layout: Layout, scorer: Scorer, formula: float
    ) -> Iterator[Plan]:
        """The layout with room for all, in microbatches of a few sizes."""
        most: int | None = None
        for _ in range(SIZES):
            scored = scorer.score(layout, ROOMY, most_samples=most)
            if scored is None or scored.cost >= formula * (1 - GAIN):
                return
            yield scorer.plan(scored)
            most = max(each.option.size for each in scored.fitted) // 2
            if not most or any(len(meshes) > 1 for meshes in layout):
                return

    def _placed(self, skeleton: Plan, least: float) -> Iterator[Plan]:
        layered = skeleton.schedule is Schedule.LAYERED
        budget = self._layered_budget if layered else self._plain_budget
        alone = all(len(replica.stages) == 1 for replica in skeleton.replicas)
        by_step = alone and self._options.objective is Objective.STEP
        below_s = least if by_step else math.inf
        by_devices = False
        for plan in self._placer.place(skeleton, below_s, budget):
            by_devices |= all(share.update is Memory.DEVICE for share in plan.state)
            yield plan
        # Updates by hosts are what fits where hardly anything does.
        if not by_devices and layered:
            yield from self._placer.place(_waiting(skeleton), below_s, budget)

    def _limit(self) -> None:
        """Something fits: each regime has its share, and none takes another's."""
        for budget in (self._layered_budget, self._plain_budget):
            budget.most = self._most

    def _vary(self, cost: float, plan: Plan) -> None:
        """From a placed plan to faster ones nearby, while there are any."""
        left, tried, improved = self._varied, {plan}, True
        while improved:
            improved = False
            for other in self._placer.near(plan):
                if other in tried or not self._judge.fits(other):
                    continue
                if not left:
                    return
                left -= 1
                self._check_time()
                tried.add(other)
                found = self._add(other)
                if found is not None and found < cost * (1 - BETTER):
                    cost, plan, improved = found, other, True
                    break


def _waiting(plan: Plan) -> Plan:
    """The plan with borders that wait in host memory."""

    def waits(stage: Stage) -> Stage:
        segments = len(stage.segments)
        return dataclasses.replace(stage, waits=(Memory.HOST,) * segments)

    replicas = tuple(
        dataclasses.replace(replica, stages=tuple(map(waits, replica.stages)))
        for replica in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas)


def may_offload(cluster: Cluster, options: PlanOptions) -> bool:
    """Whether some device has a host whose memory JAX can use."""
    return options.offload and any(
        host_side(cluster, device.name).has_pinned for device in cluster.devices
    )
