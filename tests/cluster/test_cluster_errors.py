"""Every way to get a cluster wrong ends in one message that teaches."""

from pathlib import Path

import pytest

from hexijax.cluster import Cluster, ClusterError, DeviceProfile, LinkProfile
from tests.cluster.examples import SMALL


def message(text: str) -> str:
    """What a person reads who gives this cluster file."""
    with pytest.raises(ClusterError) as error:
        Cluster.from_toml(text)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "host_cores = 32\n",
            "",
            "cluster: nodes[0].host_cores is missing; a node needs it. Add a line "
            "`host_cores = ...`; docs/cluster.md shows every key.",
        ),
        (
            'name = "small"\n',
            "",
            "cluster: name is missing; a cluster has a name and nodes. Add `name`; "
            "docs/cluster.md has an example to start from.",
        ),
        (
            "h100-80g-sxm",
            "h100-80g-smx",
            "cluster: node a: kind 'h100-80g-smx' is neither in the catalog of 45 "
            "cards nor declared. Did you mean 'h100-80g-sxm'? `hexijax catalog` lists "
            "the cards; a table [kinds.NAME] declares one.",
        ),
        (
            "host_cores = 32",
            "host_core = 32",
            "cluster: nodes[0].host_core is no key that is known here; known: name, "
            "devices, host_memory_gib, host_cores, link, nic, host_link_gb_per_s, "
            "host_out_gb_per_s, host_update_mparams_per_s, host_return_gb_per_s, site, "
            "island, host, absent. "
            "Did you mean 'host_cores'?",
        ),
        (
            "memory_gib = 4\n",
            "memory_gib = 85899345920\n",
            "cluster: kinds.tiny.memory_gib is 85,899,345,920; it must be from 0.01 "
            "to 65,536 GiB. One GiB is 1024 MiB, 2**30 bytes.",
        ),
        (
            "memory_gb_per_s = 100",
            "memory_gb_per_s = -100",
            "cluster: kinds.tiny.memory_gb_per_s is -100; it must be from 0.000001 to "
            "100,000 GB/s. GB/s counts 1e9 bytes, one way: 10 Gbit/s is 1.25 GB/s.",
        ),
        (
            'kind = "tiny", count = 2',
            'kind = "tiny", count = 0',
            "cluster: nodes[1].devices[0].count is 0; it must be from 1 to 1,024. "
            "Leave the entry out where there is no device.",
        ),
        (
            'kind = "tiny", count = 2',
            'kind = "tiny", count = 1.5',
            "cluster: nodes[1].devices[0].count is 1.5; it must be a whole number. "
            "Leave the entry out where there is no device.",
        ),
        (
            'kind = "tiny", count = 2',
            'kind = "tiny", count = "two"',
            "cluster: nodes[1].devices[0].count is 'two'; it must be a number. Leave "
            "the entry out where there is no device.",
        ),
        (
            "latency_us = 50",
            "latency_us = 7.2e9",
            "cluster: links.between_nodes.latency_us is 7,200,000,000; it must be from "
            "0 to 10,000,000 us. One second is 1,000,000 us.",
        ),
        (
            "latency_us = 50",
            "latency_us = nan",
            "cluster: links.between_nodes.latency_us is NaN; it must be a number of "
            "us. One second is 1,000,000 us.",
        ),
        (
            'name = "b"',
            'name = "a"',
            "cluster: nodes[0] and nodes[1] are both called 'a'; devices are called "
            "after their node, so names must differ. Rename one.",
        ),
        (
            'name = "b"',
            'name = "b/1"',
            "cluster: nodes[1].name is 'b/1'; it must be a name of letters, digits, "
            "'-', '_' and '.', at most 100 of them.",
        ),
        (
            "in_node = { latency_us = 5, bandwidth_gb_per_s = 100 }\n",
            "",
            "cluster: nothing joins devices a/0 and a/1; every two devices need a "
            "link. Give node a a `link`, or links.in_node for all.",
        ),
        (
            "between_nodes = { latency_us = 50, bandwidth_gb_per_s = 1.25 }\n",
            "",
            "cluster: nothing joins nodes 'a' and 'b'; every two nodes need a link. "
            "Give links.between_nodes, a pair in links.node_pairs or "
            "links.site_pairs, or both nodes a nic.",
        ),
        (
            "format = 1",
            "format = 2",
            "cluster: format is 2; this hexijax reads format 1. Write `format = 1` at "
            "the top, or use the hexijax that wrote the file.",
        ),
        (
            "format = 1\n",
            "",
            "cluster: format is missing; this hexijax reads format 1. Write `format = "
            "1` at the top, or use the hexijax that wrote the file.",
        ),
        (
            'vendor = "other"',
            'vendor = "nvidai"',
            "cluster: kinds.tiny.vendor is 'nvidai'; it must be one of nvidia, amd, "
            "google, huawei, cpu, other. Did you mean 'nvidia'?",
        ),
        (
            'vendor = "other"',
            'base = "h100-80g-smx"',
            "cluster: kinds.tiny.base is 'h100-80g-smx', which is no kind of the "
            "catalog or above in this file. Did you mean 'h100-80g-sxm'? `hexijax "
            "catalog` lists the kinds.",
        ),
        (
            'vendor = "other"',
            'vendor = "other"\nspeed = 2',
            "cluster: kinds.tiny.speed is 2 times nothing: the kind has no base. Add "
            "`base = ...`, or give peak_tflops instead.",
        ),
        (
            "peak_tflops = { float32 = 2 }",
            "peak_tflops = { fp32 = 2 }",
            "cluster: kinds.tiny.peak_tflops has the key 'fp32'; it knows float64, "
            "float32, tf32, float16, bfloat16, float8, int8. Did you mean 'tf32'?",
        ),
        (
            "peak_tflops = { float32 = 2 }",
            'peak_tflops = { float32 = 2 }\nnative_dtypes = ["bfloat16"]',
            "cluster: kinds.tiny is refused: kind tiny computes natively in "
            "bfloat16 but has no peak for it; peaks: float32. Add the peak, or take "
            "the dtype out of the native ones.",
        ),
        (
            "memory_gib = 4\n",
            "memory_gib = 4\nusable_memory_gib = 5\n",
            "cluster: kinds.tiny is refused: kind tiny has 5,368,709,120 usable "
            "of 4,294,967,296 bytes of memory; usable is at most nominal. Lower the "
            "usable figure, or leave it out for the rule's.",
        ),
        (
            'kind = "tiny", count = 2',
            'kind = "tiny", count = 2, usable_memory_gib = 5',
            "cluster: device b/0 has 5,368,709,120 usable bytes of memory, its kind "
            "tiny 4,294,967,296 in all; usable is at most all. Lower "
            "usable_memory_gib.",
        ),
        (
            "host_cores = 32",
            "host_cores = 32\nabsent = [2]",
            "cluster: nodes[0] is refused: node a lacks its device 2 but has "
            "only 2 devices, 0 to 1. Take the index out of `absent`.",
        ),
        (
            'format = 1\nname = "small"\n',
            'format = 1\nname = "small"\nprofile = "nowhere.toml"\n',
            "'nowhere.toml' cannot be read: No such file or directory. Give the path "
            "of a TOML file in UTF-8, from here or from the file that names it.",
        ),
        (
            "[kinds.tiny]",
            "[kinds.tiny",
            "cluster is not TOML: Expected ']' at the end of a table declaration (at "
            "line 4, column 12). Quote text, write key = value, and look at "
            "experiments/clusters for examples.",
        ),
    ],
)
def test_a_slip_in_the_file(old: str, new: str, expected: str):
    assert SMALL.count(old)
    assert message(SMALL.replace(old, new, 1)) == expected


@pytest.mark.parametrize(
    ("level", "between", "expected"),
    [
        (
            "device_pairs",
            '["a/0", "b/2"]',
            "cluster: links.device_pairs names the device 'b/2', which is none of the "
            "cluster's 6. Did you mean 'b/1'? Correct the name, or take the link out.",
        ),
        (
            "node_pairs",
            '["a", "bb"]',
            "cluster: links.node_pairs names the node 'bb', which is none of the "
            "cluster's 3. Did you mean 'b'? Correct the name, or take the link out.",
        ),
        (
            "site_pairs",
            '["north", "sout"]',
            "cluster: links.site_pairs names the site 'sout', which is none of the "
            "cluster's 2. Did you mean 'south'? Correct the name, or take the link "
            "out.",
        ),
        (
            "node_pairs",
            '["a", "a"]',
            "cluster: links.node_pairs joins the node 'a' with itself; a link has two "
            "ends. Links inside a node are the node's `link`.",
        ),
        (
            "node_pairs",
            '["a"]',
            "cluster: links.node_pairs[0].between has 1 items; it must have from 2 to "
            "2.",
        ),
    ],
)
def test_a_named_link_with_wrong_ends(level: str, between: str, expected: str):
    link = "{ latency_us = 1, bandwidth_gb_per_s = 1 }"
    pair = f"\n[[links.{level}]]\nbetween = {between}\nlink = {link}\n"
    assert message(SMALL + pair) == expected


def test_the_same_pair_twice():
    link = "{ latency_us = 1, bandwidth_gb_per_s = 1 }"
    pairs = "".join(
        f"\n[[links.node_pairs]]\nbetween = {ends}\nlink = {link}\n"
        for ends in ('["a", "b"]', '["b", "a"]')
    )
    assert message(SMALL + pairs) == (
        "cluster: links is refused: node_pairs gives 2 links between a and "
        "b; a link counts for both directions and is given once. Keep one of them."
    )


def test_a_table_of_times_that_falls():
    slip = SMALL.replace(
        "latency_us = 5,", "latency_us = 5, measured_bytes_us = [[10, 9], [20, 8]],"
    )
    assert message(slip) == (
        "cluster: links.in_node is refused: its times go from 10 bytes in 9e-06 "
        "s to 20 bytes in 8e-06 s; from no bytes at the latency on, sizes must grow "
        "and times must not fall. Sort the table and keep the larger of two times."
    )


def test_the_file_is_named(tmp_path: Path):
    path = tmp_path / "lab.toml"
    path.write_text(SMALL.replace("count = 2", "count = 9999", 1))
    with pytest.raises(
        ClusterError, match=r"^lab\.toml: nodes\[0\]\.devices\[0\]\.cou"
    ):
        Cluster.from_toml(str(path))


def test_a_profile_with_an_unknown_kind(tmp_path: Path):
    path = tmp_path / "measured.toml"
    path.write_text("format = 1\n[kinds.h100-80g-smx]\ntdp_w = 500\n")
    with pytest.raises(ClusterError) as error:
        Cluster.from_toml(SMALL).with_profiles(path)
    assert str(error.value) == (
        "measured.toml: kinds.h100-80g-smx.vendor is missing; a kind needs it. Add a "
        "line `vendor = ...`; docs/cluster.md shows every key. Did you mean "
        "'h100-80g-sxm'?"
    )


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (
            lambda cluster: cluster.device("a/7"),
            "cluster small has no device 'a/7'. Did you mean 'a/1'? It has 6: a/0, "
            "a/1, b/0, b/1, c/0, c/1.",
        ),
        (
            lambda cluster: cluster.without("bb"),
            "cluster small has no node or device 'bb'. Did you mean 'b'? It has 9: a, "
            "b, c, a/0, a/1, b/0, b/1, c/0, ....",
        ),
        (
            lambda cluster: cluster.without("a", "b", "c"),
            "cluster small: nothing is left without a, b, c; a cluster has at least "
            "one device of its 6. Keep one.",
        ),
        (
            lambda cluster: cluster.link("a/0", "a/0"),
            "cluster small: a link from a/0 to itself was asked for; a link joins two "
            "devices, and what stays on one moves no byte.",
        ),
    ],
)
def test_asking_a_cluster_for_what_it_has_not(ask, expected: str):
    with pytest.raises(ClusterError) as error:
        ask(Cluster.from_toml(SMALL))
    assert str(error.value) == expected


def test_records_made_in_python_obey_the_same_rules():
    with pytest.raises(ClusterError) as error:
        LinkProfile(latency_s=-1.0, bytes_per_s=1e9)
    assert str(error.value) == (
        "LinkProfile: latency_s is -1; it must be from 0 to 10 s. One second is "
        "1,000,000 us."
    )
    with pytest.raises(
        ClusterError, match="nominal_memory_bytes is 1.000e\\+19; it must"
    ):
        DeviceProfile(
            kind="x",
            vendor="cpu",
            nominal_memory_bytes=10**19,
            dense_flops_per_s={"float32": 1e12},
            memory_bytes_per_s=1e9,
            host_link_bytes_per_s=1e9,
        )
