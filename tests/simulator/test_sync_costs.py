"""What a step's sums, new parameters and borders cost, reckoned by hand."""

import dataclasses

import pytest

from hexijax.cluster import Cluster, LinkProfile
from hexijax.costs import PlanCosts
from hexijax.costs.borders import Carriage
from hexijax.costs.rates import CALL_S, HOST_CALL_S
from hexijax.costs.sums import GRAD_BYTES
from hexijax.costs.ways import Grid, Ways
from hexijax.costs.ways import load as ways_load
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan, StateShare
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Update
from hexijax.simulator import Cause, Timeline, simulate
from hexijax.simulator.uses import What
from tests.program.examples import make_chain, make_plan, make_stages
from tests.simulator.test_simulator import cluster

R0, R1, STORE = Place("r0.s0"), Place("r1.s0"), Place("store/0")


def played(plan: Plan, chain: Chain, machines: Cluster) -> Timeline:
    """A plan's Program under the cluster's own costs."""
    costs = PlanCosts(plan, chain, machines)
    program = lower(plan, chain, rules=StepRules(), costs=costs)
    return simulate(program, plan, chain, machines, costs=costs)


def shared(**shares: float) -> tuple[StateShare, ...]:
    """All state by shares of ``r0``, ``r1`` and ``store``."""
    places = {"r0": R0, "r1": R1, "store": STORE}
    given = {places[name]: share for name, share in shares.items()}
    return (StateShare(groups=("*",), shares=given),)


def pair(lanes: int = 1, **shares: float) -> Plan:
    """Two replicas of one stage, on nodes a and b."""
    state = {"state": shared(**shares)} if shares else {}
    return make_plan(
        (make_stages([1], prefix="a", lanes=lanes), 1),
        (make_stages([1], prefix="b", lanes=lanes), 1),
        **state,
    )


def test_slices_are_cast_before_they_travel_where_dtypes_differ():
    chain, machines = make_chain(1, sizes=[4096]), cluster(("a", 1), ("b", 1))
    plan = pair()
    assert PlanCosts(plan, chain, machines).exchange("l0").cast(R0) is None
    half = tuple(
        dataclasses.replace(
            r, stages=(dataclasses.replace(r.stages[0], dtype="bfloat16"),)
        )
        for r in plan.replicas
    )
    plan = dataclasses.replace(plan, replicas=half)
    exchange = PlanCosts(plan, chain, machines).exchange("l0")
    cast = exchange.cast(R0)
    assert cast is not None
    rate = machines.device("a/0").profile.memory_bytes_per_s
    assert cast.seconds == pytest.approx(CALL_S + exchange.held[R0] * (4 + 2) / rate)


def test_a_home_updates_the_rows_it_holds():
    chain = make_chain(1, sizes=[4096])
    plan = pair(r0=3, r1=1)
    costs = PlanCosts(plan, chain, cluster(("a", 1), ("b", 1)))
    seconds = [
        costs.duration_s(Update(group="l0", home=home)) - CALL_S for home in (R0, R1)
    ]
    # The bias is too small to be cut: it lies with the larger share.
    assert seconds[0] / seconds[1] == pytest.approx((3072 * 64 + 64) / (1024 * 64))


def test_uneven_shares_travel_as_they_are():
    chain = make_chain(1, sizes=[4096])
    timeline = played(pair(r0=3, r1=1), chain, cluster(("a", 1), ("b", 1)))
    # a sends a quarter of its gradient, and b three; parameters go the other way.
    params = 4096 * 64 * 4
    assert timeline.link_bytes["a out"] == pytest.approx(params, rel=0.001)
    uneven = played(pair(r0=0.0, r1=1), chain, cluster(("a", 1), ("b", 1)))
    assert uneven.link_bytes["a out"] == chain.num_params * GRAD_BYTES
    assert uneven.link_bytes["b out"] == chain.num_params * 4


def test_each_lane_gets_its_part_and_they_gather_the_whole():
    chain = make_chain(1, sizes=[4096])
    lone = played(pair(), chain, cluster(("a", 1), ("b", 1)))
    for lanes in (2, 4):
        machines = cluster(("a", lanes), ("b", lanes))
        laned = played(pair(lanes=lanes), chain, machines)
        for way in ("a out", "b out", "a in", "b in"):
            assert laned.link_bytes[way] == pytest.approx(
                lone.link_bytes[way], rel=1e-3
            )


def test_lanes_reduce_scatter_their_sum_and_gather_what_came():
    chain = make_chain(1, sizes=[4096])
    machines = cluster(("a", 4), ("b", 4))
    costs = PlanCosts(pair(lanes=4), chain, machines)
    exchange = costs.exchange("l0")
    passed = 3 / 4 * chain.num_params * 4
    memory_s = (
        2 * chain.num_params * 4 / machines.device("a/0").profile.memory_bytes_per_s
    )
    partial, join = exchange.partial(R0), exchange.join(R0)
    assert partial.seconds - CALL_S == pytest.approx(passed / 100e9, rel=1e-3)
    assert join
    assert join.seconds - CALL_S == pytest.approx(passed / 100e9 + memory_s, rel=1e-3)


def test_copies_between_unlike_lanes_are_cut_where_both_are():
    ways = Ways(cluster(("a", 4), ("b", 4)))

    def pieces(sources: tuple[int, int], targets: tuple[int, int]) -> list[float]:
        grids = [
            Grid(tuple(f"{node}/{i}" for i in range(a * b)), a, b)
            for node, (a, b) in (("a", sources), ("b", targets))
        ]
        made = ways.pieces(*grids)
        counts = [(part, sum(n for _, n in hops)) for part, hops in made]
        assert sum(part * n for part, n in counts) == pytest.approx(
            targets[0] * targets[1]
        )
        return [part for part, n in counts for _ in range(n)]

    assert pieces((1, 1), (4, 1)) == [1.0] * 4
    assert pieces((4, 1), (1, 1)) == [0.25] * 4
    assert pieces((2, 2), (4, 1)) == [0.5] * 8
    assert pieces((3, 1), (2, 1)) == pytest.approx([2 / 3] * 2 + [1 / 3] * 2)


def test_the_host_makes_the_calls_that_the_runtime_makes():
    chain = make_chain(1, sizes=[4096])
    timeline = played(pair(), chain, cluster(("a", 1), ("b", 1)))
    # The segment, its cut gradient, one call for all copies, the sum, the update; one
    # call for all that arrives, and the join.
    assert timeline.host_s["a"] == pytest.approx(7 * HOST_CALL_S)
    alone = make_plan((make_stages([1]), 1))
    timeline = played(alone, chain, cluster(("a", 1)))
    assert timeline.host_s["a"] == pytest.approx(3 * HOST_CALL_S)


def test_a_border_between_equal_lanes_is_one_call():
    chain = make_chain(2)
    timeline = played(make_plan((make_stages([1, 1]), 1)), chain, cluster(("a", 2)))
    # Two segments of which the last is one program, two copies; norm, update a stage.
    assert timeline.host_s["a"] == pytest.approx((3 + 2 + 4) * HOST_CALL_S)


def test_waiting_behind_other_copies_is_the_ways_doing():
    chain = make_chain(1, sizes=[4096])
    replicas = [
        (
            tuple(
                dataclasses.replace(stage, devices=(f"a/{i}",))
                for stage in make_stages([1])
            ),
            1,
        )
        for i in range(4)
    ]
    plan = make_plan(*replicas, state=shared(store=1))
    machines = cluster(("a", 4), ("store", 1), gb_per_s=0.01)
    timeline = played(plan, chain, machines)
    for device in ("a/0", "a/3"):
        idle = timeline.idle_s[device]
        assert idle[Cause.SYNC] > 0.9 * timeline.step_s
        assert idle.get(Cause.PIPELINE, 0.0) < 0.01 * timeline.step_s


def test_a_home_that_computes_nothing_is_a_device_too():
    chain = make_chain(1, sizes=[4096])
    plan = make_plan((make_stages([1]), 1), state=shared(store=1))
    timeline = played(plan, chain, cluster(("a", 1), ("store", 1)))
    assert set(timeline.busy_s) == {"a/0", "store/0"}
    assert timeline.busy_s["store/0"][What.UPDATE] > 0
    assert set(timeline.link_bytes) == {"a out", "a in", "store out", "store in"}


def test_lanes_on_two_nodes_hold_the_ways_between_them():
    chain = make_chain(1, sizes=[4096])
    (stage,) = make_stages([1], lanes=2)
    stage = dataclasses.replace(stage, devices=("a/0", "b/0"))
    timeline = played(
        make_plan(((stage,), 1)), chain, cluster(("a", 1), ("b", 1), gb_per_s=0.01)
    )
    # Half of the gradient to the lane that keeps it, half of the parameters back.
    sent = chain.num_params * 4
    assert timeline.link_bytes["a out"] == pytest.approx(sent, rel=0.001)
    assert timeline.step_s == pytest.approx(sent / 0.01e9, rel=0.05)


def test_a_border_carries_the_narrower_dtype_and_no_cotangent_of_integers():
    chain = make_chain(2)
    first = dataclasses.replace(chain.layers[0], border_whole_bytes=64)
    chain = dataclasses.replace(chain, layers=(first, chain.layers[1]))
    wide, narrow = make_stages([1, 1])
    narrow = dataclasses.replace(narrow, dtype="bfloat16")
    for stages in ((wide, narrow), (dataclasses.replace(wide, dtype="bfloat16"), wide)):
        second = dataclasses.replace(
            narrow, dtype=stages[1].dtype, devices=("a/1",), layers=(1, 2)
        )
        plan = make_plan(((stages[0], second), 1))
        costs = PlanCosts(plan, chain, cluster(("a", 2)))
        ends = Place("r0.s0"), Place("r0.s1")
        forward = costs.border(*ends, 1, False)
        backward = costs.border(*reversed(ends), 1, True)
        assert forward.load.num_bytes == (64 + 192 // 2,) * 2
        assert backward.load.num_bytes == (192 // 2,) * 2
        casts_first = stages[0].dtype == "float32"
        assert (forward.split_s > 0, forward.merge_s > 0) == (
            casts_first,
            not casts_first,
        )


def test_copies_over_a_link_thinner_than_the_network_cards_share_it():
    nic = LinkProfile(latency_s=0.0, bytes_per_s=10e9)
    machines = cluster(("a", 4), ("b", 4), gb_per_s=1.0)
    nodes = tuple(dataclasses.replace(node, nic=nic) for node in machines.nodes)
    hops = Ways(dataclasses.replace(machines, nodes=nodes)).counted(
        (f"a/{i}", f"b/{i}") for i in range(4)
    )
    load = ways_load([(hops, 10**9, 1)])
    assert load.seconds == pytest.approx(4.0)
    kept = dict(zip(load.ways, load.holds_s, strict=True))
    assert kept == pytest.approx({"a > b": 4.0, "a out": 0.4, "b in": 0.4})


def test_another_system_cuts_the_border_over_the_shards_and_gathers_it():
    chain = make_chain(2)
    plan = make_plan((make_stages([1, 1], tensor=2), 1))
    carriage = Carriage(in_parts=True, message_s=3.0)
    costs = PlanCosts(plan, chain, cluster(("a", 4)), carriage=carriage)
    border = costs.border(Place("r0.s0"), Place("r0.s1"), 1, False)
    assert border.load.num_bytes == (128,) * 4
    assert border.merge_s == pytest.approx(3.0 + 128 / 100e9)


def test_each_tensor_shard_gets_the_whole_border():
    chain = make_chain(2)
    machines = cluster(("a", 4))
    for tensor in (1, 2):
        plan = make_plan((make_stages([1, 1], tensor=tensor), 1))
        costs = PlanCosts(plan, chain, machines)
        load = costs.border(Place("r0.s0"), Place("r0.s1"), 1, False).load
        assert load.num_bytes == (256,) * 2 * tensor
