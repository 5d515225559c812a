"""What a host gives each of its devices: rates as measured, rules elsewhere."""

import dataclasses

import pytest

from hexijax.cluster import Cluster
from hexijax.costs.host_rates import host_side

CLUSTERS = "experiments/clusters/{}.toml"


def test_nominal_links_reach_what_pinned_copies_reached_of_pcie_5():
    host = host_side(Cluster.from_toml(CLUSTERS.format("h100")), "h100/0")
    assert host.in_bytes_per_s == pytest.approx(52e9)
    assert host.out_bytes_per_s == pytest.approx(46e9)
    assert host.return_bytes_per_s == 7e9
    assert host.update_params_per_s == pytest.approx(2.3e9 * 16 / 64)
    assert host.memory_bytes == 128 * 2**30
    assert host.has_pinned


def test_devices_of_a_node_share_its_memory_and_cores_but_not_their_links():
    cluster = Cluster.from_toml(CLUSTERS.format("h100_x4"))
    host = host_side(cluster, "h100/2")
    assert (host.in_bytes_per_s, host.out_bytes_per_s) == (52e9, 46e9)
    assert host.update_params_per_s == pytest.approx(2.3e9 / 4)
    assert host.memory_bytes == 128 * 2**30
    assert host_side(cluster, "h100/2", sharing=1).memory_bytes == 512 * 2**30


def test_a_measured_link_is_taken_both_ways():
    cluster = Cluster.from_toml(CLUSTERS.format("h100"))
    node = dataclasses.replace(cluster.nodes[0], host_link_bytes_per_s=2.7e9)
    slow = host_side(dataclasses.replace(cluster, nodes=(node,)), "h100/0")
    assert slow.in_bytes_per_s == slow.out_bytes_per_s == slow.return_bytes_per_s
    assert slow.in_bytes_per_s == 2.7e9
    assert "measured link" in slow.source
