"""docs/performance.md is what its command prints, and the README shows its targets."""

import json
import subprocess
import sys
from pathlib import Path

from experiments.performance_table import read_runs, target_table, targets

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
