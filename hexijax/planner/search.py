"""The search for a plan: thousands of layouts by formula, the best few by simulation.

    seeds (rules, mixtures, all of few devices) -> local search -> Scored, best first
      -> plans that fit -> simulator -> variants of the winner -> simulator -> Plan

Layouts are searched here; ``finish`` has what comes after. What follows a layout is
exact under the formula: layers, remat and microbatch counts. Effort is counted, never
timed: equal input, equal plan, unless ``seconds`` is given.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Iterator

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan, PlanError
from hexijax.planner.bound import bound_s, sizes_up_to
from hexijax.planner.effort import FEW, Effort
from hexijax.planner.exhaustive import every_layout
from hexijax.planner.families import families, families_of_kinds, in_line, spread
from hexijax.planner.finish import Finisher
from hexijax.planner.forms import Forms
from hexijax.planner.found import Found, Progress
from hexijax.planner.grouping import layouts
from hexijax.planner.infeasible import InfeasiblePlanError, explain_infeasible
from hexijax.planner.mesh import Layout, MeshMaker, fitting_degrees
from hexijax.planner.mixtures import Mixtures
from hexijax.planner.moves import neighbours, same_but_names
from hexijax.planner.objective import Objective
from hexijax.planner.options import Grouping, PlanOptions
from hexijax.planner.parts import Known, cheapest
from hexijax.planner.score import Scored, Scorer
from hexijax.planner.segments import layers_per_segment

STARTS = 4
"""Layouts from which local search walks."""

MANY = 1024
"""Devices of which layouts that are slow by themselves are scored, too."""

HOPELESS, NO_BETTER = 1.2, 1.2
"""Layouts that need so much longer than the best, were memory no limit and sums free,
are not scored; nor are neighbours, than what they are neighbours of."""

REFUSED = 12
"""Layouts in which even parts of state do not fit that are tried with uneven ones: so
many of those that compute fastest, and of those with most room."""

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
        self._finisher = Finisher(
            chain,
            cluster,
            self._scorer,
            self._maker,
            options,
            progress=self._progress,
            check_time=self._check_time,
        )
        self._effort = Effort.of(cluster)
        self._scored: dict[Layout, Scored] = {}
        self._refused: list[Layout] = []
        self._least, self._tried = math.inf, 0
        self._hopeless_s: dict[Layout, float] = {}
        self._classes: dict[object, int] = {}
        self._sizes = sizes_up_to(batch_size)

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
            self._walk(self._by_cost())
            self._finisher.finish(self._by_cost(), self._best_refused())
            self._look_at_kinds()
        except KeyboardInterrupt:
            stopped = "interrupted"
        except _OutOfTimeError:
            stopped = f"{self._options.seconds:g} s were asked for"
        if stopped and not self._finisher.finished.plans:
            self._finisher.play(self._by_cost(), first_only=True)
        best = self._best()
        return Found(
            plan=best[0][1],
            runners_up=tuple(plan for _, plan in best[1:4]),
            costs=tuple(cost for cost, _ in best[:4]),
            bound_s=bound,
            search_s=time.monotonic() - self._begun_s,
            layouts=self._scorer.count,
            played=len(self._finisher.finished.plans),
            stopped=stopped,
        )

    def _best(self) -> list[tuple[float, Plan]]:
        """Finished plans with their costs, best first, one a layout."""
        if not self._finisher.finished.plans:
            raise InfeasiblePlanError(
                explain_infeasible(
                    self._chain,
                    self._cluster,
                    self._batch_size,
                    self._dtype,
                    self._options,
                    self._finisher.finished.reasons,
                )
            )
        found: dict[object, tuple[float, Plan]] = {}
        for cost, plan in self._finisher.finished.best():
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
        if options.grouping not in (Grouping.AUTO, Grouping.MESH):
            return
        if len(self._cluster.devices) <= FEW:
            every = every_layout(
                self._cluster,
                self._maker,
                self._degrees,
                use_all=options.use_all_devices,
            )
            auto = options.grouping is Grouping.AUTO
            yield from (x for x in every if auto or all(len(r) == 1 for r in x))
            return
        if options.grouping is Grouping.MESH:
            return
        mixtures = functools.partial(
            Mixtures,
            fitter=self._scorer.fitter,
            degrees=self._degrees,
            num_layers=len(self._chain.layers),
            batch_size=self._batch_size,
        )
        per_segment = layers_per_segment(2, options.layers_per_segment)
        whole = self._forms()
        mixed = mixtures(whole, use_all=options.use_all_devices)
        yield from mixed.layouts(per_segment, bound)
        most_layers = len(self._chain.layers)
        if not options.use_all_devices:
            yield from families(whole, self._cost)
        yield from spread(whole, self._degrees, most_layers, self._at_least)
        if not options.use_all_devices:
            yield from in_line(whole, self._degrees, most_layers, self._at_least)
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
                alone = mixtures(self._forms(kind=kind))
                yield from alone.layouts(per_segment, alone_s)

    def _forms(self, kind: str | None = None) -> Forms:
        """Of the cluster, or of its devices of one kind."""
        return Forms(
            self._cluster,
            self._maker,
            self._scorer.fitter,
            degrees=self._degrees,
            sizes=self._sizes,
            kind=kind,
        )

    def _look_at_kinds(self) -> None:
        """Kinds put together whose pipelines are slow alone, beside what was found."""
        options, devices = self._options, len(self._cluster.devices)
        if options.grouping is not Grouping.AUTO or options.use_all_devices:
            return
        if not FEW < devices <= MANY:
            return
        before = set(self._scored)
        layers = len(self._chain.layers)
        self._score_all(
            families_of_kinds(self._forms(), self._degrees, layers, self._price)
        )
        found = [each for each in self._by_cost() if each.layout not in before]
        if found and self._finisher.is_near(found[0].cost):
            self._walk(found)
            found = [each for each in self._by_cost() if each.layout not in before]
            self._finisher.look_at(found)

    def _best_refused(self) -> list[Layout]:
        """Of the layouts that do not fit, those that compute fastest and those that
        have most room, one a form."""
        fitter = self._scorer.fitter
        unlike: dict[object, Layout] = {}
        for layout in self._refused:
            unlike.setdefault(self._form(layout), layout)
        layouts = [*unlike.values()]
        each_s = [fitter.bound_s(x, self._sizes) for x in layouts]
        priced = [i for i, seconds in enumerate(each_s) if seconds < math.inf]
        fastest = sorted(priced, key=lambda i: (each_s[i], i))
        roomiest = sorted(fastest, key=lambda i: -_room_bytes(layouts[i]))
        found = dict.fromkeys([*fastest[:REFUSED], *roomiest[:REFUSED]])
        return [layouts[i] for i in found]

    def _form(self, layout: Layout) -> object:
        return same_but_names(layout, self._cluster, self._classes)

    def _by_cost(self) -> list[Scored]:
        return sorted(self._scored.values(), key=lambda scored: scored.cost)

    def _cost(self, layout: Layout) -> float:
        scored = self._scored.get(layout)
        return scored.cost if scored else math.inf

    def _price(self, layout: Layout) -> float:
        """Of what may be too slow by itself."""
        if layout not in self._scored:
            scored = self._scorer.score(layout)
            if scored:
                self._scored[layout] = scored
        return self._cost(layout)

    def _at_least(self, layout: Layout) -> float:
        """By formula; of those that are not scored, a bound."""
        return min(self._cost(layout), self._hopeless_s.get(layout, math.inf))

    def _score_all(self, found: Iterable[Layout]) -> None:
        best_s = float("inf")
        for layout in found:
            self._check_time()
            scored = self._score(layout)
            if scored and scored.step_s < best_s:
                best_s = scored.step_s
                self._progress(f"{self._scorer.count} layouts", best_s)

    def _score(self, layout: Layout, most: float = math.inf) -> Scored | None:
        """``most``: what it may cost at the most to be worth it."""
        if layout not in self._scored:
            self._tried += 1
            if self._hopeless(layout, min(most, self._least * HOPELESS)):
                return None
            scored = self._scorer.score(layout)
            if scored is None and len(self._cluster.devices) <= FEW:
                scored = self._scorer.score(layout, OPTIMISTIC)
            if scored:
                self._scored[layout] = scored
                self._least = min(self._least, scored.cost)
            elif layout and self._scorer.possible(layout):
                self._refused.append(layout)
            return scored
        return self._scored[layout]

    def _hopeless(self, layout: Layout, most_s: float) -> bool:
        """Whether a layout is too slow, were its devices always busy; or of many, had
        they all the memory there is."""
        if self._options.objective is not Objective.STEP or not layout:
            return False
        each_s = self._scorer.fitter.bound_s(layout, self._sizes)
        least_s = each_s * self._batch_size
        if least_s <= most_s and len(self._cluster.devices) > FEW:
            least_s = self._scorer.least_s(layout)
        if least_s > most_s:
            self._hopeless_s[layout] = least_s
        return least_s > most_s

    def _walk(self, scored: Iterable[Scored]) -> None:
        """Local search: from the best of them to better neighbours, while there are."""
        if self._options.grouping is not Grouping.AUTO:
            return
        if len(self._cluster.devices) <= FEW:
            return
        forms: dict[object, Scored] = {}
        for each in scored:
            forms.setdefault(self._scorer.form(each), each)
        starts = list(forms.values())[:STARTS]
        walked: set[object] = set()
        for i, start in enumerate(starts):
            budget = self._tried + self._effort.scored // len(starts)
            best = start
            improved = True
            while improved and self._tried < budget:
                improved = False
                for layout in neighbours(
                    best.layout, self._cluster, self._maker, self._degrees
                ):
                    self._check_time()
                    if self._tried >= budget:
                        break
                    if self._options.use_all_devices and not self._uses_all(layout):
                        continue
                    form = self._form(layout)
                    if form in walked:
                        continue
                    walked.add(form)
                    made = self._score(layout, best.cost * NO_BETTER)
                    if made and made.cost < best.cost * (1 - 1e-6):
                        best, improved = made, True
                        break
            self._progress(f"walk {i + 1} of {len(starts)}", best.step_s)

    def _uses_all(self, layout: Layout) -> bool:
        used = sum(mesh.shape.num_devices for meshes in layout for mesh in meshes)
        return used == len(self._cluster.devices)


def _room_bytes(layout: Layout) -> int:
    """For a whole model, of the device that has least of it for its part."""
    return min(
        mesh.shape.usable_memory_bytes * mesh.shape.tensor * len(meshes)
        for meshes in layout
        for mesh in meshes
    )
