"""From scored layouts to the plan: simulated, and improved.

    [Scored, ...] -> plans that fit -> simulator -> recut, smaller microbatches, other
      schedules, variants of the best -> simulator -> the same with state where there
      is room -> {Plan: cost}

Every pass starts from the best plans so far and may only add to them. Plans of even
state are improved to their end before others are looked at, with effort of their own:
what more may be chosen from never makes a plan slower.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.meshes import comes_again
from hexijax.plan.plan import Plan, Schedule
from hexijax.planner.effort import FEW, LONGEST, Effort, num_instructions
from hexijax.planner.finished import SLOWER, Finished
from hexijax.planner.found import Progress
from hexijax.planner.mesh import Layout, Mesh, MeshMaker
from hexijax.planner.offload.search import Offloading, may_offload
from hexijax.planner.options import PlanOptions
from hexijax.planner.refine import variants
from hexijax.planner.regime import MINISTAGES, SINGLE, Regime
from hexijax.planner.score import Scored, Scorer
from hexijax.planner.state import weighted_shares

PLAYED_WITHIN = 1.1
"""Layouts that are this much slower by formula than the best plan by simulation are
still played, and pipelines that much slower by simulation under other schedules: the
formula errs so."""

IMPROVED_WITHIN = 1.6
"""Plans this much slower than the best are still improved."""

RESCORED = 16
"""Layouts that are scored under eager 1F1B too, those that seem best under it: of all
that gain, and of those that gain much."""

WORTH = 0.01
"""Less is no reason to play another schedule."""

HOPE, MUCH = 0.001, 0.05
"""Gains that are a reason to split layers anew for it; much is one to simulate what
takes long."""

NOTABLE = 0.05
"""Of a step, what gradients and new parameters take beside compute."""

NEARLY = 1.05
"""As far from the best, regimes of few devices are simulated: the formula errs so; and
plans of uneven state improved."""

LEANED = 2
"""Best layouts whose state may lean."""

LEANINGS = (0.0, 1 / 3)
"""Weights of the replicas that hold less state than those of one form."""

LEAST = 6
"""Layouts that are simulated however long they are."""

SAME_FAMILY = 0.03
"""What a layout counts as slower for each better one of its family."""


class Finisher:
    """Finished plans of one search, with what each costs."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        scorer: Scorer,
        maker: MeshMaker,
        options: PlanOptions,
        *,
        progress: Progress,
        check_time: Callable[[], None],
    ) -> None:
        self._chain, self._cluster = chain, cluster
        self._scorer, self._maker, self._options = scorer, maker, options
        self._check_time = check_time
        self.finished = Finished(
            chain, cluster, options, progress=progress, check_time=check_time
        )
        self._effort = Effort.of(cluster)
        few = len(cluster.devices) <= FEW
        self._within = IMPROVED_WITHIN if few else PLAYED_WITHIN
        self._tried: set[Plan] = set()
        self._regimes: dict[tuple[Regime, bool], Scorer] = {}

    def finish(self, scored: Sequence[Scored], refused: Sequence[Layout] = ()) -> None:
        """Plays the best layouts and improves the best plans; ``finished`` grows.

        Args:
          scored: best first.
          refused: layouts in whose devices even parts of state do not fit, best first.
        """
        near = math.inf if len(self._cluster.devices) <= FEW else NEARLY
        self.play(scored)
        self._layer(scored, refused)
        played = self.finished.least()
        self._improve(scored, set())
        known, least = set(self.finished.plans), self.finished.least()
        if not self._options.even_state:
            self._lean()
            self._store(refused, played)
        if may_offload(self._cluster, self._options):
            stored, before = set(self.finished.plans), self.finished.least()
            self._offload(scored, refused)
            if self.finished.least() >= before:  # none of those is worth improving
                known |= set(self.finished.plans) - stored
        self._improve_others(known, least * near)

    def look_at(self, scored: Sequence[Scored]) -> None:
        """Plays more layouts beside those that are finished, and improves the best of
        them; with effort of their own, they take no other's place."""
        known = set(self.finished.plans)
        self.play(scored)
        self._improve_others(known, self.finished.least() * self._within)
        if not self._options.even_state:
            self._lean()

    def is_near(self, cost: float) -> bool:
        """Whether what costs so much by formula is worth a look."""
        return cost <= self.finished.least() * self._within

    def _improve_others(self, known: Set[Plan], most: float) -> None:
        """Plans that are not known, where one of them costs less than that."""
        others = [cost for p, cost in self.finished.plans.items() if p not in known]
        if min(others, default=math.inf) < most:
            self._improve((), known)

    def _improve(self, scored: Sequence[Scored], known: Set[Plan]) -> None:
        """What makes the best plans better, those that are ``known`` left out."""
        self._recut(known)
        self._shrink(known)
        if self._options.schedule is None:
            self._reschedule(known)
            self._reorder(scored)
        self._refine(known)

    def play(self, scored: Sequence[Scored], *, first_only: bool = False) -> None:
        """The best layouts as plans that fit, simulated.

        Of those that take longer than anything is worth one is, where all do.
        """
        left = self._effort.played
        order = [*scored]
        if len(self._cluster.devices) > FEW:
            forms: dict[object, Scored] = {}
            for each in order:
                forms.setdefault(self._scorer.form(each), each)
            order = _diverse(forms.values())
        queue = [(each.cost, i) for i, each in enumerate(order)]
        fitting: dict[int, Plan] = {}
        long: list[Plan] = []
        while queue and (self.finished.plans or len(long) < LEAST):
            cost, i = heapq.heappop(queue)
            count = len(self.finished.plans)
            spent = left <= 0 and count >= LEAST
            late = cost > self.finished.least() * self._within
            if late or spent or (count and first_only):
                break
            if i not in fitting:
                found = self.finished.fitted(order[i], self._scorer)
                if found is None:
                    continue
                again, fitting[i] = found
                if again.cost > cost * SLOWER:  # others come first now
                    heapq.heappush(queue, (again.cost, i))
                    continue
            instructions = num_instructions(fitting[i])
            if instructions > LONGEST and not first_only:
                long.append(fitting[i])
                continue
            left -= instructions
            if self._may_improve(fitting[i]):
                self.finished.add(fitting[i])
            if not first_only:
                self._check_time()
        if long and not self.finished.plans:
            self.finished.add(min(long, key=num_instructions))

    def _may_improve(self, plan: Plan) -> bool:
        """Whether it can be one of the best layouts, those that are improved."""
        if len(self._cluster.devices) <= FEW:
            return True
        best = self.finished.best_layouts()[: self._effort.walked]
        return len(best) < self._effort.walked or (
            self.finished.judge.floor(plan) < best[-1][0]
        )

    def _shrink(self, known: Set[Plan]) -> None:
        """The best pipelines with smaller microbatches, their layers split anew.

        The formula knows less of messages than the simulator, and smaller ones fill
        and drain a pipeline sooner.
        """
        for plan in self._pipelines(known):
            largest = max(replica.microbatch_size for replica in plan.replicas)
            for most in (largest // 2, largest // 4):
                if most:
                    self._again(plan, self._scorer, most_samples=most)

    def _recut(self, known: Set[Plan]) -> None:
        """The best pipelines that memory presses, layer by layer in segments.

        Those hold fewer gradients at once, so that layers can go where the speed is;
        the formula looks at them only where nothing else fits.
        """
        if self._options.layers_per_segment is not None:
            return
        scorer = self._scorer.under(
            dataclasses.replace(self._options, layers_per_segment=1)
        )
        for plan in self._pipelines(known):
            if self.finished.pressed(plan):
                self._again(plan, scorer)

    def _store(self, refused: Sequence[Layout], played: float) -> None:
        """Layouts that state presses, with state where there is room for it.

        Not where nothing is short of room: even parts travel fastest. ``played`` is
        what the best cost before it was improved, as these are not either.
        """
        scorer = self._scorer.under(self._options, stateless=True)
        layouts = self._short(refused)
        found = [
            (x, scorer) for layout in layouts for x in self._scores(layout, scorer)
        ]
        self.finished.fit_best(
            found, self._effort.stored, lambda cost: cost < played * (1 - WORTH)
        )
        self._fit_layered(layouts, played, stateless=True)

    def _lean(self) -> None:
        """The best layouts with more of their state, or all, with one kind of replicas.

        Where sums are a notable part of the step, of unlike links and cards: what holds
        the state takes in gradients and gives out parameters, and updates.
        """
        for _, plan in self.finished.best_layouts()[:LEANED]:
            scored = self._scorer.score(self._layout(plan))
            if scored is None or scored.late_s <= NOTABLE * scored.step_s:
                continue
            for weights in _leanings(plan):
                self._check_time()
                state = weighted_shares(plan, self._chain, weights)
                made = dataclasses.replace(plan, state=state, prediction=None)
                if self.finished.judge.fits(made):
                    self.finished.add(made)

    def _layer(self, scored: Sequence[Scored], refused: Sequence[Layout]) -> None:
        """Layouts under regimes that ask less of memory and of ways.

        Where memory presses, where nothing fitted, and where gradients on their way are
        a notable part of the step.
        """
        layouts = dict.fromkeys(self._short(refused), True)
        for late in self._late(scored):
            layouts.setdefault(late, False)
        self._fit_layered(layouts, self.finished.least(), stateless=False)

    def _fit_layered(
        self, layouts: Mapping[Layout, bool], best: float, *, stateless: bool
    ) -> None:
        """The best few of some layouts under those regimes; what memory presses, which
        is said of each, under all of them."""
        if not self._options.layered or self._options.schedule not in (
            None,
            Schedule.LAYERED,
        ):
            return
        found: list[tuple[Scored, Scorer]] = []
        for layout, short in layouts.items():
            single = all(len(meshes) == 1 for meshes in layout)
            regimes = SINGLE if single else MINISTAGES
            for regime in regimes if short else regimes[:2]:
                scorer = self._regime(regime, stateless=stateless)
                found += [(x, scorer) for x in self._scores(layout, scorer)]
        few = len(self._cluster.devices) <= FEW
        near = NEARLY if few else 1 - WORTH
        self.finished.fit_best(
            found, self._effort.stored, lambda cost: cost <= best * near
        )

    def _short(self, refused: Sequence[Layout]) -> dict[Layout, bool]:
        """The best layouts that memory presses, and those in which nothing fits."""
        best = self.finished.best_layouts()[: self._effort.stored]
        pressed = [self._layout(x) for _, x in best if self.finished.pressed(x)]
        return dict.fromkeys([*pressed, *refused], True)

    def _scores(self, layout: Layout, scorer: Scorer) -> Iterator[Scored]:
        """The layout by a scorer, where it can be."""
        self._check_time()
        scored = scorer.score(layout)
        if scored:
            yield scored

    def _late(self, scored: Sequence[Scored]) -> list[Layout]:
        """The best layouts of whose step sums are a notable part, and that would be
        faster than the best without them."""
        hopeful = [
            x.layout
            for x in scored
            if x.late_s > NOTABLE * x.step_s
            and x.cost * (1 - x.late_s / x.step_s) < scored[0].cost * (1 - WORTH)
        ]
        return hopeful[: self._effort.stored]

    def _offload(self, scored: Sequence[Scored], refused: Sequence[Layout]) -> None:
        """Layouts that memory presses, and those that do not fit, with what is best in
        host memory there."""
        offloading = Offloading(
            self._chain,
            self._cluster,
            self._options,
            self.finished.judge,
            self._scorer,
            add=self.finished.add,
            check_time=self._check_time,
        )
        least, fits = self.finished.least(), bool(self.finished.plans)
        near = [] if fits else [each.layout for each in scored[: self._effort.stored]]
        best = self.finished.best_layouts()
        offloading.look(
            [plan for _, plan in best if self.finished.pressed(plan)],
            [*dict.fromkeys([*refused, *near])],
            least,
            scored[0].cost if scored and fits else least,
        )
        self.finished.reasons += offloading.reasons

    def _regime(self, regime: Regime, *, stateless: bool) -> Scorer:
        key = (regime, stateless)
        if key not in self._regimes:
            self._regimes[key] = self._scorer.under(
                self._options, stateless=stateless, regime=regime
            )
        return self._regimes[key]

    def _reschedule(self, known: Set[Plan]) -> None:
        """The best pipelines under the other schedules."""
        interleaved = self._under(Schedule.INTERLEAVED)
        for plan in self._pipelines(known):
            for schedule in (Schedule.ZERO_BUBBLE, Schedule.EAGER):
                self._check_time()
                self.finished.add(dataclasses.replace(plan, schedule=schedule))
            self._again(plan, interleaved)

    def _reorder(self, scored: Sequence[Scored]) -> None:
        """Pipelines that another schedule makes good ones, the best few of them.

        Long ones with slow borders are far behind under 1F1B.
        """
        eager = self._under(Schedule.EAGER)
        within = self.finished.least() * self._within
        scored = [x for x in scored if any(len(meshes) > 1 for meshes in x.layout)]
        costs = [self._scorer.early_cost(plain) for plain in scored]
        tried: set[int] = set()
        for gain in (HOPE, MUCH):  # memory may take back what seems little
            hopeful = (
                (cost, i)
                for i, (cost, plain) in enumerate(zip(costs, scored, strict=True))
                if cost < min(plain.cost * (1 - gain), within)
            )
            tried.update(i for _, i in heapq.nsmallest(RESCORED, hopeful))
        found: dict[object, Scored] = {}
        for i in sorted(tried):
            self._check_time()
            early = eager.score(scored[i].layout)
            if early and early.cost < scored[i].cost * (1 - WORTH):
                found.setdefault(eager.form(early), early)
        for early in sorted(found.values(), key=lambda x: x.cost)[
            : self._effort.reordered
        ]:
            self._fit(early, eager)

    def _refine(self, known: Set[Plan]) -> None:
        """Walks over variants of the best few layouts while they are faster."""
        best = self.finished.best_layouts(known)[: self._effort.walked]
        left = self._effort.refined
        tried = self._tried
        tried.update(
            dataclasses.replace(plan, prediction=None) for plan in self.finished.plans
        )
        for i, (cost, start) in enumerate(best):
            if cost > self.finished.least() * IMPROVED_WITHIN:
                return
            share = left // min(2, len(best) - i)
            least = 0 if i else self._effort.varied
            left -= share - self._refine_one(start, cost, share, least, tried)

    def _refine_one(
        self, start: Plan, cost: float, budget: int, least: int, tried: set[Plan]
    ) -> int:
        """Walks from one plan; returns what is left of its budget."""
        best, least_cost, at = start, cost, 0
        improved = True
        while improved:
            improved = False
            plain = dataclasses.replace(best, prediction=None)
            made = functools.partial(variants, plain, self._options)
            for i, plan in _from(at, made):
                if plan in tried or not self._valid(plan):
                    continue
                if budget <= 0 and least <= 0:
                    return 0
                least -= 1
                self._check_time()
                tried.add(plan)
                turns = plan.schedule is not best.schedule
                # What turns layered is free: it would shorten the other walks.
                if not (turns and plan.schedule is Schedule.LAYERED):
                    budget -= num_instructions(plan)
                if self.finished.judge.floor(plan) >= least_cost:
                    continue  # it counts all the same: effort is bounded by it
                found = self.finished.add(plan)
                if found is not None and found < least_cost * (1 - 1e-9):
                    best, least_cost, at, improved = plan, found, i, True
                    break
        return budget

    # What the passes share.

    def _under(self, schedule: Schedule) -> Scorer:
        return self._scorer.under(dataclasses.replace(self._options, schedule=schedule))

    def _pipelines(self, known: Set[Plan]) -> list[Plan]:
        """The best plans that have several stages in a replica, and are not known; not
        those of which devices hold several, which ask for their own schedule."""
        within = self.finished.least() * self._within
        long = [
            plan
            for cost, plan in self.finished.best()
            if cost <= within
            and plan not in known
            and any(len(replica.stages) > 1 for replica in plan.replicas)
            and not comes_again(plan)
        ]
        return long[: self._effort.rescheduled]

    def _again(
        self, plan: Plan, scorer: Scorer, most_samples: int | None = None
    ) -> None:
        """A plan's layout, decided anew by another scorer, fitted and simulated."""
        self._check_time()
        scored = scorer.score(self._layout(plan), most_samples=most_samples)
        if scored:
            self._fit(scored, scorer)

    def _fit(self, scored: Scored, scorer: Scorer) -> None:
        """A layout, fitted exactly and simulated; where that takes long, only if by
        formula it is much faster than the best."""
        self._check_time()
        found = self.finished.fitted(scored, scorer)
        if found is None:
            return
        again, plan = found
        is_short = num_instructions(plan) <= self._effort.remade
        is_hopeful = again.cost < self.finished.least() * (1 - MUCH)
        if (is_short or is_hopeful) and self._may_improve(plan):
            self.finished.add(plan)

    def _layout(self, plan: Plan) -> Layout:
        return tuple(
            tuple(self._maker.mesh(s.devices, s.tensor) for s in replica.stages)
            for replica in plan.replicas
        )

    def _valid(self, plan: Plan) -> bool:
        """Whether microbatches hold all samples, and no padding where none may be."""
        for replica in plan.replicas:
            room = replica.microbatches * replica.microbatch_size
            least = room if self._options.per_microbatch else 1
            if not least <= replica.samples <= room:
                return False
        return True


def _leanings(plan: Plan) -> Iterator[list[float]]:
    """Weights of replicas: one form's state in its place, thrice its part, or all."""
    forms = [
        tuple((s.dtype, s.tensor, s.lanes, s.num_layers) for s in replica.stages)
        for replica in plan.replicas
    ]
    unlike = dict.fromkeys(forms)
    if len(unlike) < 2:
        return
    for form, others in itertools.product(unlike, LEANINGS):
        yield [1.0 if each == form else others for each in forms]


def _diverse(found: Iterable[Scored]) -> list[Scored]:
    """Best first, but not all of one family: the formula errs for all of them alike.

    A family divides the devices over replicas alike, whatever their meshes.
    """
    ranks: dict[object, int] = {}
    keys: list[tuple[float, int]] = []
    order = list(found)
    for i, scored in enumerate(order):
        family = tuple(
            sorted(
                tuple(sorted(collections.Counter(_kinds(meshes)).items()))
                for meshes in scored.layout
            )
        )
        rank = ranks[family] = ranks.get(family, -1) + 1
        keys.append((scored.cost * (1 + SAME_FAMILY * rank), i))
    return [order[i] for _, i in sorted(keys)]


def _kinds(meshes: Iterable[Mesh]) -> Iterator[str]:
    for mesh in meshes:
        yield from [mesh.shape.profile.kind] * mesh.shape.num_devices


def _from(at: int, made: Callable[[], Iterator[Plan]]) -> Iterator[tuple[int, Plan]]:
    """All that is made, numbered, from one number on and then those before it.

    What was worth changing once is often worth more, and what was not is tried last.
    """
    yield from itertools.islice(enumerate(made()), at, None)
    yield from itertools.islice(enumerate(made()), at)
