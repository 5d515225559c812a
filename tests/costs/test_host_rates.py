"""What a host gives each of its devices: rates as measured, rules elsewhere."""

import dataclasses

import pytest

from hexijax.cluster import Cluster
from hexijax.costs import PlanCosts
from hexijax.costs.host_rates import host_side
from hexijax.costs.rates import HOST_PIECE_S
from hexijax.plan.plan import Memory, Schedule, StateShare
from hexijax.program import names
from hexijax.program.program import Prefetch
from tests.plan.examples import make_cluster
from tests.program.examples import make_chain, make_plan, make_stages

CLUSTERS = "experiments/clusters/{}.toml"


def test_nominal_links_reach_what_pinned_copies_reached_of_pcie_5():
    host = host_side(Cluster.from_toml(CLUSTERS.format("h100")), "h100/0")
    assert host.in_bytes_per_s == pytest.approx(52e9)
    assert host.out_bytes_per_s == pytest.approx(46e9)
    assert host.return_bytes_per_s == 9e9
    assert host.update_params_per_s == pytest.approx(1.6e9)
    assert host.memory_bytes == int(121 * 2**30 / 1.1), "beside its process and pool"
    assert host.has_pinned


def test_devices_of_a_node_share_its_memory_and_cores_but_not_their_links():
    cluster = Cluster.from_toml(CLUSTERS.format("h100_x4"))
    host = host_side(cluster, "h100/2")
    assert (host.in_bytes_per_s, host.out_bytes_per_s) == (52e9, 46e9)
    assert host.update_params_per_s == pytest.approx(3.2e9 / 4)  # of 64 cores
    whole = host_side(cluster, "h100/2", sharing=1).memory_bytes
    assert whole == int(505 * 2**30 / 1.1)
    assert host.memory_bytes == whole // 4


def test_a_measured_link_is_taken_both_ways():
    cluster = Cluster.from_toml(CLUSTERS.format("h100"))
    node = dataclasses.replace(cluster.nodes[0], host_link_bytes_per_s=2.7e9)
    slow = host_side(dataclasses.replace(cluster, nodes=(node,)), "h100/0")
    assert slow.in_bytes_per_s == slow.out_bytes_per_s == slow.return_bytes_per_s
    assert slow.in_bytes_per_s == 2.7e9
    assert "measured link" in slow.source


def test_every_array_of_a_copy_is_paid_for_and_small_state_is_one(monkeypatch):
    chain, cluster = make_chain(2, sizes=[64, 64]), make_cluster()
    stages = make_stages([2], prefix="n0", segments=[[1, 1]])
    state = StateShare(groups=("*",), shares={}, memory=Memory.HOST)
    plan = make_plan((stages, 1), schedule=Schedule.LAYERED, state=(state,))
    host = host_side(cluster, "n0/0")

    def came_s() -> float:
        """A chunk of state to its device: two leaves, master and two moments each."""
        costs = PlanCosts(plan, chain, cluster)
        (group,) = {g.name for g in costs.groups.values() if g.layers == (0,)}
        fetch = Prefetch(buffer=names.state("r0.s0", group), pool="state")
        return costs.duration_s(fetch)

    bytes_s = 3 * 4 * (64 * 64 + 64) / host.in_bytes_per_s
    assert came_s() == pytest.approx(bytes_s + 3 * HOST_PIECE_S)
    monkeypatch.setattr("hexijax.program.resting.LOOSE_SIZE", 64)
    # Without a cast each master is somebody's parameter, so it rests by itself.
    assert came_s() == pytest.approx(bytes_s + 5 * HOST_PIECE_S)
