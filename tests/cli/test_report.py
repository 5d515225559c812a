"""What a run leaves is whole, and its figures agree with each other."""

import itertools
import json
from contextlib import closing
from pathlib import Path

import pytest

from hexijax.errors import UserError
from hexijax.report import Meter, Metrics, RunFolder, write_atomically
from hexijax.report.metrics import read_metrics
from hexijax.report.summary import render


def test_speeds_follow_the_median_step_and_pauses_do_not_count():
    moments = itertools.chain([0.0, 9.0, 10.0, 11.0, 13.0], [100.0, 101.0])
    meter = Meter(
        tokens_per_step=10.0,
        flops_per_step=6.0,
        peak_flops_per_s=12.0,
        clock=lambda: next(moments),
    )
    meter.start()
    steps = [meter.tick() for _ in range(4)]
    assert [step["step_s"] for step in steps] == [9, 1, 1, 2]
    assert steps[3] == {"step_s": 2, "tokens_per_s": 5, "mfu": 0.25}
    meter.start()  # after an evaluation
    meter.tick()
    assert meter.summary() == {  # the first two left out: 1, 2, 1
        "measured_step_s": 1,
        "tokens_per_s": 10,
        "mfu": 0.5,
    }


def test_metrics_continue_at_the_step_that_was_saved(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with closing(Metrics(path)) as metrics:
        for step, loss in enumerate([5.0, 4.0, 3.0, float("nan")]):
            metrics.write({"step": step, "loss": loss, "mfu": None})
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == "nan"
    path.write_text(path.read_text() + '{"step": 4, "lo')  # the machine died here
    with closing(Metrics(path, continue_at=2)) as metrics:
        assert (metrics.steps, metrics.first_loss, metrics.last_loss) == (2, 5.0, 4.0)
        metrics.write({"step": 2, "loss": 1.0})
    assert [line["loss"] for line in read_metrics(path)] == [5.0, 4.0, 1.0]


def test_who_wrote_before_adds_nothing_where_another_goes_on(tmp_path: Path):
    """An island that led, and does not know yet that it was given up."""
    path = tmp_path / "metrics.jsonl"
    with closing(Metrics(path)) as stale:
        stale.write({"step": 0, "loss": 5.0})
        with closing(Metrics(path, continue_at=1)) as metrics:
            stale.write({"step": 1, "loss": 9.0})
            metrics.write({"step": 1, "loss": 4.0})
            stale.write({"step": 2, "loss": 9.0})
    assert [line["loss"] for line in read_metrics(path)] == [5.0, 4.0]


def test_runs_are_numbered_and_the_last_with_a_checkpoint_is_resumed(tmp_path: Path):
    first, second = (RunFolder.new(tmp_path, "a") for _ in range(2))
    RunFolder.new(tmp_path, "a-b")
    assert (first.path.name, second.path.name) == ("a-001", "a-002")
    with pytest.raises(UserError, match="2 runs named 'a' are in .* none with a check"):
        RunFolder.find(tmp_path, "a", None)
    first.checkpoints.mkdir()
    assert RunFolder.find(tmp_path, "a", None) == first
    assert RunFolder.find(tmp_path, "a", "a-002") == second
    with pytest.raises(UserError, match="there is no such run"):
        RunFolder.find(tmp_path, "a", "a-009")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "report.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(UserError, match="cannot be written"):
        write_atomically(path / "below.json", "x")


def test_the_summary_is_a_few_lines():
    report = {
        "name": "quickstart",
        "status": "done",
        "steps": 300,
        "loss_first": 5.5,
        "loss_last": 2.1,
        "tokens_per_s": 12345.6,
        "measured_step_s": 0.25,
        "predicted_step_s": 0.2,
        "mfu": 0.123,
        "peak_bytes_by_device": {"a/0": 2**29, "b/0": 2**30},
    }
    assert render(report, "runs/quickstart-001").splitlines() == [
        "quickstart: done after 300 steps",
        "  loss    5.5000 -> 2.1000",
        "  speed   12,346 tokens/s, 0.25 s a step, predicted 0.2 s, MFU 12.3%",
        "  memory  at most 1.00 GiB (b/0)",
        "  folder  runs/quickstart-001",
    ]
    judged = report | {"prediction": {"predicted_step_s": 0.21}}
    assert "predicted" not in render(judged, "x"), "said once, by the lines that follow"
    report = report | {"steps": 0, "status": "interrupted"}
    assert "interrupted before the first step" in render(report, "x")
