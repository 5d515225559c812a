"""The search for a plan: thousands of layouts by formula, the best few by simulation.

    seeds (rules, mixtures, all of few devices) -> local search -> Scored, best first
      -> plans that fit -> simulator -> variants of the winner -> simulator -> Plan

Layouts are searched; what follows each is exact under the formula: layers, remat and
microbatch counts. Effort is counted, never timed: equal input, equal plan, unless
``seconds`` is given.
"""

import collections
import dataclasses
import functools
import heapq
import math
import time
from collections.abc import Iterable, Iterator

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.checks import check_batch, check_layers
from hexijax.plan.meshes import check_meshes, check_tensor_dims
from hexijax.plan.plan import Plan, PlanError, Schedule
from hexijax.planner.bound import bound_s, sizes_up_to
from hexijax.planner.effort import FEW, Effort, num_instructions
from hexijax.planner.exhaustive import every_layout
from hexijax.planner.families import families, spread
from hexijax.planner.forms import Forms
from hexijax.planner.found import Found, Progress
from hexijax.planner.grouping import layouts
from hexijax.planner.infeasible import InfeasiblePlanError, explain_infeasible
from hexijax.planner.judge import Judge
from hexijax.planner.mesh import Layout, Mesh, MeshMaker, fitting_degrees
from hexijax.planner.mixtures import Mixtures
from hexijax.planner.moves import neighbours, same_but_names
from hexijax.planner.objective import Objective
from hexijax.planner.options import Grouping, PlanOptions
from hexijax.planner.parts import Known, cheapest
from hexijax.planner.refine import variants
from hexijax.planner.score import Scored, Scorer
from hexijax.planner.segments import layers_per_segment

STARTS = 4
"""Layouts from which local search walks."""

BUDGET_SHARES = (1.15, 1.0, 0.93, 0.85)
"""Of usable memory, tried in turn: a finished plan is counted exactly, which the
layer-by-layer estimate inside the search is not."""

PLAYED_WITHIN = 1.6
"""Layouts this much slower than the best, by formula, are still played."""

HOPELESS = 1.2
"""Layouts whose devices alone need so much longer than the best, links and memory left
out, are not scored."""

RESCHEDULED = 2
"""Pipelines that are tried under other schedules, the best of the played."""

RESCORED = 128
"""Layouts that are scored under eager 1F1B too, the best by formula."""

REORDERED = 4
"""Of those it makes faster, the best that are played."""

WORTH = 0.01
"""Less is no reason to play another schedule."""

PRESSED = 0.8
"""Of usable memory: a plan that takes more would perhaps be another with less."""

LEAST = 8
"""Layouts, and variants of the best, that are simulated however long they are."""

SAME_FAMILY = 0.03
"""What a layout counts as slower for each better one of its family."""


OPTIMISTIC = 1.25
"""Of the budget, where the layer-by-layer bound of memory finds no room: the finished
plan is counted exactly."""


def make_plan(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str = "float32",
    options: PlanOptions | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan the search finds, with its predicted time and memory.

    Args:
      chain: the model.
      cluster: the devices.
      batch_size: samples of one optimizer step, exact.
      dtype: compute dtype; a kind that lacks it computes in the next it has.
      options: what else is asked for.
      progress: is told how far the search is.

    Raises:
      InfeasiblePlanError: the model fits nowhere, or not as asked.
      PlanError: something asked for is unknown or contradicts itself.
    """
    return search(
        chain,
        cluster,
        batch_size=batch_size,
        dtype=dtype,
        options=options,
        progress=progress,
    ).plan


def search(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str = "float32",
    options: PlanOptions | None = None,
    progress: Progress | None = None,
    known: Known | None = None,
) -> Found:
    """As ``make_plan``, with the runners-up and how hard it was.

    ``known`` holds what searches of the same problem found on parts of its cluster.
    """
    options = options or PlanOptions()
    check_request(chain, batch_size, options)

    def search_one(part: Cluster, options: PlanOptions) -> Found:
        return _Search(chain, part, batch_size, dtype, options, progress).run()

    whole = options.use_all_devices or options.grouping is not Grouping.AUTO
    if options.objective is Objective.STEP or whole:
        return search_one(cluster, options)
    return cheapest(
        search_one,
        chain,
        cluster,
        batch_size=batch_size,
        dtype=dtype,
        options=options,
        known=known,
    )


def check_request(chain: Chain, batch_size: int, options: PlanOptions) -> None:
    """Refuses what no plan can fulfil."""
    if batch_size < 1:
        raise PlanError(
            f"A global batch of {batch_size} was asked for; it is at least 1."
        )
    cap = options.max_microbatch_size
    if cap is not None and cap < 1:
        raise PlanError(f"max_microbatch_size is {cap}; a microbatch is at least 1.")
    for split in options.layers_per_stage or ():
        if sum(split) != len(chain.layers) or min(split, default=0) < 1:
            raise PlanError(
                f"The split {'+'.join(map(str, split))} was asked for: {sum(split)} "
                f"layers, and {chain.name} has {len(chain.layers)}. Stages have at "
                "least one layer each and hold every layer once: make the split sum to "
                f"{len(chain.layers)}."
            )


class _OutOfTimeError(Exception):
    """The seconds asked for have passed."""


class _Search:
    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        batch_size: int,
        dtype: str,
        options: PlanOptions,
        progress: Progress | None,
    ) -> None:
        self._begun_s = time.monotonic()
        self._chain, self._cluster = chain, cluster
        self._batch_size, self._dtype = batch_size, dtype
        self._degrees = fitting_degrees(chain, options.tensor_degrees)
        self._options = dataclasses.replace(options, tensor_degrees=self._degrees)
        self._progress = progress or (lambda text, best_s: None)
        self._maker = MeshMaker(cluster, dtype)
        self._scorer = Scorer(chain, cluster, batch_size, options)
        self._judge = Judge(chain, cluster, options)
        self._effort = Effort.of(len(cluster.devices))
        self._scored: dict[Layout, Scored] = {}
        self._least = math.inf
        self._sizes = sizes_up_to(batch_size)
        self._finished: dict[Plan, float] = {}
        self._shortest_s = math.inf
        self._reasons: list[str] = []

    def run(self) -> Found:
        stopped = ""
        bound = bound_s(
            self._chain,
            self._cluster,
            batch_size=self._batch_size,
            dtype=self._dtype,
        )
        try:
            self._score_all(self._seeds(bound))
            self._walk()
            self._play()
            self._recut()
            self._shrink()
            self._reschedule()
            self._refine()
        except KeyboardInterrupt:
            stopped = "interrupted"
        except _OutOfTimeError:
            stopped = f"{self._options.seconds:g} s were asked for"
        if stopped and not self._finished:
            self._play(first_only=True)
        best = self._best()
        return Found(
            plan=best[0][1],
            runners_up=tuple(plan for _, plan in best[1:4]),
            costs=tuple(cost for cost, _ in best[:4]),
            bound_s=bound,
            search_s=time.monotonic() - self._begun_s,
            layouts=self._scorer.count,
            played=len(self._finished),
            stopped=stopped,
        )

    def _best(self) -> list[tuple[float, Plan]]:
        """Finished plans with their costs, best first, one a layout."""
        if not self._finished:
            raise InfeasiblePlanError(
                explain_infeasible(
                    self._chain,
                    self._cluster,
                    self._batch_size,
                    self._dtype,
                    self._options,
                    self._reasons,
                )
            )
        found: dict[object, tuple[float, Plan]] = {}
        for plan, cost in sorted(self._finished.items(), key=lambda item: item[1]):
            key = tuple(tuple(s.devices for s in r.stages) for r in plan.replicas)
            found.setdefault(key, (cost, plan))
        marks = {
            "chain": self._chain.fingerprint(),
            "cluster": self._cluster.fingerprint(),
            "objective": self._options.objective.value,
        }
        return [(c, dataclasses.replace(p, **marks)) for c, p in found.values()]

    def _check_time(self) -> None:
        seconds = self._options.seconds
        if seconds is not None and time.monotonic() - self._begun_s > seconds:
            raise _OutOfTimeError

    # Layouts, by formula.

    def _seeds(self, bound: float) -> Iterator[Layout]:
        options = self._options
        for _, layout in layouts(self._cluster, self._maker, options):
            yield layout
        if options.grouping is not Grouping.AUTO:
            return
        if len(self._cluster.devices) <= FEW:
            yield from every_layout(
                self._cluster,
                self._maker,
                self._degrees,
                use_all=options.use_all_devices,
            )
            return
        forms = functools.partial(
            Forms,
            self._cluster,
            self._maker,
            self._scorer.fitter,
            degrees=self._degrees,
            sizes=self._sizes,
        )
        mixtures = functools.partial(
            Mixtures,
            fitter=self._scorer.fitter,
            degrees=self._degrees,
            num_layers=len(self._chain.layers),
            batch_size=self._batch_size,
        )
        per_segment = layers_per_segment(2, options.layers_per_segment)
        every = forms()
        mixed = mixtures(every, use_all=options.use_all_devices)
        yield from mixed.layouts(per_segment, bound)
        if not options.use_all_devices:
            yield from families(every, self._cost)
        yield from spread(every, self._degrees, len(self._chain.layers), self._cost)
        kinds = dict.fromkeys(device.kind for device in self._cluster.devices)
        if len(kinds) == 1 or options.use_all_devices:
            return
        for kind in kinds:  # where mixing does not pay, by themselves
            alone_s = bound_s(
                self._chain,
                self._cluster,
                batch_size=self._batch_size,
                dtype=self._dtype,
                kind=kind,
            )
            best_s = min((x.step_s for x in self._scored.values()), default=math.inf)
            if alone_s < best_s:
                alone = mixtures(forms(kind=kind))
                yield from alone.layouts(per_segment, alone_s)

    def _cost(self, layout: Layout) -> float:
        scored = self._scored.get(layout)
        return scored.cost if scored else math.inf

    def _score_all(self, found: Iterable[Layout]) -> None:
        best_s = float("inf")
        for layout in found:
            self._check_time()
            scored = self._score(layout)
            if scored and scored.step_s < best_s:
                best_s = scored.step_s
                self._progress(f"{self._scorer.count} layouts", best_s)

    def _score(self, layout: Layout) -> Scored | None:
        if layout not in self._scored:
            if self._hopeless(layout):
                return None
            scored = self._scorer.score(layout)
            if scored is None and len(self._cluster.devices) <= FEW:
                scored = self._scorer.score(layout, OPTIMISTIC)
            if scored:
                self._scored[layout] = scored
                self._least = min(self._least, scored.cost)
            return scored
        return self._scored[layout]

    def _hopeless(self, layout: Layout) -> bool:
        """Whether a layout's devices are too slow, were they always busy."""
        if self._options.objective is not Objective.STEP or not layout:
            return False
        each_s = self._scorer.fitter.bound_s(layout, self._sizes)
        return each_s * self._batch_size > self._least * HOPELESS

    def _walk(self) -> None:
        """Local search: from each start, to the best neighbour while there is one."""
        if self._options.grouping is not Grouping.AUTO:
            return
        if len(self._cluster.devices) <= FEW:
            return
        forms: dict[object, Scored] = {}
        for scored in sorted(self._scored.values(), key=lambda scored: scored.cost):
            forms.setdefault(self._scorer.form(scored), scored)
        starts = list(forms.values())[:STARTS]
        walked: set[object] = set()
        for i, start in enumerate(starts):
            budget = self._scorer.count + self._effort.scored // len(starts)
            best = start
            improved = True
            while improved and self._scorer.count < budget:
                improved = False
                for layout in neighbours(
                    best.layout, self._cluster, self._maker, self._degrees
                ):
                    self._check_time()
                    if self._scorer.count >= budget:
                        break
                    if self._options.use_all_devices and not self._uses_all(layout):
                        continue
                    form = same_but_names(layout, self._cluster)
                    if form in walked:
                        continue
                    walked.add(form)
                    scored = self._score(layout) if layout else None
                    if scored and scored.cost < best.cost * (1 - 1e-6):
                        best, improved = scored, True
                        break
            self._progress(f"walk {i + 1} of {len(starts)}", best.step_s)

    def _uses_all(self, layout: Layout) -> bool:
        used = sum(mesh.shape.num_devices for meshes in layout for mesh in meshes)
        return used == len(self._cluster.devices)

    # Plans, by simulation.

    def _play(self, *, first_only: bool = False) -> None:
        """The best layouts as plans that fit, simulated."""
        left = self._effort.played
        order = sorted(self._scored.values(), key=lambda scored: scored.cost)
        if len(self._cluster.devices) > FEW:
            forms: dict[object, Scored] = {}
            for scored in order:
                forms.setdefault(self._scorer.form(scored), scored)
            order = _diverse(forms.values())
        queue = [(scored.cost, i) for i, scored in enumerate(order)]
        fitting: dict[int, Plan] = {}
        while queue:
            cost, i = heapq.heappop(queue)
            spent = left <= 0 and len(self._finished) >= LEAST
            enough = spent or cost > order[0].cost * PLAYED_WITHIN
            if self._finished and (enough or first_only):
                break
            if i not in fitting:
                found = self._fitted(order[i])
                if found is None:
                    continue
                scored, fitting[i] = found
                if scored.cost > cost * (1 + SAME_FAMILY):  # others come first now
                    heapq.heappush(queue, (scored.cost, i))
                    continue
            left -= num_instructions(fitting[i])
            self._finish(fitting[i])
            if not first_only:
                self._check_time()

    def _shrink(self) -> None:
        """The best pipelines with smaller microbatches, their layers split anew.

        The formula knows less of messages than the simulator, and smaller ones fill
        and drain a pipeline sooner.
        """
        best = sorted(self._finished.items(), key=lambda item: item[1])
        for plan in [p for p, _ in best if _pipelines(p)][:RESCHEDULED]:
            largest = max(replica.microbatch_size for replica in plan.replicas)
            for most in (largest // 2, largest // 4):
                self._check_time()
                scored = most and self._scorer.score(
                    self._layout(plan), most_samples=most
                )
                again = self._fitting(scored) if scored else None
                if again:
                    self._finish(again)

    def _recut(self) -> None:
        """The best pipelines that memory presses, layer by layer in segments.

        Those hold fewer gradients at once, so that layers can go where the speed is;
        the formula looks at them only where nothing else fits.
        """
        if self._options.layers_per_segment is not None:
            return
        options = dataclasses.replace(self._options, layers_per_segment=1)
        scorer = Scorer(self._chain, self._cluster, self._batch_size, options)
        best = sorted(self._finished.items(), key=lambda item: item[1])
        for plan in [p for p, _ in best if _pipelines(p)][:RESCHEDULED]:
            if not self._pressed(plan):
                continue
            self._check_time()
            scored = scorer.score(self._layout(plan))
            again = self._fitting(scored, scorer) if scored else None
            if again:
                self._finish(again)

    def _pressed(self, plan: Plan) -> bool:
        """Whether some device is nearly full."""
        return any(
            num_bytes > PRESSED * self._cluster.device(name).usable_memory_bytes
            for name, num_bytes in self._judge.memory_bytes(plan).items()
        )

    def _layout(self, plan: Plan) -> Layout:
        return tuple(
            tuple(self._maker.mesh(s.devices, s.tensor) for s in replica.stages)
            for replica in plan.replicas
        )

    def _reschedule(self) -> None:
        """The best pipelines under the other schedules."""
        if self._options.schedule is not None:
            return
        eager, interleaved = (
            Scorer(
                self._chain,
                self._cluster,
                self._batch_size,
                dataclasses.replace(self._options, schedule=schedule),
            )
            for schedule in (Schedule.EAGER, Schedule.INTERLEAVED)
        )
        best = sorted(self._finished.items(), key=lambda item: item[1])
        for plan in [p for p, _ in best if _pipelines(p)][:RESCHEDULED]:
            for schedule in (Schedule.ZERO_BUBBLE, Schedule.EAGER):
                self._check_time()
                self._finish(dataclasses.replace(plan, schedule=schedule))
            self._check_time()
            scored = interleaved.score(self._layout(plan))
            again = self._fitting(scored, interleaved) if scored else None
            if again:
                self._finish(again)
        self._reorder(eager)

    def _reorder(self, eager: Scorer) -> None:
        """Pipelines that another schedule makes good ones, the best few of them.

        Long ones with slow borders are far behind under 1F1B.
        """
        found: dict[object, Scored] = {}
        order = sorted(self._scored.values(), key=lambda scored: scored.cost)
        for plain in order[:RESCORED]:
            self._check_time()
            early = eager.score(plain.layout) if _long(plain.layout) else None
            if early and early.cost < plain.cost * (1 - WORTH):
                found.setdefault(eager.form(early), early)
        for early in sorted(found.values(), key=lambda x: x.cost)[:REORDERED]:
            self._check_time()
            again = self._fitting(early, eager)
            if again:
                self._finish(again)

    def _fitting(self, scored: Scored, scorer: Scorer | None = None) -> Plan | None:
        """The layout's plan, made to fit exactly."""
        found = self._fitted(scored, scorer)
        return found and found[1]

    def _fitted(
        self, scored: Scored, scorer: Scorer | None = None
    ) -> tuple[Scored, Plan] | None:
        """The layout made to fit exactly, and its plan."""
        scorer = scorer or self._scorer
        largest = max(scored.setting.budget_share, *BUDGET_SHARES)
        for share in dict.fromkeys((largest, *BUDGET_SHARES)):
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
                self._reasons.append(str(error))
                return None
            if self._judge.fits(self._judge.memory_bytes(plan)):
                return again, plan
        return None

    def _finish(self, plan: Plan) -> float | None:
        """Plays a plan; its cost, or None where it does not fit."""
        predicted = self._judge.predicted(plan)
        if predicted is None or predicted.prediction is None:
            return None
        cost = self._finished[predicted] = self._judge.cost(plan)
        if self._options.objective is Objective.STEP:
            self._shortest_s = min(self._shortest_s, cost)
        self._progress(f"{len(self._finished)} plans simulated", self._shortest_s)
        return cost

    def _refine(self) -> None:
        """Walks over variants of the best few layouts while they are faster."""
        best = sorted(self._finished.items(), key=lambda item: item[1])[
            : self._effort.walked
        ]
        left = self._effort.refined
        tried = {dataclasses.replace(plan, prediction=None) for plan in self._finished}
        for i, (start, cost) in enumerate(best):
            share, least = left // (len(best) - i), 0 if i else LEAST
            left -= share - self._refine_one(start, cost, share, least, tried)

    def _refine_one(
        self, start: Plan, cost: float, budget: int, least: int, tried: set[Plan]
    ) -> int:
        """Walks from one plan; returns what is left of its budget."""
        best, least_cost = start, cost
        improved = True
        while improved:
            improved = False
            plain = dataclasses.replace(best, prediction=None)
            for plan in variants(plain, self._options):
                if plan in tried or not _valid(plan):
                    continue
                if budget <= 0 and least <= 0:
                    return 0
                least -= 1
                self._check_time()
                tried.add(plan)
                budget -= num_instructions(plan)
                found = self._finish(plan)
                if found is not None and found < least_cost * (1 - 1e-9):
                    best, least_cost, improved = plan, found, True
                    break
        return budget


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


def _long(layout: Layout) -> bool:
    return any(len(meshes) > 1 for meshes in layout)


def _pipelines(plan: Plan) -> bool:
    return any(len(replica.stages) > 1 for replica in plan.replicas)


def _valid(plan: Plan) -> bool:
    return all(
        0 < replica.samples <= replica.microbatches * replica.microbatch_size
        for replica in plan.replicas
    )
