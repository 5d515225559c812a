"""Damaged plan files end as a plan or as a PlanError, never as anything else.

In a process of its own: there our calls are not type-checked one by one, which would
make seconds of this into minutes.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_eleven_thousand_damaged_files(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.plan.fuzz", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    for made, refused in results.values():
        assert made + refused >= 5_000
        assert made > 150, "a harmless change leaves a plan"
        assert refused > 2_500
