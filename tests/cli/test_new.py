"""`hexijax new` writes a project that runs and whose own test passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hexijax.cli.main import main
from hexijax.report.metrics import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("backend")
def test_a_new_project_runs_at_once(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "My model_2"
    assert main(["new", str(folder)]) == 0
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {
        *(".gitignore", "README.md", "cluster.toml", "experiment.py", "model.py"),
        *("pyproject.toml", "tests/test_experiment.py"),
    }
    shown = capsys.readouterr().out
    assert all(str(folder / file) in shown for file in files)
    assert f"It runs: cd '{folder}'; " in shown, "a shell takes it as one word"
    texts = [(folder / file).read_text() for file in files]
    assert not [text for text in texts if "@name@" in text]
    assert 'name = "my-model-2"' in (folder / "pyproject.toml").read_text()
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # `run` writes to them
    monkeypatch.setattr(sys, "path", sys.path[:])
    command = ["run", str(folder / "experiment.py"), "--out", str(tmp_path)]
    tiny = ["steps=2", "width=16", "depth=1", "length=16", "batch_size=4"]
    command += [part for setting in tiny for part in ("--set", setting)]
    assert main([*command, "--set", "eval_batches=2", "--no-save"]) == 0
    lines = read_metrics(tmp_path / "my-model-2-001" / "metrics.jsonl")
    assert lines[-1]["eval_loss"] < lines[0]["eval_loss"] < 7


@pytest.mark.laws
def test_a_new_projects_own_test_passes(tmp_path: Path):
    """In processes of its own: under the planner's plan, and on one device."""
    assert main(["new", str(tmp_path / "mine")]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "mine",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_nothing_is_written_over(tmp_path: Path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    for name, says in [
        (str(tmp_path), "is not empty: it holds notes.txt. Nothing is written over"),
        (str(tmp_path / "notes.txt"), "notes.txt is a file. Nothing is written over"),
        ("/", "gives the project no name"),
    ]:
        assert main(["new", name]) == 2
        assert says in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert main(["new", str(tmp_path / "empty")]) == 0
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        assert main(["new", str(tmp_path / "closed" / "x")]) == 2
