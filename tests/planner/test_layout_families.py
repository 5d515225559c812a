"""Replicas over several kinds: even, and without the slowest kinds while it pays."""

import math
from collections.abc import Callable, Iterator

import pytest

from hexijax.cluster import Cluster
from hexijax.planner import PlanOptions
from hexijax.planner.bound import sizes_up_to
from hexijax.planner.families import families_of_kinds, in_line, spread
from hexijax.planner.forms import Forms
from hexijax.planner.mesh import Layout, MeshMaker
from hexijax.planner.score import Scorer
from tests.plan.examples import make_chain, make_cluster, make_kind

CHAIN = make_chain(10, width=256, rows=512)
KINDS = tuple(
    make_kind(name, tflops=tflops)
    for name, tflops in (("slow", 1), ("fast", 10), ("middle", 5))
)
CLUSTER = make_cluster([[("slow", 2)], [("fast", 2)], [("middle", 2)]], kinds=KINDS)


FIVE = make_cluster(
    [[(f"k{i}", 2)] for i in range(1, 6)],
    kinds=tuple(make_kind(f"k{i}", tflops=i) for i in range(1, 6)),
)
"""Kinds of five speeds, ``k1`` the slowest."""


def spread_under(
    cost: Callable[[set[str]], float], cluster: Cluster = CLUSTER
) -> Iterator[set[str]]:
    """Kinds of each layout, where a layout's kinds are all that it costs."""
    scorer = Scorer(CHAIN, cluster, 16, PlanOptions())
    maker = MeshMaker(cluster, "float32")
    forms = Forms(cluster, maker, scorer.fitter, degrees=(1, 2), sizes=sizes_up_to(16))

    def kinds(layout: Layout) -> set[str]:
        return {mesh.shape.profile.kind for meshes in layout for mesh in meshes}

    found = spread(forms, (1, 2), len(CHAIN.layers), lambda layout: cost(kinds(layout)))
    return map(kinds, found)


UNEVEN = make_cluster(
    [[("slow", 4)], [("slow", 2)], [("fast", 3)], [("fast", 2)]], kinds=KINDS
)
"""Kinds whose nodes are of unlike size."""


def forms_of_uneven() -> Forms:
    scorer = Scorer(CHAIN, UNEVEN, 16, PlanOptions())
    maker = MeshMaker(UNEVEN, "float32")
    return Forms(UNEVEN, maker, scorer.fitter, degrees=(1,), sizes=sizes_up_to(16))


def lengths_of_lines(found: Iterator[Layout]) -> list[tuple[int, ...]]:
    """Of each layout, whose replicas are on one kind each and share no device."""
    lengths: list[tuple[int, ...]] = []
    for layout in found:
        for meshes in layout:
            assert len({mesh.shape.profile.kind for mesh in meshes}) == 1
        used = [name for meshes in layout for mesh in meshes for name in mesh.devices]
        assert len(used) == len(set(used))
        lengths.append(tuple(sorted(map(len, layout))))
    return lengths


def test_pipelines_of_one_length_cross_nodes_of_one_kind():
    """Five cards in nodes of three and two are one pipeline of five."""
    found = in_line(forms_of_uneven(), (1,), len(CHAIN.layers), len)
    assert lengths_of_lines(found)[:3] == [(2, 2, 2, 2, 3), (3, 3, 5), (5, 6)]


def test_kinds_that_are_slow_alone_are_put_together():
    """The best of each kind, here two pipelines, and one pipeline, in all ways. Of
    twelve layers four stages have three, as five would."""

    def price(layout: Layout) -> float:
        return abs(2 - len(layout)) + sum(map(len, layout)) / 100

    found = families_of_kinds(forms_of_uneven(), (1,), len(CHAIN.layers), price)
    lengths = lengths_of_lines(found)
    assert lengths[-4:] == [(2, 3, 3, 3), (3, 3, 4), (2, 3, 6), (4, 6)]


def test_the_slowest_kind_stays_out_where_that_pays():
    used = list(spread_under(lambda kinds: float(len(kinds))))
    assert used[0] == {"slow", "middle", "fast"}
    assert used[-1] == {"middle", "fast"}


def test_all_kinds_stay_where_leaving_one_out_costs():
    used = list(spread_under(lambda kinds: 1.0 / len(kinds)))
    first_without = used.index({"middle", "fast"})
    assert all(kinds == {"slow", "middle", "fast"} for kinds in used[:first_without])
    assert {"fast"} not in used, "one kind alone is not spread"


@pytest.mark.parametrize(
    ("costs", "fewest"),
    [
        ({5: math.inf, 4: math.inf, 3: 2.0, 2: 1.0}, 2),
        ({5: 2.0, 4: 3.0, 3: 1.0, 2: 2.0}, 2),
        ({5: 1.0, 4: 2.0, 3: 2.0, 2: 0.5}, 3),
    ],
)
def test_one_kind_less_that_costs_more_is_no_end(costs: dict[int, float], fewest: int):
    """Nor is a number of which nothing fits; two that cost more are."""
    used = [*spread_under(lambda kinds: costs[len(kinds)], FIVE)]
    assert min(map(len, used)) == fewest
    assert {"k5", "k4", "k3"} in used
