"""More is never slower, less is planned afresh, and the named bottleneck is one."""

import collections
import math
import random
from collections.abc import Callable

import pytest

from hexijax.cluster import Cluster, Links
from hexijax.plan.plan import Plan
from hexijax.planner import InfeasiblePlanError, make_plan
from hexijax.report.judged import judge
from hexijax.report.limits import Limit, What, faster_kind, faster_links, limits
from hexijax.report.problem import Problem
from tests.planner.small_cases import Case, small_case

FEW = range(1)
MANY = range(200)
Record = Callable[[str, object], None]


def planned(case: Case, cluster: Cluster) -> Plan | None:
    """The plan on some cluster, or None where nothing fits."""
    try:
        return make_plan(case.chain, cluster, batch_size=case.batch_size)
    except InfeasiblePlanError:
        return None


def step_s(plan: Plan | None) -> float:
    return plan.prediction.step_s if plan and plan.prediction else math.inf


def several(seed: int) -> Case:
    """A case of two devices at least."""
    return next(
        case
        for case in map(small_case, range(1000 * seed, 1000 * seed + 1000))
        if len(case.cluster.devices) > 1
    )


def with_one_more(seed: int) -> float:
    """The step with a card over the step without it."""
    case = several(seed)
    cluster = case.cluster
    card = random.Random(seed).choice(cluster.devices).name
    return over(
        step_s(planned(case, cluster)), step_s(planned(case, cluster.without(card)))
    )


def with_more_bandwidth(seed: int) -> float:
    """The step with all links twice as fast over the step as they are."""
    case = several(seed)
    fast = faster_links(case.cluster, between=False, factor=2)
    fast = faster_links(fast, between=True, factor=2)
    return over(step_s(planned(case, fast)), step_s(planned(case, case.cluster)))


def with_its_bottleneck_eased(seed: int) -> float:
    """The step with what limits it 10% faster over the step as it is."""
    case = several(seed)
    plan = planned(case, case.cluster)
    if plan is None:
        return 0.0
    problem = Problem(
        name="drawn", chain=case.chain, cluster=case.cluster, batch_size=case.batch_size
    )
    limit = limits(judge("hexijax", plan, problem))[0]
    if limit.what in (What.DISPATCH, What.MEMORY):
        return 0.0  # no speed of the cluster
    return over(step_s(planned(case, eased(case.cluster, limit))), step_s(plan))


def eased(cluster: Cluster, limit: Limit) -> Cluster:
    """The cluster with that 10% faster."""
    if limit.what is What.DEVICE:
        return faster_kind(cluster, limit.name)
    return faster_links(cluster, between=limit.name == "between nodes")


def over(now_s: float, before_s: float) -> float:
    """A ratio of steps; 0 where there was none before."""
    return now_s / before_s if before_s < math.inf else 0.0


def check(
    law: Callable[[int], float], seeds: range, at_most: float, record: Record
) -> None:
    """Holds every seed to a law."""
    ratios = {seed: law(seed) for seed in seeds}
    late = {seed: r for seed, r in ratios.items() if r > at_most}
    counted = sum(r > 0 for r in ratios.values())
    record(law.__name__, f"{counted} cases, {len(late)} break it")
    assert counted > len(seeds) * 0.7
    lines = [f"{r:.4f} seed {seed}: {several(seed)}" for seed, r in late.items()]
    assert not lines, "\n".join(lines)


NO_SLOWER, SHORTER = 1 + 1e-9, 1 - 1e-6


@pytest.mark.parametrize(
    ("law", "at_most"),
    [
        (with_one_more, NO_SLOWER),
        (with_more_bandwidth, NO_SLOWER),
        (with_its_bottleneck_eased, SHORTER),
    ],
)
@pytest.mark.parametrize(
    "seeds", [pytest.param(FEW), pytest.param(MANY, marks=pytest.mark.laws)]
)
def test_more_is_never_slower(
    law: Callable[[int], float],
    at_most: float,
    seeds: range,
    record_property: Record,
):
    check(law, seeds, at_most, record_property)


def afresh(cluster: Cluster, node: str) -> Cluster:
    """A cluster made of the other nodes, as if the one had never been there."""
    return Cluster(
        name=cluster.name,
        nodes=tuple(n for n in cluster.nodes if n.name != node),
        links=Links(
            in_node=cluster.links.in_node,
            between_nodes=cluster.links.between_nodes,
            node_pairs=tuple(
                pair for pair in cluster.links.node_pairs if node not in pair.between
            ),
        ),
        profiles=cluster.profiles,
    )


@pytest.mark.parametrize(
    "seeds", [pytest.param(FEW), pytest.param(MANY, marks=pytest.mark.laws)]
)
def test_dropping_a_node_is_planning_without_it(seeds: range, record_property: Record):
    counts: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        case = next(
            case
            for case in map(small_case, range(1000 * seed, 1000 * seed + 1000))
            if len(case.cluster.nodes) > 1
        )
        node = random.Random(seed).choice(case.cluster.nodes).name
        dropped = planned(case, case.cluster.without(node))
        fresh = planned(case, afresh(case.cluster, node))
        assert dropped == fresh, str(case)
        counts["planned" if fresh else "fits nowhere"] += 1
    record_property("dropping a node", dict(counts))
    assert counts["planned"] > 0.5 * len(seeds)
