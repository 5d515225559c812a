"""`run --trace`: the last step watched, beside what was predicted, the same numbers."""

import collections
import json
import os
from pathlib import Path

import pytest

from hexijax.cli.main import main
from hexijax.report.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("backend")

TINY = str(Path(__file__).with_name("tiny.py"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def run(tmp_path: Path, *arguments: str) -> int:
    return main(["run", TINY, "--out", str(tmp_path), "--no-save", *arguments])


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def test_both_timelines_stand_in_one_trace_device_by_device(tmp_path: Path, capsys):
    assert run(tmp_path, "--trace") == 0
    folder = tmp_path / "tiny-001"
    said = capsys.readouterr().out
    assert f"trace   {folder / 'trace.json'}, for https://ui.perfetto.dev" in said
    assert "beside its prediction of" in said
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    groups = {
        e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
    }
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == "thread_name"
    }
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for e in events:
        if e["ph"] == "X" and e["cat"] in ("forward", "backward", "both"):
            assert e["dur"] >= 0
            counts[tracks[e["pid"], e["tid"]]][f"{groups[e['pid']]} {e['cat']}"] += 1
    predicted, measured = (
        counts[f"1 computes: {when}"] for when in ("as predicted", "measured")
    )
    assert predicted == measured
    assert {name.split()[0] for name in measured} == {
        *("fast/0", "fast/1", "fast/2", "slow/0")
    }
    # Watching changes no number.
    assert run(tmp_path) == 0
    assert losses(folder) == losses(tmp_path / "tiny-002")
    assert not (tmp_path / "tiny-002" / "trace.json").exists()


def test_the_report_says_what_differs_and_on_which_device(tmp_path: Path, capsys):
    assert run(tmp_path, "--trace") == 0
    report = json.loads((tmp_path / "tiny-001" / "report.json").read_text())
    found = report["prediction"]
    assert found["measured_step_s"] == report["measured_step_s"]
    assert found["ratio"] == pytest.approx(
        report["measured_step_s"] / found["predicted_step_s"]
    )
    devices = {"fast/0", "fast/1", "fast/2", "slow/0"}
    assert found["memory"].keys() == devices
    assert {part["device"] for part in found["parts"]} == devices
    there = {
        when: {
            (p["device"], p["what"])
            for p in found["parts"]
            if p["what"] in ("forward", "backward", "both", "update") and p[when] > 0
        }
        for when in ("predicted_s", "measured_s")
    }
    assert there["predicted_s"] == there["measured_s"]
    assert {what for _, what in there["measured_s"]} >= {"both", "update"}
    assert found["explanation"] in capsys.readouterr().out
    # Nothing was watched: the way to know is told.
    assert run(tmp_path) == 0
    assert "run with --trace to see which instructions" in capsys.readouterr().out


def test_what_the_host_updates_is_watched_too(tmp_path: Path):
    text = Path(TINY).with_name("tiny_plan.txt").read_text()
    text = text.replace("state *  even", "state *  even  memory host  update host")
    (tmp_path / "host.txt").write_text(text)
    plan = ("--plan", str(tmp_path / "host.txt"))
    assert run(tmp_path, *plan, "--trace") == 0
    assert run(tmp_path, *plan) == 0
    folder = tmp_path / "tiny-001"
    assert losses(folder) == losses(tmp_path / "tiny-002")
    report = json.loads((folder / "report.json").read_text())
    assert "update" not in {part["what"] for part in report["prediction"]["parts"]}
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert [e for e in events if e["ph"] == "X" and e["cat"] == "update"]


@pytest.mark.parametrize(
    "more", [["--elastic"], ["--plan", "single"], ["--emulate"]], ids=lambda m: m[0]
)
def test_what_has_no_one_prediction_is_not_traced(tmp_path: Path, capsys, more):
    assert run(tmp_path, "--trace", *more) == 2
    assert "--trace and " in capsys.readouterr().err
