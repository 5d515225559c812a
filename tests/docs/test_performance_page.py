"""docs/performance.md is what its command prints, and the README shows its targets."""

import json
import subprocess
import sys
from pathlib import Path

from experiments.performance_table import read_runs, target_table, targets
from experiments.predicted.listing import digest, read_list

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs/measured"


def test_the_page_is_what_its_command_prints():
    command = [sys.executable, "-m", "experiments.performance_table", "docs/measured"]
    printed = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert ROOT.joinpath("docs/performance.md").read_text(encoding="utf-8") == printed


def test_the_readme_shows_the_same_targets():
    readme = ROOT.joinpath("README.md").read_text(encoding="utf-8")
    assert target_table(read_runs(MEASURED)) in readme


def test_a_target_follows_from_the_rows():
    by_name = {target.name: target for target in targets(read_runs(MEASURED))}
    lanes = by_name["4 lanes: part of four times one card"]
    rows = json.loads(MEASURED.joinpath("h100_x4.json").read_text())
    one, four = rows["one card"]["step_s"], rows["4 lanes"]["step_s"]
    assert abs(lanes.measured - one / four) < 1e-9  # four times the work of one card
    assert lanes.reached


def test_every_run_says_where_it_comes_from():
    for run in read_runs(MEASURED):
        assert {"card", "cards", "jax", "date", "command"} <= run.what.keys()


def test_what_was_predicted_is_what_was_committed_before():
    by_list = {
        found["list"]["file"]: found
        for run in read_runs(MEASURED)
        for found in run.rows.values()
        if "list" in found
    }
    assert by_list
    for file, found in by_list.items():
        path = ROOT / "docs/predicted" / file
        assert digest(path) == found["list"]["digest"]
        promises = read_list(path).promises
        plans = found.get("plans") or {"ours": found["ours"]}
        assert plans.keys() == promises.keys()
        for name, promise in promises.items():
            assert plans[name]["predicted_s"] == promise.step_s
            assert plans[name]["promised_bytes"] == promise.memory_bytes
