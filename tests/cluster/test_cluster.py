"""Clusters load, resolve links, lose members, and survive being written."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from hexijax.cluster import (
    Cluster,
    ClusterError,
    DeviceGroup,
    LinkProfile,
    Links,
    NamedLink,
    Node,
    catalog,
)
from tests.cluster.examples import CLUSTER_FILES, SMALL


@pytest.mark.parametrize("path", CLUSTER_FILES, ids=lambda path: path.stem)
def test_shipped_files_load_and_round_trip(path: Path):
    cluster = Cluster.from_toml(path)
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    assert path.read_text().startswith("# "), "what it is, and where figures come from"


def test_the_shipped_clusters_are_the_promised_ones():
    kinds = {
        path.stem: " ".join(device.kind for device in Cluster.from_toml(path).devices)
        for path in CLUSTER_FILES
    }
    assert kinds == {
        "a100_v100": " ".join(["a100-40g-sxm"] * 4 + ["v100-16g-sxm"] * 4),
        "cephalo": "l4-24g l4-24g a6000-48g p40-24g",
        "cpu_x2": "cpu-card cpu-card",
        "emulated": "h100-80g-sxm h100-half h100-quarter h100-80g-sxm",
        "four_nodes": " ".join(["cpu-one"] * 8),
        "h100": "h100-80g-sxm",
        "h100_capped": "h100-40g",
        "h100_x4": " ".join(["h100-80g-sxm"] * 4),
        "h200": "h200-141g-sxm",
        "h200_x2": "h200-141g-sxm h200-141g-sxm",
        "hexiscale": " ".join(
            ["a800-80g-sxm"] * 3 + ["rtx4090-24g"] * 3 + ["rtx3090-24g"] * 2
        ),
        "quickstart": " ".join(["cpu-fast"] * 4 + ["cpu-slow"] * 4),
        "three": "cpu-fast cpu-fast cpu-fast cpu-slow",
        "three_generations": " ".join(
            ["a100-40g-pcie"] * 2 + ["rtx3090-24g"] * 4 + ["h100-80g-pcie"]
        ),
    }


def test_quickstart_stands_for_eight_cpu_devices_of_one_client():
    cluster = Cluster.from_toml(CLUSTER_FILES[0].with_name("quickstart.toml"))
    fast, slow = cluster.device("fast/0").profile, cluster.device("slow/3").profile
    assert cluster.on_cpu
    assert list(cluster.islands) == ["here"]
    assert len(cluster.islands["here"]) == 8
    ratio = fast.dense_flops_per_s["float32"] / slow.dense_flops_per_s["float32"]
    assert ratio == 2


def test_links_resolve_from_the_nearest_level_outwards():
    named = SMALL + "".join(
        f'\n[[links.{level}]]\nbetween = ["{a}", "{b}"]\n'
        f"link = {{ latency_us = 1, bandwidth_gb_per_s = {rate} }}\n"
        for level, a, b, rate in [
            ("device_pairs", "a/0", "b/1", 11),
            ("device_pairs", "a/0", "a/1", 12),
            ("node_pairs", "b", "a", 13),
            ("site_pairs", "north", "south", 14),
        ]
    )
    cluster = Cluster.from_toml(named)

    def gb_per_s(a: str, b: str) -> float:
        assert cluster.link(a, b) == cluster.link(b, a)
        return cluster.link(a, cluster.device(b)).bytes_per_s / 1e9

    assert gb_per_s("a/0", "b/1") == 11  # the devices' own
    assert gb_per_s("a/0", "a/1") == 12  # also before the node's
    assert gb_per_s("b/0", "b/1") == 100  # in the node
    assert gb_per_s("a/1", "b/1") == 13  # the nodes'
    assert gb_per_s("a/1", "c/0") == 14  # the sites'
    assert gb_per_s("b/0", "c/0") == 1.25  # between nodes


def test_without_a_link_between_nodes_the_slower_nic_counts():
    def node(name: str, bytes_per_s: float) -> Node:
        return Node(
            name=name,
            devices=(DeviceGroup(kind="t4-16g", count=1),),
            host_memory_bytes=2**36,
            host_cores=8,
            nic=LinkProfile(latency_s=5e-5, bytes_per_s=bytes_per_s),
        )

    cluster = Cluster(name="nics", nodes=(node("a", 1e9), node("b", 3e9)))
    assert cluster.link("b/0", "a/0").bytes_per_s == 1e9


def test_a_nodes_own_figures_overrule_its_kinds():
    cluster = Cluster.from_toml(
        SMALL.replace(
            'devices = [{ kind = "h100-80g-sxm", count = 2 }]',
            'devices = [{ kind = "H100", count = 2, usable_memory_gib = 20 }]\n'
            "host_link_gb_per_s = 12\n"
            "link = { latency_us = 2, bandwidth_gb_per_s = 7 }\n"
            'island = "left"',
        )
    )
    device = cluster.device("a/1")
    assert device.kind == "h100-80g-sxm"  # by what it is also called
    assert device.usable_memory_bytes == 20 * 2**30
    assert device.host_link_bytes_per_s == 12e9
    assert cluster.link("a/0", "a/1") == LinkProfile(latency_s=2e-6, bytes_per_s=7e9)
    assert cluster.islands["left"] == ("a/0", "a/1")


def test_transfer_time_is_a_line_or_the_measured_table():
    line = LinkProfile(latency_s=1e-5, bytes_per_s=1e9)
    assert line.transfer_s(0) == 1e-5
    assert line.transfer_s(10**9) == pytest.approx(1 + 1e-5)
    table = LinkProfile(
        latency_s=1e-5, bytes_per_s=1e9, measured=((1000, 3e-5), (3000, 5e-5))
    )
    assert table.transfer_s(0) == 1e-5
    assert table.transfer_s(500) == pytest.approx(2e-5)
    assert table.transfer_s(1000) == pytest.approx(3e-5)
    assert table.transfer_s(2000) == pytest.approx(4e-5)
    assert table.transfer_s(4000) == pytest.approx(5.1e-5)


def test_members_leave_and_the_others_keep_their_names():
    cluster = Cluster.from_toml(
        SMALL + '\n[[links.device_pairs]]\nbetween = ["a/0", "b/0"]\n'
        "link = { latency_us = 1, bandwidth_gb_per_s = 9 }\n"
    )
    left = cluster.without("a/0", "c")
    assert [device.name for device in left.devices] == ["a/1", "b/0", "b/1"]
    assert left.links.device_pairs == ()
    assert [profile.kind for profile in left.profiles] == ["h100-80g-sxm", "tiny"]
    assert left.without("a/1") == cluster.without("a", "c")
    assert Cluster.from_toml(left.to_toml()) == left
    assert cluster.without() == cluster


def test_a_profile_changes_the_nodes_and_pairs_it_names_and_no_others():
    plain = Cluster.from_toml(SMALL)
    names = [node.name for node in plain.nodes]
    profile = f"""\
format = 1
[measured.of-elsewhere]
card = "one that this cluster has not"
[kinds.of-elsewhere]
source = "measured"
[[nodes]]
name = "{names[0]}"
host_link_gb_per_s = 20
link = {{ latency_us = 3, bandwidth_gb_per_s = 100 }}
[[nodes]]
name = "of-elsewhere"
host_link_gb_per_s = 1
[[links.node_pairs]]
between = ["{names[0]}", "of-elsewhere"]
link = {{ latency_us = 1, bandwidth_gb_per_s = 1 }}
"""
    measured = plain.with_profiles(profile)
    first, *others = measured.nodes
    assert first.host_link_bytes_per_s == 20e9
    assert first.link is not None
    assert first.link.latency_s == pytest.approx(3e-6)
    assert others == [*plain.nodes[1:]]
    assert measured.links == plain.links
    assert measured.profiles == plain.profiles
    nameless = "format = 1\n[[nodes]]\nhost_link_gb_per_s = 1\n"
    with pytest.raises(ClusterError, match="belongs to a node. Name it"):
        plain.with_profiles(nameless)
    with pytest.raises(ClusterError, match="host_cores"):
        plain.with_profiles(f'{nameless}name = "a"\nhost_cores = 2\n')


def test_a_profile_of_other_machines_alone_is_refused_where_one_is_asked_for():
    plain = Cluster.from_toml(SMALL)
    names = [node.name for node in plain.nodes]
    elsewhere = (
        'format = 1\n[measured]\nodd = { card = "odd" }\n[kinds.odd]\nvendor = "cpu"\n'
        '[[nodes]]\nname = "elsewhere"\nhost_link_gb_per_s = 1\n'
    )
    assert plain.with_profiles(elsewhere) == plain
    with pytest.raises(ClusterError) as error:
        plain.with_profiles(elsewhere, of_others=False)
    kinds = ", ".join(sorted({device.profile.kind for device in plain.devices}))
    assert str(error.value) == (
        f"The profile measured nothing of cluster small: that has {kinds} in "
        f"{', '.join(sorted(names))}, and the file is of odd in nodes elsewhere. "
        "Measure this cluster by `hexijax profile EXPERIMENT`, or plan by data sheets, "
        "without the file."
    )
    with pytest.raises(ClusterError, match="and the file is of nothing yet"):
        plain.with_profiles("format = 1\n", of_others=False)
    of_a_node = elsewhere.replace("elsewhere", names[0])
    pair = (
        f'format = 1\n[[links.node_pairs]]\nbetween = ["{names[0]}", "{names[1]}"]\n'
        "link = { latency_us = 1, bandwidth_gb_per_s = 1 }\n"
    )
    of_a_kind = "format = 1\n[kinds.t4-16g]\ntdp_w = 60\n"
    for text in (of_a_node, pair, of_a_kind):
        told = plain.with_profiles(text, of_others=False)
        assert told == plain.with_profiles(text) != plain


def test_a_profile_file_overrules_single_figures(tmp_path: Path):
    profile = tmp_path / "measured.toml"
    profile.write_text(
        "format = 1\n[kinds.h100-80g-sxm]\npeak_tflops = { bfloat16 = 800 }\n"
        'source = "measured"\n'
        'layer_times = [{ layer = "block", microbatch = 4, forward_s = 0.0125 }]\n'
        "[kinds.l4-24g]\ntdp_w = 60\n"
    )
    plain = Cluster.from_toml(SMALL)
    measured = plain.with_profiles(profile)
    card = measured.device("a/0").profile
    assert card.dense_flops_per_s["bfloat16"] == 800e12
    assert card.dense_flops_per_s["float32"] == 66.9e12
    assert card.layer_times[0]["forward_s"] == 0.0125
    assert card.source == "measured"
    assert measured.fingerprint() != plain.fingerprint()

    (tmp_path / "lab.toml").write_text('profile = "measured.toml"\n' + SMALL)
    assert Cluster.from_toml(tmp_path / "lab.toml") == measured
    assert Cluster.from_toml(measured.to_toml()) == measured


def test_a_kind_starts_from_a_base():
    cluster = Cluster.from_toml(
        SMALL.replace(
            "[kinds.tiny]",
            '[kinds.h100-capped]\nbase = "h100-80g-sxm"\nspeed = 0.5\nmemory_gib = 40\n'
            "\n[kinds.tiny]",
        ).replace('"h100-80g-sxm", count', '"h100-capped", count')
    )
    card, whole = cluster.device("a/0").profile, catalog.get("h100-80g-sxm")
    assert card.dense_flops_per_s["bfloat16"] == 0.5 * 989.4e12
    assert card.usable_memory_bytes < card.nominal_memory_bytes == 40 * 2**30
    assert card.memory_bytes_per_s == whole.memory_bytes_per_s
    assert card.source.startswith(whole.source)


def test_the_fingerprint_is_of_the_content():
    cluster = Cluster.from_toml(SMALL)
    assert cluster.fingerprint() == Cluster.from_toml(cluster.to_toml()).fingerprint()
    assert len(cluster.fingerprint()) == 12
    assert int(cluster.fingerprint(), 16)
    slower = Cluster.from_toml(SMALL.replace("1.25", "1.24"))
    assert slower.fingerprint() != cluster.fingerprint()
    assert cluster.without("a/0").fingerprint() != cluster.fingerprint()


def test_the_fingerprint_repeats_in_another_process():
    path = CLUSTER_FILES[0].with_name("quickstart.toml")
    program = (
        "import sys; from hexijax.cluster import Cluster; "
        "print(Cluster.from_toml(sys.argv[1]).fingerprint(), 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [Cluster.from_toml(path).fingerprint(), "False"]


def test_clusters_made_in_python_pickle_and_hash():
    link = LinkProfile(latency_s=0.0, bytes_per_s=1e9)
    cluster = Cluster(
        name="made",
        nodes=(
            Node(
                name="n",
                devices=(DeviceGroup(kind="l4-24g", count=2),),
                host_memory_bytes=2**36,
                host_cores=8,
            ),
        ),
        links=Links(device_pairs=(NamedLink(between=("n/0", "n/1"), link=link),)),
    )
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(cluster) == hash(Cluster.from_json(cluster.to_json()))
    assert cluster.link("n/0", "n/1") == link
