"""The command, whole: what it leaves, how it resumes, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from hexijax.cli.main import main
from hexijax.plan.precision import FIRST_SCALE
from hexijax.report.metrics import read_metrics
from hexijax.report.words import seconds
from hexijax.runtime import memories

pytestmark = pytest.mark.usefixtures("backend")

ROOT = Path(__file__).parents[2]
TINY = str(Path(__file__).with_name("tiny.py"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    """`platform.prepare` writes to the environment; here it is put back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def run(tmp_path: Path, *arguments: str) -> int:
    return main(["run", TINY, "--out", str(tmp_path), *arguments])


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def test_a_run_leaves_its_plan_its_metrics_and_its_report(tmp_path: Path, capsys):
    report_file = tmp_path / "there.json"
    assert run(tmp_path, "--json", str(report_file)) == 0
    folder = tmp_path / "tiny-001"
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "plan.json",
        "plan.txt",
        "report.json",
        "temps.json",
    ]
    report = json.loads(report_file.read_text())
    assert report == json.loads((folder / "report.json").read_text())
    assert report["status"] == "done"
    assert report["data"] == {"data": "random-16-4-0"}
    assert report["steps"] == 4
    assert report["loss_last"] == losses(folder)[-1] < report["loss_first"]
    assert report["tokens_per_s"] > 0 < report["mfu"]
    assert {"measured_step_s", "peak_bytes_by_device", "versions"} <= report.keys()
    assert [d["name"] for d in report["devices"]] == [
        *("fast/0", "fast/1", "fast/2", "slow/0")
    ]
    shape = [
        [(s["layers"], s["tensor_degree"], s["data_degree"]) for s in r["stages"]]
        for r in report["replicas"]
    ]
    assert shape == [[(2, 2, 1), (2, 1, 1)], [(4, 1, 1)]]
    assert [r["microbatches"] for r in report["replicas"]] == [2, 1]
    shown = capsys.readouterr().out
    assert "replica 1" in shown
    assert "step 4/4  loss" in shown
    assert f"folder  {folder}" in shown
    # The plain program gives the same losses, and a stored plan runs again.
    assert run(tmp_path, "--plan", "single") == 0
    assert losses(tmp_path / "tiny-002") == pytest.approx(losses(folder), rel=1e-5)
    assert run(tmp_path, "--plan", str(folder / "plan.json")) == 0
    assert losses(tmp_path / "tiny-003") == losses(folder)


def test_any_cluster_file_is_emulated_and_planned_for(tmp_path: Path, capsys):
    hexiscale = str(ROOT / "experiments/clusters/hexiscale.toml")
    assert run(tmp_path, "--cluster", hexiscale, "--emulate") == 0
    assert "tiny_plan.txt does not fit, so a plan is made." in capsys.readouterr().out
    report = json.loads((tmp_path / "tiny-001" / "report.json").read_text())
    assert report["mfu"] is None  # the speed of forced CPU devices says nothing
    assert {device["jax"].split(":")[0] for device in report["devices"]} == {"cpu"}
    assert report["predicted_step_s"] > 0


def test_a_given_plan_whose_host_is_too_small_is_refused_before_it_runs(
    tmp_path: Path, capsys
):
    toml = (ROOT / "experiments/clusters/quickstart.toml").read_text()
    cluster, plan = tmp_path / "small.toml", tmp_path / "plan.txt"
    cluster.write_text(toml.replace("host_memory_gib = 4", "host_memory_gib = 0.0125"))
    own = Path(TINY).with_name("tiny_plan.txt").read_text()
    plan.write_text(own.replace("state *  even", "state *  even  memory host"))
    files = ("--cluster", str(cluster), "--plan", str(plan))
    assert run(tmp_path, *files, "--set", "width=2048") == 2
    error = capsys.readouterr().err
    assert re.search(r"The plan has [\d,]+ bytes wait or rest in host memory", error)
    assert "which has 13,421,773." in error
    assert not (tmp_path / "tiny-001").exists()


def test_a_resumed_run_has_the_losses_of_an_unbroken_one(tmp_path: Path, capsys):
    dynamic = ("--set", "loss_scale=dynamic")
    assert run(tmp_path, *dynamic, "--set", "steps=5") == 0
    half = ("--out", str(tmp_path / "half"), *dynamic)
    assert run(tmp_path, *half, "--set", "steps=3", "--save-every", "2") == 0
    folder = tmp_path / "half" / "tiny-001"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["2", "3"]
    assert run(tmp_path, *half, "--resume", "--set", "steps=5") == 0
    assert "--set is not what the run had: steps 3 -> 5\n" in capsys.readouterr().out
    assert losses(folder) == losses(tmp_path / "tiny-001")
    lines = read_metrics(folder / "metrics.jsonl")
    assert {(line["scale"], line["skipped"]) for line in lines} == {(FIRST_SCALE, 0)}
    report = json.loads((folder / "report.json").read_text())
    assert (report["steps"], report["skipped_steps"]) == (5, 0)

    capsys.readouterr()
    assert run(tmp_path, *half, "--resume", "--set", "steps=5") == 2
    early = capsys.readouterr()
    assert "has done 5 steps already and 5 were asked for" in early.err
    assert "replica 0" not in early.out, "nothing was traced or planned for it"
    for arguments, says in [
        (["--set", "steps=2"], "has done 5 steps already and 2 were asked for"),
        (["--set", "seed=1"], "its seed is 0, this run's is 1"),
        (
            ["--set", "width=16", "--set", "steps=9"],
            "another model or optimizer. The first difference is",
        ),
    ]:
        assert run(tmp_path, *half, "--resume", *arguments) == 2
        assert says in capsys.readouterr().err


def test_a_run_that_finds_no_memory_to_pin_goes_on_from_where_it_saved(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    text = Path(TINY).with_name("tiny_plan.txt").read_text()
    text = text.replace("layers 2-3", "layers 2-3  params streamed")
    text = text.replace("reductions  exact", "reductions  exact\norder       priority")
    plan = tmp_path / "host.txt"
    plan.write_text(text.replace("state *  even", "state *  even  memory host"))
    offloaded = ("--plan", str(plan), "--set", "steps=4")
    assert run(tmp_path, *offloaded, "--no-save") == 0
    folder = tmp_path / "tiny-002"
    put = memories._put

    def exhausted(arrays: Any, where: Any) -> Any:
        if any((folder / "checkpoints" / "2").rglob("manifest.json")):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: xla_gpu_host_bfc")
        return put(arrays, where)

    with monkeypatch.context() as patch:
        patch.setattr(memories, "_put", exhausted)
        assert run(tmp_path, *offloaded, "--save-every", "2") == 2
    said = capsys.readouterr().err
    assert "bytes of pinned host memory were asked for, and the backend has no" in said
    assert "set it, or let less of the plan wait or rest in host memory" in said
    report = json.loads((folder / "report.json").read_text())
    assert (report["status"], report["steps"]) == ("failed", len(losses(folder)))
    # What is restored lies where the plan says, or the run would not begin.
    assert run(tmp_path, "--resume", str(folder), *offloaded) == 0
    assert losses(folder) == losses(tmp_path / "tiny-001")
    assert len(losses(folder)) == 4


def test_a_run_is_exported_unless_it_saved_nothing(tmp_path: Path, capsys):
    assert run(tmp_path, "--plan", "single", "--no-save") == 0
    assert run(tmp_path, "--plan", "single") == 0
    assert not (tmp_path / "tiny-001" / "checkpoints").exists()
    saved = str(tmp_path / "tiny-002")
    capsys.readouterr()
    assert main(["export", saved, "--to", "safetensors"]) == 0
    file = tmp_path / "tiny-002" / "safetensors" / "model.safetensors"
    assert capsys.readouterr().out.startswith(
        f"{file}: 7 tensors, float32, 0.00159 MiB"
    )
    assert file.is_file()
    assert main(["export", saved, "--to", "orbax", "--out", str(tmp_path / "o")]) == 0
    assert (tmp_path / "o" / "_METADATA").is_file()
    # A run may begin where another ended.
    weights = ("--set", f"weights={saved}")
    assert run(tmp_path, "--plan", "single", *weights, "--set", "steps=1") == 0
    begun = losses(tmp_path / "tiny-003")[0]
    assert begun < losses(tmp_path / "tiny-002")[0]
    capsys.readouterr()
    for arguments, says in [
        (["export", str(tmp_path / "tiny-001"), "--to", "orbax"], "has no checkpoint"),
        (["export", saved, "--to", "orbax", "--step", "9"], "has no step 9; saved are"),
        (
            ["run", TINY, "--no-save", "--save-every", "2"],
            "--no-save and --save-every 2 were both given",
        ),
        (["run", TINY, "--far-every", "2"], "--far-every 2 was given without --far"),
        (["run", TINY, "--far-rate", "0"], "--far-rate 0: nothing would ever arrive."),
        (
            ["run", TINY, "--far", "/no/such"],
            "--far /no/such: there is no such folder.",
        ),
        (["run", TINY, *weights, "--set", "width=16"], "  differs    blocks/0/linear/"),
    ]:
        assert main(arguments) == 2
        assert says in capsys.readouterr().err


def test_a_nan_loss_ends_with_1_and_a_whole_folder(tmp_path: Path, capsys):
    assert run(tmp_path, "--plan", "single", "--set", "broken=true") == 1
    assert "Diverged: The loss of step 0 is nan. Try" in capsys.readouterr().err
    report = json.loads((tmp_path / "tiny-001" / "report.json").read_text())
    assert (report["status"], report["loss_last"]) == ("failed", "nan")


CLUSTER = (ROOT / "experiments/clusters/quickstart.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "widht=3"], "no field 'widht'. Did you mean 'width'?"),
        (
            ["--set", "batch_size=0"],
            "Experiment.batch_size is 0; it must be at least 1",
        ),
        (["--cluster", "none.toml"], "There is no cluster file none.toml"),
        (["--cluster", "{unknown}"], "cpu-fats"),
        (["--cluster", "{missing}"], "host_memory_gib"),
        (["--plan", "none.txt"], "No such file or directory. `hexijax plan EXP"),
        (["--plan", "{other}"], "hold 3 layers and tiny has 4"),
        (["--resume"], "0 runs named 'tiny' are in"),
    ],
)
def test_bad_input_is_one_message_and_2(
    tmp_path: Path, capsys, arguments: list[str], says: str
):
    files = {
        "unknown": CLUSTER.replace('kind = "cpu-fast"', 'kind = "cpu-fats"'),
        "missing": re.sub("host_memory_gib.*\n", "", CLUSTER, count=1),
        "other": Path(__file__)
        .with_name("tiny_plan.txt")
        .read_text()
        .replace("-3", "-2"),
    }
    for name, text in files.items():
        suffix = "txt" if name == "other" else "toml"
        files[name] = str(tmp_path / f"{name}.{suffix}")
        Path(files[name]).write_text(text)
    assert run(tmp_path, *(part.format_map(files) for part in arguments)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert not (tmp_path / "tiny-001").exists()


def test_ctrl_c_ends_with_130_and_a_whole_folder(tmp_path: Path):
    command = ["run", TINY, "--plan", "single", "--set", "steps=1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hexijax.cli.main", *command, "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                process.send_signal(signal.SIGINT)
                break
        shown = process.stdout.read()
    assert process.returncode == 130, shown
    assert "Traceback" not in shown
    report = json.loads((tmp_path / "tiny-001" / "report.json").read_text())
    assert report["status"] == "interrupted"
    assert report["steps"] == len(losses(tmp_path / "tiny-001")) > 0


def test_help_lists_an_experiments_fields_without_running_it(capsys):
    assert main(["run", TINY, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "rate = 0.1  (float)\n      of SGD with momentum." in shown
    assert "batch_size = 32  (int)\n      Sequences (samples) of one" in shown


def test_catalog_has_a_line_a_card(capsys):
    assert main(["catalog"]) == 0
    assert "h100-80g-sxm" in capsys.readouterr().out


def test_simulate_says_what_each_device_does(tmp_path: Path, capsys):
    report_file = tmp_path / "simulated.json"
    out = ["--out", str(tmp_path), "--json", str(report_file)]
    assert main(["simulate", TINY, *out]) == 0
    report = json.loads(report_file.read_text())
    printed = capsys.readouterr().out
    assert f"step {seconds(report['simulated_step_s'])} simulated" in printed
    for device, busy_s in report["busy_s"].items():
        idle_s = report["idle_s"][device]
        assert sum(busy_s.values()) + sum(idle_s.values()) == pytest.approx(
            report["simulated_step_s"]
        )
    promised = report["memory_bytes_by_device"]
    for device, peak in report["simulated_peak_bytes_by_device"].items():
        assert 0 < peak <= promised[device]
    trace = json.loads((tmp_path / "tiny" / "trace.json").read_text())
    assert trace["traceEvents"]


def test_plan_writes_what_it_predicts(tmp_path: Path, capsys):
    report_file = tmp_path / "plan-report.json"
    assert main(["plan", TINY, "--out", str(tmp_path), "--json", str(report_file)]) == 0
    report = json.loads(report_file.read_text())
    assert len(report["replicas"]) == 2
    assert capsys.readouterr().out.startswith(report["verdict"])
