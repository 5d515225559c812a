"""Replicas over several kinds: even, and without the slowest kinds while it pays."""

from collections.abc import Callable, Iterator

from hexijax.planner import PlanOptions
from hexijax.planner.bound import sizes_up_to
from hexijax.planner.families import in_line, spread
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


def spread_under(cost: Callable[[set[str]], float]) -> Iterator[set[str]]:
    """Kinds of each layout, where a layout's kinds are all that it costs."""
    scorer = Scorer(CHAIN, CLUSTER, 16, PlanOptions())
    maker = MeshMaker(CLUSTER, "float32")
    forms = Forms(CLUSTER, maker, scorer.fitter, degrees=(1, 2), sizes=sizes_up_to(16))

    def kinds(layout: Layout) -> set[str]:
        return {mesh.shape.profile.kind for meshes in layout for mesh in meshes}

    found = spread(forms, (1, 2), len(CHAIN.layers), lambda layout: cost(kinds(layout)))
    return map(kinds, found)


def test_pipelines_of_one_length_cross_nodes_of_one_kind():
    """Five cards in nodes of three and two are one pipeline of five."""
    cluster = make_cluster(
        [[("slow", 4)], [("slow", 2)], [("fast", 3)], [("fast", 2)]], kinds=KINDS
    )
    scorer = Scorer(CHAIN, cluster, 16, PlanOptions())
    maker = MeshMaker(cluster, "float32")
    forms = Forms(cluster, maker, scorer.fitter, degrees=(1,), sizes=sizes_up_to(16))
    lengths: list[tuple[int, ...]] = []
    for layout in in_line(forms, (1,), len(CHAIN.layers), len):
        for meshes in layout:
            assert len({mesh.shape.profile.kind for mesh in meshes}) == 1
        used = [name for meshes in layout for mesh in meshes for name in mesh.devices]
        assert len(used) == len(set(used))
        lengths.append(tuple(sorted(map(len, layout))))
    assert lengths[:3] == [(2, 2, 2, 2, 3), (3, 3, 5), (5, 6)]


def test_the_slowest_kind_stays_out_where_that_pays():
    used = list(spread_under(lambda kinds: float(len(kinds))))
    assert used[0] == {"slow", "middle", "fast"}
    assert used[-1] == {"middle", "fast"}


def test_all_kinds_stay_where_leaving_one_out_costs():
    used = list(spread_under(lambda kinds: 1.0 / len(kinds)))
    first_without = used.index({"middle", "fast"})
    assert all(kinds == {"slow", "middle", "fast"} for kinds in used[:first_without])
    assert {"fast"} not in used, "one kind alone is not spread"
