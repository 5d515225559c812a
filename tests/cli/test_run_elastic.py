"""`hexijax run --elastic`: nodes go and come by a file, and SIGTERM is a notice."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hexijax.cli import elasticity
from hexijax.cli.main import main
from hexijax.elastic import Roll
from hexijax.report.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("backend")

TINY = str(Path(__file__).with_name("tiny.py"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    """`platform.prepare` writes to the environment; here it is put back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def run(tmp_path: Path, *arguments: str, steps: int = 8) -> int:
    words = ["run", TINY, "--out", str(tmp_path), "--set", f"steps={steps}"]
    return main([*words, "--set", "rate=0.02", *arguments])


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture
def happens(monkeypatch: pytest.MonkeyPatch) -> dict[int, Callable[[Path], object]]:
    """What to do before a step of a number, with the members' file."""
    found: dict[int, Callable[[Path], object]] = {}
    calls: list[Roll] = []
    look = Roll.look

    def look_then(self: Roll) -> None:
        then = found.get(len(calls))
        calls.append(self)
        if then:
            then(self._file)
        look(self)

    monkeypatch.setattr(Roll, "look", look_then)
    return found


def test_a_node_goes_and_comes_back(tmp_path: Path, capsys, happens):
    assert run(tmp_path) == 0
    whole = losses(tmp_path / "tiny-001")
    happens[5] = lambda file: file.write_text("slow gone\n")
    happens[8] = lambda file: file.write_text("slow here\nfast leaves 60\n")
    capsys.readouterr()
    assert run(tmp_path, "--elastic", "--save-every", "2") == 0
    folder, shown = tmp_path / "tiny-002", capsys.readouterr().out
    assert losses(folder) == pytest.approx(whole, rel=1e-5)
    assert "after step 5: slow lost; the run goes on from step 4, 1 of them" in shown
    assert re.search(r"  noticed in .* planned in .* compiled in .* GB from d", shown)
    assert "slow joined, fast leaves within 60 s; the run goes on from step" in shown
    plan = (folder / "plan.txt").read_text()
    assert "slow/0" in plan
    assert "fast/" not in plan
    assert (folder / "members.txt").read_text() == "slow here\nfast leaves 60\n"


@pytest.mark.laws
def test_copies_and_a_far_tier_lose_no_step(tmp_path: Path, capsys, happens):
    """A neighbour's copy of each step; then the whole folder's steps are gone."""
    (tmp_path / "far").mkdir()
    happens[3] = lambda file: file.write_text("slow gone\n")
    far = ["--far", str(tmp_path / "far"), "--far-every", "2"]
    assert run(tmp_path, "--elastic", "--neighbour-every", "1", *far, steps=4) == 0
    folder, shown = tmp_path / "tiny-001", capsys.readouterr().out
    assert "after step 3: slow lost; the run goes on from step 3\n" in shown
    assert re.search(r"GB from device in .*, .* GB from peer in", shown)
    sent = tmp_path / "far" / "tiny-001"
    assert sorted(path.name for path in sent.iterdir()) == ["2", "4"]
    whole = losses(folder)
    shutil.rmtree(folder / "checkpoints")
    assert run(tmp_path, "--resume", str(folder), steps=5) == 0
    assert re.search(r"after step 4: .* GB from far in", capsys.readouterr().out)
    assert losses(folder)[:4] == whole


def test_sigterm_saves_and_leaves(tmp_path: Path, capsys, happens):
    happens[3] = lambda file: signal.raise_signal(signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    far = tmp_path / "far"
    far.mkdir()
    # Slower than a byte a second: the notice lifts it.
    slowly = ["--far", str(far), "--far-rate", "1e-10"]
    assert run(tmp_path, "--elastic", "fast,slow", *slowly) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    shown = capsys.readouterr().out
    assert "SIGTERM: the step at hand ends, what is missing is saved" in shown
    assert len(losses(tmp_path / "tiny-001")) == 4
    assert list(far.rglob("*"))
    assert run(tmp_path, "--resume") == 0
    assert "resuming" in capsys.readouterr().out
    assert len(losses(tmp_path / "tiny-001")) == 8


def test_nobody_to_take_over_is_refused(tmp_path: Path, capsys):
    assert run(tmp_path, "--elastic", "--plan", "single") == 2
    assert "--elastic: --plan single is the plain program" in capsys.readouterr().err
    assert run(tmp_path, "--elastic", "fats") == 2
    assert "has no node 'fats'" in capsys.readouterr().err
    from hexijax.runtime.devices import local_cluster

    with pytest.raises(ValueError, match=r"cluster 'here' has one node, 'here': if it"):
        elasticity.members("", local_cluster(), None)
