"""The cheapest plan may use part of a cluster: which parts are worth a search.

    Cluster, Goal -> parts -> searched by their bounds, least first -> Found

A step's time asks for every device that helps. Money and energy ask which devices to
take at all, so counts of each kind, nodes alone, and mixtures of kinds are searched by
themselves. A part whose bound is no less than what was found needs no search.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.planner.bound import bound_s, kind_rates
from hexijax.planner.found import Found
from hexijax.planner.infeasible import InfeasiblePlanError
from hexijax.planner.objective import Goal, Objective, idle_w
from hexijax.planner.options import PlanOptions

SETTLED = 0.005
"""A plan so near to the bound of every part that is left ends the search."""

PATIENCE = 3
"""Parts of the same kinds without gain before larger ones are given up."""

MOST_SEARCHED = 48
"""Parts that are searched."""

MOST_KINDS = 4
"""Kinds of which every set is tried; of more, those that are cheapest together."""

RUNNERS_UP = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some devices of a cluster."""

    devices: tuple[str, ...]
    """Their names."""

    kinds: frozenset[str]
    """Of which kinds they are."""

    least: float
    """What no plan on all of them can cost less than."""


SearchOne = Callable[[Cluster, PlanOptions], Found]
"""Searches a part; raises ``InfeasiblePlanError`` where it does not hold the model."""

Known = dict[frozenset[str], Found | None]
"""What was found on sets of devices; None: nothing fits."""


def cheapest(
    search: SearchOne,
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str,
    options: PlanOptions,
    known: Known | None = None,
) -> Found:
    """The plan of least cost over the parts of a cluster.

    Args:
      search: on a part.
      chain: the model.
      cluster: the whole.
      batch_size: samples of a step.
      dtype: compute dtype asked for.
      options: what else is asked for.
      known: parts that other searches of the same problem met; it grows.
    """
    begun_s = time.monotonic()
    known = {} if known is None else known
    goal = Goal(cluster, options.objective, options.usd_per_hour)
    found: list[Found] = []
    best, stopped = math.inf, ""
    waited: dict[frozenset[str], int] = {}
    for part in parts(chain, cluster, goal, batch_size=batch_size, dtype=dtype):
        spent = len(found) >= MOST_SEARCHED
        if spent or part.least >= best * (1 - SETTLED):
            break
        if waited.get(part.kinds, 0) >= PATIENCE:
            continue
        left = options
        if options.seconds is not None:
            left_s = options.seconds - (time.monotonic() - begun_s)
            if left_s <= 0 and found:
                stopped = f"{options.seconds:g} s were asked for"
                break
            left = dataclasses.replace(options, seconds=max(left_s, 1e-3))
        its = _searched(search, cluster, part, left, known)
        if its is None:
            continue
        found.append(its)
        waited[part.kinds] = waited.get(part.kinds, 0) + 1
        if its.costs[0] < best:
            best, waited[part.kinds] = its.costs[0], 0
        if its.stopped == "interrupted":
            stopped = its.stopped
            break
    if not found:  # says why
        return search(cluster, options)
    ranked = _ranked(found, cluster)
    return Found(
        plan=ranked[0][1],
        runners_up=tuple(plan for _, plan in ranked[1 : 1 + RUNNERS_UP]),
        costs=tuple(cost for cost, _ in ranked[: 1 + RUNNERS_UP]),
        bound_s=bound_s(chain, cluster, batch_size=batch_size, dtype=dtype),
        search_s=time.monotonic() - begun_s,
        layouts=sum(one.layouts for one in found),
        played=sum(one.played for one in found),
        stopped=stopped,
    )


def _searched(
    search: SearchOne, cluster: Cluster, part: Part, options: PlanOptions, known: Known
) -> Found | None:
    key = frozenset(part.devices)
    if key not in known:
        try:
            known[key] = search(_only(cluster, part.devices), options)
        except InfeasiblePlanError:
            known[key] = None
    return known[key]


def _only(cluster: Cluster, names: Sequence[str]) -> Cluster:
    others = {device.name for device in cluster.devices}.difference(names)
    return cluster.without(*others) if others else cluster


def _ranked(found: Sequence[Found], cluster: Cluster) -> list[tuple[float, Plan]]:
    """All plans, the cheapest first, one for each way to use the same devices."""
    plans = [
        pair
        for one in found
        for pair in zip(one.costs, (one.plan, *one.runners_up), strict=True)
    ]
    unlike: dict[object, tuple[float, Plan]] = {}
    for cost, plan in sorted(plans, key=lambda pair: pair[0]):
        key = tuple(tuple(s.devices for s in r.stages) for r in plan.replicas)
        unlike.setdefault(key, (cost, plan))
    whole = cluster.fingerprint()
    return [(c, dataclasses.replace(p, cluster=whole)) for c, p in unlike.values()]


def parts(
    chain: Chain, cluster: Cluster, goal: Goal, *, batch_size: int, dtype: str
) -> list[Part]:
    """Parts by their bounds, least first, and of equal bounds the smaller first."""
    rates = kind_rates(chain, cluster, batch_size=batch_size, dtype=dtype)
    kind_of = {device.name: device.kind for device in cluster.devices}
    made: dict[frozenset[str], Part] = {}
    for names in _device_sets(cluster, goal, rates):
        key = frozenset(names)
        if key and key not in made:
            kinds = [kind_of[name] for name in names]
            made[key] = Part(
                devices=tuple(names),
                kinds=frozenset(kinds),
                least=_least(cluster, goal, rates, names, kinds) * batch_size,
            )
    return sorted(made.values(), key=lambda part: (part.least, len(part.devices)))


def _least(
    cluster: Cluster,
    goal: Goal,
    rates: Mapping[str, float],
    names: Sequence[str],
    kinds: Sequence[str],
) -> float:
    """Of a sample: all devices compute at their best rates, until all end at once.

    For energy that is too much: the thriftiest computes all, and the others wait for
    the shortest time there is.
    """
    sample_s = 1 / sum(rates[kind] for kind in kinds)
    if goal.objective is not Objective.ENERGY:
        return goal.cost(sample_s, dict.fromkeys(names, sample_s))
    waiting = dict.fromkeys(names, 0.0)
    more = []
    for kind in set(kinds):
        name = next(n for n, k in zip(names, kinds, strict=True) if k == kind)
        profile = cluster.device(name).profile
        more.append((goal.least_of(kind) - idle_w(profile)) / rates[kind])
    return goal.cost(sample_s, waiting) + min(more)


def _device_sets(
    cluster: Cluster, goal: Goal, rates: Mapping[str, float]
) -> Iterator[Sequence[str]]:
    yield [device.name for device in cluster.devices]
    packed = {kind: _packed(cluster, kind) for kind in rates}
    for names in packed.values():
        yield from (names[:count] for count in _counts(len(names)))
    for node in cluster.nodes:
        here = [device for device in cluster.devices if device.node == node.name]
        yield [device.name for device in here]
        for kind in rates:
            yield [device.name for device in here if device.kind == kind]
    order = sorted(rates, key=lambda kind: goal.least_of(kind) / rates[kind])
    for count in range(2, len(order) + 1):
        sets = itertools.combinations(order, count)
        for chosen in sets if len(order) <= MOST_KINDS else [order[:count]]:
            yield [name for kind in chosen for name in packed[kind]]
    for a, b in itertools.combinations(order, 2):
        for some, more in itertools.product(_powers(packed[a]), _powers(packed[b])):
            yield [*some, *more]


def _packed(cluster: Cluster, kind: str) -> list[str]:
    """Devices of a kind, in as few nodes as any number of them can be."""
    nodes: dict[str, list[str]] = {}
    for device in cluster.devices:
        if device.kind == kind:
            nodes.setdefault(device.node, []).append(device.name)
    return [name for names in sorted(nodes.values(), key=len)[::-1] for name in names]


def _counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and all."""
    found = {n for k in range(most.bit_length()) for n in (2**k, 3 * 2**k)}
    return sorted(n for n in found | {most} if n <= most)


def _powers(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The first 1, 2, 4, ... and all."""
    for count in sorted({*(2**k for k in range(len(names).bit_length())), len(names)}):
        yield names[:count]
