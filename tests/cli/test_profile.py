"""`hexijax profile`: measured once, gone on with, dropped where it does not hold."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hexijax.cli.main import main
from hexijax.cluster import Cluster

pytestmark = pytest.mark.usefixtures("backend")

TINY = str(Path(__file__).with_name("tiny.py"))

TOO_MANY = 2**22
"""Samples whose activations take 128 GiB; XLA 0.12 cannot compile far more."""

CLUSTER = """\
format = 1
name = "two"

[kinds.cpu-fast]
vendor = "cpu"
memory_gib = 2
peak_tflops = { float32 = 0.05 }
memory_gb_per_s = 10
host_link_gb_per_s = 10
source = "declared"

[kinds.cpu-slow]
base = "cpu-fast"
speed = 0.5
source = "declared, too"

[[nodes]]
name = "box"
devices = [{ kind = "cpu-fast", count = 2 }, { kind = "cpu-slow", count = 1 }]
host_memory_gib = 4
host_cores = 2

[links]
in_node = { latency_us = 100, bandwidth_gb_per_s = 4 }
"""

ONE = CLUSTER.replace('count = 2 }, { kind = "cpu-slow", count = 1 }', "count = 1 }")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster, and a profile of it."""
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "two.toml").write_text(CLUSTER)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
            patch.setenv(name, os.environ.get(name, ""))
        assert profile(folder, "--sizes", "1", "--seconds", "900") == 0
    return folder


def profile(folder: Path, *more: str) -> int:
    files = ("--cluster", str(folder / "two.toml"), "--out", str(folder / "p.toml"))
    return main(["profile", TINY, *files, "--set", "width=2048", *more])


def read(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "p.toml").read_text())


def layers(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    rows = document["kinds"][kind]["layer_times"]
    return [row for row in rows if "forward_s" in row]


def test_each_kind_has_times_by_microbatch_degree_and_policy(folder: Path):
    document = read(folder)
    for kind, degrees in (("cpu-fast", {1, 2}), ("cpu-slow", {1})):
        rows = layers(document, kind)
        keys = {(r["tensor"], r["samples"], r["remat"]) for r in rows}
        assert keys == {(t, 1, p) for t in degrees for p in ("none", "dots", "full")}
        assert len(rows) == 3 * len(keys), "embedding, blocks and head are unlike"
        for row in rows:
            assert row["forward_s"] > 0 < row["backward_s"]
            assert row["apart_forward_s"] >= row["forward_s"]
        kept = {r["remat"]: r["residual_bytes"] for r in rows if r["residual_bytes"]}
        assert kept["none"] > kept["full"]
        about = document["measured"][kind]
        assert {"card", "jax", "jaxlib", "date"} <= about.keys()
        assert about["call_us"] > 0 < about["streamed_mparams_per_s"]
        assert len(about["host_in_bytes_us"]) == len(about["host_out_bytes_us"]) > 4


def test_a_microbatch_without_memory_ends_its_row_and_is_recorded(
    tmp_path: Path, capsys
):
    (tmp_path / "two.toml").write_text(ONE)
    sizes = ("--sizes", str(TOO_MANY), str(2 * TOO_MANY))
    assert profile(tmp_path, *sizes, "--seconds", "900") == 0
    said = capsys.readouterr().err
    assert f"microbatch {TOO_MANY}, remat full: out of memory; larger" in said
    assert f"microbatch {2 * TOO_MANY}" not in said, "a larger one is not tried"
    rows = read(tmp_path)["kinds"]["cpu-fast"]["layer_times"]
    without = [row for row in rows if row.get("out_of_memory")]
    assert {row["remat"] for row in without} == {"none", "dots", "full"}
    assert {row["samples"] for row in without} == {TOO_MANY}
    before = (tmp_path / "p.toml").read_text()
    assert profile(tmp_path, *sizes) == 0
    assert (tmp_path / "p.toml").read_text() == before


def test_links_and_hosts_go_into_the_cluster(folder: Path):
    declared = Cluster.from_toml(folder / "two.toml")
    cluster = declared.with_profiles(folder / "p.toml")
    node = cluster.node("box")
    assert node.host_link_bytes_per_s
    assert node.host_out_bytes_per_s
    assert node.host_update_params_per_s
    measured = read(folder)["measured"]
    about = next(x for x in measured.values() if "host_update_alone_mparams_per_s" in x)
    assert about["host_update_alone_mparams_per_s"] > 0
    assert about["host_beside_update_gb_per_s"] > 0
    assert node.host_return_bytes_per_s
    for pair in (("box/0", "box/1"), ("box/0", "box/2"), ("box/1", "box/2")):
        assert not declared.link(*pair).measured
        sizes = [size for size, _ in cluster.link(*pair).measured]
        assert sizes == sorted(sizes)
        assert len(sizes) > 4
    assert "layers measured on cpu, JAX" in cluster.device("box/0").profile.source
    # The same by the cluster file's own word.
    named = folder / "named.toml"
    named.write_text('profile = "p.toml"\n' + CLUSTER)
    assert Cluster.from_toml(named) == cluster


def test_a_plan_reads_it_and_says_what_it_used(folder: Path, tmp_path: Path, capsys):
    files = ("--cluster", str(folder / "two.toml"), "--out", str(tmp_path))
    given = ("--profile", str(folder / "p.toml"))
    assert main(["plan", TINY, *files, *given, "--set", "width=2048"]) == 0
    said = capsys.readouterr().err
    assert "note: cpu-fast: 18 times of layers; layers measured on cpu, JAX" in said
    assert (
        "note: measured of box: host link, way back to the host, host updates and"
        in said
    )
    saved = json.loads((tmp_path / "tiny" / "plan.json").read_text())
    assert saved["cluster"] == json.loads(
        json.dumps(
            Cluster.from_toml(folder / "two.toml")
            .with_profiles(folder / "p.toml")
            .to_json()
        )
    )


def test_what_is_missing_is_measured_and_the_budget_is_kept(tmp_path: Path, capsys):
    (tmp_path / "two.toml").write_text(ONE)
    assert profile(tmp_path, "--sizes", "1", "--seconds", "1e-9") == 0
    said = capsys.readouterr().out
    assert "measurements are missing; the same command again" in said
    assert "--set plan= has the planner make another." in said
    assert "kinds" not in read(tmp_path)
    assert profile(tmp_path, "--sizes", "1", "--seconds", "4") == 0
    part = read(tmp_path)
    assert profile(tmp_path, "--sizes", "1", "--seconds", "900") == 0
    whole, said = read(tmp_path), capsys.readouterr()
    assert "measurements are in the file already" in said.err
    for kind, about in part["measured"].items():
        assert about.items() <= whole["measured"][kind].items()
    assert len(layers(whole, "cpu-fast")) == 9
    assert "measurements are missing" not in said.out.splitlines()[-1]


def test_cards_that_are_not_here_are_refused_with_what_profile_can_do(
    tmp_path: Path, capsys
):
    (tmp_path / "two.toml").write_text(
        'format = 1\nname = "lab"\n[[nodes]]\nname = "box"\nhost_memory_gib = 16\n'
        "host_cores = 4\nlink = { latency_us = 15, bandwidth_gb_per_s = 12 }\n"
        'devices = [{ kind = "rtx4090-24g", count = 2 }]\n'
    )
    assert profile(tmp_path, "--sizes", "1") == 2
    assert capsys.readouterr().err == (
        "Error: Cluster 'lab' has 2 accelerator devices; JAX sees 0 of them here. Give "
        "a cluster file of what this machine has, or let forced CPU devices stand in: "
        "`run --emulate` or a Trainer's emulate=True.\n"
    )
    assert not (tmp_path / "p.toml").exists()


def test_another_jax_is_measured_anew(folder: Path, tmp_path: Path, capsys):
    (tmp_path / "two.toml").write_text(CLUSTER)
    document = (folder / "p.toml").read_text()
    now = read(folder)["measured"]["cpu-fast"]["jax"]
    kept, changed = document.split("cpu-fast = {", 1)
    changed = changed.replace(f'jax = "{now}"', 'jax = "0.0.1"', 1)
    (tmp_path / "p.toml").write_text(f"{kept}cpu-fast = {{{changed}")
    assert profile(tmp_path, "--sizes", "1", "--seconds", "1e-9") == 0
    says = f"cpu-fast is measured anew: jax 0.0.1 is now {now}."
    assert says in capsys.readouterr().err
    left = read(tmp_path)
    assert left["kinds"].keys() == {"cpu-slow"}
    assert layers(left, "cpu-slow") == layers(read(folder), "cpu-slow")
    assert "nodes" not in left, "the node has the kind that changed"
    assert "call_us" not in left["measured"]["cpu-fast"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("format = 2", "this hexijax reads format 1"),
        ("format = 1\nlayers = 3", "layers"),
    ],
)
def test_another_file_is_not_written_over(tmp_path: Path, capsys, text: str, says: str):
    (tmp_path / "two.toml").write_text(CLUSTER)
    (tmp_path / "p.toml").write_text(text)
    assert profile(tmp_path) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "p.toml").read_text() == text


def test_one_node_of_a_cluster_is_measured_alone(tmp_path: Path, capsys):
    quickstart = Path(__file__).parents[2] / "experiments/clusters/quickstart.toml"
    files = ("--cluster", str(quickstart), "--out", str(tmp_path / "p.toml"))
    assert main(["profile", TINY, *files, "--node", "slow", "--seconds", "3"]) == 0
    assert read(tmp_path)["measured"].keys() == {"cpu-slow"}
    assert main(["profile", TINY, *files, "--node", "slwo"]) == 2
    assert "has no node 'slwo'. Did you mean 'slow'?" in capsys.readouterr().err
