"""Searches for our plan, and for what it is held against.

    Problem -> choose -> Choices: ours, each kind and each node alone, all devices

The others are found by the same search, on smaller clusters or with all devices forced
in, and judged on the whole cluster. Where one of them is the best, it is ours.
"""

import dataclasses
import math
from collections.abc import Iterator

from hexijax.cli.screen import Searching
from hexijax.cluster import Cluster, Node
from hexijax.plan import Plan, PlanError
from hexijax.planner.baselines.offload import rests_on_host
from hexijax.planner.found import Progress
from hexijax.planner.parts import Known
from hexijax.planner.search import search as planner_search
from hexijax.report.judged import Judged, judge
from hexijax.report.problem import Problem
from hexijax.report.verdict import Choices

NEAR = 1.25
"""A part's plan that costs so much more than the best is searched no further."""

OURS = "hexijax"
GIVEN = "the plan given"
ALL = "all devices"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """What one search found, judged on the whole cluster."""

    best: Judged
    """The plan."""

    next_best: tuple[Judged, ...]
    """Plans of other layouts, the best first."""

    interrupted: bool
    """Ctrl-C ended it early."""


def search(
    problem: Problem,
    name: str,
    *,
    seconds: float | None = None,
    everyone: bool = False,
    brief: bool = False,
    on: Cluster | None = None,
    progress: Progress | None = None,
    known: Known | None = None,
) -> Searched:
    """The best plan the search finds.

    Args:
        problem: what is planned.
        name: what the plan is called.
        seconds: wall time the search may take; None: by counted effort.
        everyone: leave no device out.
        brief: a plan to hold another against will do.
        on: the part of the cluster that may be used; None: all of it.
        progress: is told how far the search is.
        known: what searches of the same problem found on parts of its cluster.

    Raises:
      PlanError: there is none.
    """
    options = problem.options(seconds=seconds)
    found = planner_search(
        problem.chain,
        on or problem.cluster,
        batch_size=problem.batch_size,
        dtype=problem.training.dtype,
        options=dataclasses.replace(options, use_all_devices=everyone, brief=brief),
        progress=progress,
        known=known,
    )
    whole = problem.cluster.fingerprint()
    best, *others = (
        dataclasses.replace(plan, cluster=whole)
        for plan in (found.plan, *found.runners_up)
    )
    return Searched(
        best=judge(name, best, problem, search_s=found.search_s),
        next_best=tuple(
            judge(f"runner-up {i}", plan, problem) for i, plan in enumerate(others, 1)
        ),
        interrupted=found.stopped == "interrupted",
    )


class Chooser:
    """Searches one after another, until Ctrl-C."""

    def __init__(
        self, problem: Problem, screen: Searching, seconds: float | None
    ) -> None:
        self._problem, self._screen, self._seconds = problem, screen, seconds
        self.cut_short = False
        self._known: Known = {}

    def search(
        self,
        name: str,
        *,
        everyone: bool = False,
        brief: bool = False,
        on: Cluster | None = None,
    ) -> Searched | None:
        """What a search finds; None after Ctrl-C."""
        if self.cut_short:
            return None
        with self._screen.on(f"searching: {name}") as progress:
            found = search(
                self._problem,
                name,
                seconds=self._seconds,
                everyone=everyone,
                brief=brief,
                on=on,
                progress=progress,
                known=self._known,
            )
        if found.interrupted:
            self.cut_short = True
            self._screen.say("Interrupted: what was found so far counts.")
        return found

    def search_part(self, name: str, part: Cluster, best: float) -> Searched | None:
        """What a search on a part finds: briefly, and in full where its plan comes
        near the best and might be found better."""
        found = self.search(name, brief=True, on=part)
        if found and found.best.cost < best * NEAR and rests_on_host(found.best.plan):
            return self.search(name, on=part)
        return found


def choose(
    problem: Problem,
    given: Plan | None,
    screen: Searching,
    *,
    seconds: float | None = None,
) -> Choices:
    """Our plan, or the one given, beside what the cluster's parts reach alone.

    Raises:
      PlanError: there is no plan on the whole cluster.
    """
    chooser = Chooser(problem, screen, seconds)
    first = chooser.search(OURS)
    assert first, "the first search is not skipped"
    alone: list[Judged] = []
    for name, part in _most_hopeful_first(problem):
        best = min((judged.cost for judged in alone), default=math.inf)
        if problem.on(part).least_cost >= best:
            break  # only the best of them counts
        try:
            found = chooser.search_part(name, part, first.best.cost)
        except PlanError:
            continue  # it does not hold the model: no rival
        if found and not chooser.cut_short:
            alone.append(found.best)
    full = [judged for judged in first.next_best if not judged.unused]
    refused = ""
    if first.best.unused:
        try:
            found = chooser.search(ALL, everyone=True)
            full += [found.best] if found else []
        except PlanError as error:
            refused = str(error)
    everyone = min(full, key=lambda judged: judged.cost, default=None)
    rivals = [first.best, *first.next_best, *alone, *([everyone] if everyone else [])]
    ours = min(rivals, key=lambda judged: judged.cost)
    if ours is not first.best:
        took_s = sum(judged.search_s for judged in rivals)
        ours = dataclasses.replace(ours, name=OURS, search_s=took_s)
    return Choices(
        ours=judge(GIVEN, given, problem) if given else ours,
        found=ours if given else None,
        next_best=first.next_best,
        alone=tuple(alone),
        everyone=everyone,
        refused=refused,
        cut_short=chooser.cut_short,
    )


def _most_hopeful_first(problem: Problem) -> list[tuple[str, Cluster]]:
    """The parts of its cluster, by what a step costs them at least."""
    found = [*parts(problem.cluster)]
    return sorted(found, key=lambda part: problem.on(part[1]).least_cost)


def parts(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Each kind alone and each node alone, less than the whole; equal nodes once."""
    seen = {frozenset(device.name for device in cluster.devices)}
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    for name, names in (
        *(
            (f"{k} alone", [d.name for d in cluster.devices if d.kind == k])
            for k in kinds
        ),
        *(
            (f"{n} alone", [d.name for d in cluster.devices if d.node == n])
            for n in _unlike_nodes(cluster)
        ),
    ):
        if frozenset(names) not in seen:
            seen.add(frozenset(names))
            others = {d.name for d in cluster.devices} - set(names)
            yield name, cluster.without(*others)


def _unlike_nodes(cluster: Cluster) -> Iterator[str]:
    """The first node of each form."""
    seen: list[Node] = []
    for node in cluster.nodes:
        form = dataclasses.replace(node, name="any", site="any", island="any")
        if form not in seen:
            seen.append(form)
            yield node.name
