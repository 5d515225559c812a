"""Other hosts: what is asked of them, what is written of them, islands there."""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hexijax.cli.cluster import _rate, render
from hexijax.cli.launch import visible_cards
from hexijax.cli.main import main
from hexijax.cli.probe import parse_peers
from hexijax.cli.surroundings import place
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.islands.launcher import Launcher
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.ssh import Remote, address_of, run, script

ROOT = Path(__file__).parents[2]
SSH = """\
#!/bin/sh
# Every host is this one.
if [ "$1" = "-G" ]; then echo "hostname 127.0.0.1"; exit 0; fi
while [ "$1" = "-o" ]; do shift 2; done
if [ "$1" = "mute" ]; then exec sleep 60; fi
if [ "$1" = "away" ]; then echo "ssh: connect to host away: no route" >&2; exit 255; fi
shift
unset HEXIJAX_LAUNCHER_PID  # ssh hands no environment on
sh -c "$*"; code=$?
if [ $code -gt 128 ]; then exit 255; fi  # as ssh does after a signal there
exit $code
"""


@pytest.fixture
def _ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An ssh that reaches every host, since all are this one; `away` it does not."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "ssh"
    file.write_text(SSH)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def probe(kinds: list[list[Any]], **more: Any) -> dict[str, Any]:
    return {
        "kinds": kinds,
        "free_bytes": [],
        "apart": [],
        "host_memory_bytes": 64 * 2**30,
        "host_cores": 16,
        "versions": {"python": "3.12.1", "jax": "0.12.0", "hexijax": "0.1.0"},
        **more,
    }


def test_what_was_found_on_hosts_is_a_cluster_and_says_what_was_measured():
    probes = {
        "me@box": probe(
            [["rtx4090-24g", 2]], free_bytes=[23 * 2**30, 22 * 2**30], apart=[[0, 1]]
        ),
        "small": probe([["cpu", 1]]),
    }
    rates = {("me@box", "small"): (450e-6, 0.9e9, 1.17e9)}
    text = render("lab", probes, rates, today="2026-01-02")
    cluster = Cluster.from_toml(text)
    assert cluster.islands == {"box": ("box/0", "box/1"), "small": ("small/0",)}
    assert cluster.node("box").host == "me@box"
    assert cluster.device("box/0").usable_memory_bytes == 21 * 2**30
    between = cluster.link("box/0", "small/0")
    assert (between.latency_s, between.bytes_per_s) == (450e-6, 0.9e9)
    assert cluster.link("box/0", "box/1").bytes_per_s == 8e9
    lines = text.splitlines()
    for measured in (
        "usable",
        "the system reports",
        "2026-01-02: arrays from device to device, the slower way; one TCP stream has "
        "1.17 GB/s",
    ):
        assert any(line.startswith("# ") and measured in line for line in lines)
    assert "# no peer access: copies go through the host's memory" in lines
    assert "# Python 3.12.1, JAX 0.12.0, hexijax 0.1.0" in lines


def test_cards_that_do_not_reach_each_other_are_read_off_nvidia_smi():
    said = (
        " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tOK\n GPU2\tCNS\tOK\tX\n"
    )
    assert parse_peers(said + "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n") == [
        [0, 2]
    ]
    assert parse_peers("") == []


def test_islands_see_their_own_cards_one_after_another():
    text = """
        format = 1
        name = "mixed"
        [kinds.host]
        vendor = "cpu"
        memory_gib = 8
        peak_tflops = { float32 = 0.1 }
        memory_gb_per_s = 10
        host_link_gb_per_s = 10
        source = "declared"
        [links]
        in_node = { latency_us = 1, bandwidth_gb_per_s = 10 }
        between_nodes = { latency_us = 1, bandwidth_gb_per_s = 10 }
    """
    for name, kind, count in [
        ("x", "h100-80g-sxm", 2),
        ("y", "host", 1),
        ("z", "l4-24g", 1),
    ]:
        text += f"""
        [[nodes]]
        name = "{name}"
        devices = [{{ kind = "{kind}", count = {count} }}]
        host_memory_gib = 8
        host_cores = 1
        """
    assert visible_cards(Cluster.from_toml(text), {}) == {
        "x": {"CUDA_VISIBLE_DEVICES": "0,1"},
        "y": {"CUDA_VISIBLE_DEVICES": ""},
        "z": {"CUDA_VISIBLE_DEVICES": "2"},
    }
    seen = {"CUDA_VISIBLE_DEVICES": "5,6,7"}
    assert visible_cards(Cluster.from_toml(text), seen) == {
        "x": {"CUDA_VISIBLE_DEVICES": "5,6"},
        "y": {"CUDA_VISIBLE_DEVICES": ""},
        "z": {"CUDA_VISIBLE_DEVICES": "7"},
    }


@pytest.mark.parametrize(
    ("environ", "island", "of"),
    [
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, "2", 3),
        ({"JOB_COMPLETION_INDEX": "0"}, "0", None),
        ({"HEXIJAX_ISLAND": "box", "SLURM_PROCID": "2"}, "box", None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "1", 2),
    ],
)
def test_an_island_knows_itself_by_who_started_it(
    environ: dict[str, str], island: str, of: int | None
):
    found = place(environ)
    assert (found.island, found.of) == (island, of)


def test_nobody_says_which_island_it_is():
    with pytest.raises(UserError, match="--island auto: none of HEXIJAX_ISLAND, SLURM"):
        place({})


@pytest.mark.usefixtures("_ssh")
def test_islands_on_hosts_train_and_end_and_no_secret_is_in_a_command(tmp_path: Path):
    names = ("a", "b")
    meeting = Rendezvous(names, run="test", silence_s=20.0)
    meeting.brief({"steps": 3})

    def start(name: str) -> Remote:
        words = [sys.executable, "-m", "tests.islands.standin"]
        return Remote(
            name,
            f"me@{name}",
            [*words, name, meeting.address, "well"],
            folder=str(ROOT),
            token=meeting.token,
            log=tmp_path / f"{name}.log",
            process=lambda: None,
            tell=lambda name, line: None,
        )

    outcome = Launcher(meeting, start, join_s=60.0).run()
    assert outcome.code == 0
    assert (tmp_path / "a.log").read_text().endswith("done 3\n")
    line = script(["python", "-m", "x"], folder="/my lab", secret="HEXIJAX_TOKEN")
    assert line == (
        "cd '/my lab' && IFS= read -r HEXIJAX_TOKEN && export HEXIJAX_TOKEN && "
        "exec python -m x"
    )
    assert address_of("me@a") == "127.0.0.1"
    with pytest.raises(UserError, match="away: `true` in / failed: ssh: connect to ho"):
        run("away", ["true"], folder="/", seconds=10.0)


@pytest.mark.usefixtures("_ssh")
def test_a_host_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hexijax.cli.cluster.PROBE_S", 0.5)
    asked = Namespace(python=sys.executable, folder=str(ROOT))
    with pytest.raises(UserError, match="mute cannot listen .* within 0.5 s"):
        _rate("mute", "a", asked)


@pytest.mark.laws
@pytest.mark.usefixtures("_ssh")
def test_a_cluster_file_is_made_of_hosts_and_checked_against_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(ROOT)
    file = tmp_path / "lab.toml"
    assert main(["cluster", "init", "--ssh", "a,me@b", "-o", str(file)]) == 0
    cluster = Cluster.from_toml(file)
    assert [node.name for node in cluster.nodes] == ["a", "b"]
    assert cluster.link("a/0", "b/0").bytes_per_s > 1e6
    assert main(["cluster", "check", str(file)]) == 0
    text = file.read_text().replace("count = ", "count = 9", 1)
    file.write_text(text.replace('"b"', '"away"').replace('host = "me@b"', ""))
    assert main(["cluster", "check", str(file)]) == 2
    shown = capsys.readouterr().out
    assert "a: the file says 9" in shown
    assert "away: `" in shown


def test_a_report_goes_through_the_launcher(tmp_path: Path):
    """--json is written where it was asked for, not where the first island is."""
    from hexijax.cli.launch import _finish
    from hexijax.islands.launcher import Outcome

    file = tmp_path / "new" / "report.json"
    said = {"a": {"code": 0, "report": {"steps": 3}}, "b": {"code": 0}}
    _finish(Namespace(json=file), Outcome(code=0, said=said))
    assert json.loads(file.read_text()) == {"steps": 3}
