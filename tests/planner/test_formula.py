"""What the formula says of links, beside what the simulator plays."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, NamedLink, Node
from hexijax.costs.borders import border
from hexijax.costs.rates import HOST_CALL_S
from hexijax.costs.ways import Ways
from hexijax.layers.known import gpt
from hexijax.plan.plan import Stage
from hexijax.planner.border import Borders
from hexijax.planner.dispatch import calls_of, dispatch_s
from hexijax.planner.judge import Judge
from hexijax.planner.mesh import Layout, MeshMaker
from hexijax.planner.network import Network
from hexijax.planner.options import PlanOptions
from hexijax.planner.score import Scorer

CHAIN = gpt(depth=12, width=1024, num_heads=16, length=1024)
SIZE = 8


def cluster_of(
    nodes: int, cards: int, *, kind: str = "a100-40g-sxm", gbytes_per_s: float = 1.0
) -> Cluster:
    """Nodes with a network card each; the last stands at another site."""
    nic = LinkProfile(latency_s=5e-5, bytes_per_s=gbytes_per_s * 1e9)
    far = LinkProfile(latency_s=5e-5, bytes_per_s=gbytes_per_s * 4e8)
    made = tuple(
        Node(
            name=f"n{i}",
            devices=(DeviceGroup(kind=kind, count=cards),),
            host_memory_bytes=2**38,
            host_cores=64,
            link=LinkProfile(latency_s=5e-6, bytes_per_s=2e11),
            nic=nic,
            site="there" if i and i == nodes - 1 else "here",
        )
        for i in range(nodes)
    )
    between = NamedLink(between=("here", "there"), link=far)
    pairs = (between,) if nodes > 1 else ()
    return Cluster(name="formula", nodes=made, links=Links(site_pairs=pairs))


def formula_and_played(cluster: Cluster, layout: Layout, batch_size: int):
    options = PlanOptions()
    scorer = Scorer(CHAIN, cluster, batch_size, options)
    scored = scorer.score(layout)
    assert scored
    return scored.step_s, Judge(CHAIN, cluster, options).step_s(scorer.plan(scored))


@settings(max_examples=60)
@given(data=st.data())
def test_a_border_alone_takes_what_its_message_does(data: st.DataObject):
    cluster = cluster_of(3, SIZE, gbytes_per_s=data.draw(st.sampled_from([0.2, 5])))
    maker = MeshMaker(cluster, "bfloat16")
    degrees = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
    (lanes_a, tensor_a), (lanes_b, tensor_b) = data.draw(st.tuples(degrees, degrees))
    node_a, node_b = data.draw(st.sampled_from([(0, 0), (0, 1), (0, 2)]))
    names_a = tuple(f"n{node_a}/{i}" for i in range(lanes_a * tensor_a))
    names_b = tuple(f"n{node_b}/{SIZE - 1 - i}" for i in range(lanes_b * tensor_b))
    a, b = maker.mesh(names_a, tensor_a), maker.mesh(names_b, tensor_b)
    stages = [
        Stage(
            devices=mesh.devices,
            layers=(k, k + 1),
            lanes=mesh.shape.lanes,
            tensor=mesh.shape.tensor,
            dtype="bfloat16",
        )
        for k, mesh in enumerate((a, b))
    ]
    rates = (a.shape.profile.memory_bytes_per_s, b.shape.profile.memory_bytes_per_s)
    there = border(CHAIN, 1, *stages, SIZE, Ways(cluster), rates, cotangent=False)
    back = border(
        CHAIN, 1, *stages[::-1], SIZE, Ways(cluster), rates[::-1], cotangent=True
    )
    num_bytes = CHAIN.layers[0].border_bytes * SIZE
    found = Borders(cluster, Network(cluster)).border(a, b, num_bytes)
    mean_s = (there.load.seconds + back.load.seconds) / 2
    assert found.seconds == pytest.approx(mean_s, rel=1e-3)
    programs_s = there.split_s + back.merge_s, there.merge_s + back.split_s
    assert found.programs_s == pytest.approx(programs_s, rel=1e-3)


@pytest.mark.parametrize("gbytes_per_s", [0.5, 2, 25])
def test_sums_and_new_parameters_are_foreseen(gbytes_per_s: float):
    cluster = cluster_of(4, 4, gbytes_per_s=gbytes_per_s)
    maker = MeshMaker(cluster, "bfloat16")
    layout = tuple(
        (maker.mesh(tuple(f"n{n}/{i}" for i in range(4))),) for n in range(4)
    )
    formula_s, played_s = formula_and_played(cluster, layout, 64)
    assert formula_s == pytest.approx(played_s, rel=0.05)


def test_replicas_that_cross_one_network_card_share_it():
    cluster = cluster_of(2, 8, gbytes_per_s=1)
    maker = MeshMaker(cluster, "bfloat16")

    def replicas(count: int) -> Layout:
        return tuple(
            (maker.mesh((f"n0/{r}",)), maker.mesh((f"n1/{r}",))) for r in range(count)
        )

    for count in (1, 4, 8):
        formula_s, played_s = formula_and_played(cluster, replicas(count), 64 * count)
        assert formula_s == pytest.approx(played_s, rel=0.12), count


@settings(max_examples=15)
@given(data=st.data())
def test_a_node_of_stages_is_no_faster_than_its_host(data: st.DataObject):
    """The formula's calls are those that the simulator counts, but for a last stage's
    few; and where they are what holds a step up, microbatches are larger."""
    cards = data.draw(st.sampled_from([4, 8]))
    nodes = data.draw(st.integers(1, 3))
    cluster = cluster_of(nodes, cards, kind="h100-80g-sxm", gbytes_per_s=50)
    maker = MeshMaker(cluster, "bfloat16")
    layout = tuple(
        tuple(maker.mesh((f"n{n}/{i}",), 1) for i in range(cards)) for n in range(nodes)
    )
    scorer = Scorer(CHAIN, cluster, 512, PlanOptions())
    scored = scorer.score(layout)
    assert scored
    dispatched_s = dispatch_s(
        layout, scored.fitted, scored.shares, scored.setting.per_segment, cluster
    )
    plan = scorer.plan(scored)
    timeline = Judge(CHAIN, cluster, PlanOptions()).timeline(plan, events=False)
    assert dispatched_s == pytest.approx(max(timeline.host_s.values()), rel=0.06)
    calls = sum(calls_of(k, cards) for k in range(cards))
    assert calls == 4 * cards - 3, "two passes and two sends each, but at both ends"
    for fitted, share in zip(scored.fitted, scored.shares, strict=True):
        least = calls * HOST_CALL_S
        assert fitted.option.next_s > least / 2, "of twice as large ones it is not more"
        assert scored.step_s >= (share.microbatches - 1) * least
