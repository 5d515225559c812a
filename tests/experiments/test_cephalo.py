"""Cephalo's mix of cards, and the emulated one, at small scale on forced devices."""

import json
import os
from pathlib import Path

import pytest

from hexijax.cli.main import main
from hexijax.plan import text

pytestmark = pytest.mark.usefixtures("backend")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    """`platform.prepare` writes to the environment; here it is put back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.laws
@pytest.mark.parametrize("name", ["cephalo_gpt", "cephalo_emulated"])
def test_it_is_planned_and_trains_small(name: str, tmp_path: Path):
    file = str(ROOT / "experiments" / f"{name}.py")
    small = ("--set", "small=true", "--set", "steps=2")
    assert main(["run", file, "--emulate", "--out", str(tmp_path), *small]) == 0
    (folder,) = tmp_path.iterdir()
    report = json.loads((folder / "report.json").read_text())
    assert report["status"] == "done"
    assert 5 < report["loss_last"] < 6  # of 256 tokens at random: ln 256 = 5.55
    plan = text.read(folder / "plan.txt")
    assert sum(replica.samples for replica in plan.replicas) == plan.batch_size
