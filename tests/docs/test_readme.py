"""The README's code runs, and what it shows is what a reader will see."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from experiments import quickstart
from hexijax.cli.fields import read_source
from hexijax.cli.loading import load_experiment
from hexijax.cli.main import main
from hexijax.cluster import Cluster
from hexijax.job.intake import trace_chain
from hexijax.layers.chain import Chain
from hexijax.plan import text
from hexijax.planner import PlanOptions, make_plan
from hexijax.report.drawing import picture
from hexijax.report.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("backend")

ROOT = Path(__file__).parents[2]
README = ROOT.joinpath("README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The one code block in ``language``."""
    (code,) = re.findall(
        rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE
    )
    return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has saved: net.py and lab.toml."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "net.py").write_text(block("python"))
    (folder / "lab.toml").write_text(block("toml"))
    return folder


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    return trace_chain(load_experiment(read_source(folder / "net.py"), {}))


@pytest.mark.parametrize("language", ["python", "toml"])
def test_own_model_and_own_cluster_are_short(language: str):
    assert len([line for line in block(language).splitlines() if line.strip()]) <= 15


def test_the_picture_is_the_quickstarts_plan():
    chain = trace_chain(quickstart.experiment())
    plan = text.read(ROOT / "experiments/quickstart_plan.txt")
    cluster = Cluster.from_toml(ROOT / "experiments/clusters/quickstart.toml")
    assert block("text") == f"{picture(plan, chain, cluster)}\n"


def test_the_planner_puts_own_model_on_all_of_own_cluster(folder: Path, chain: Chain):
    experiment = load_experiment(read_source(folder / "net.py"), {})
    cluster = Cluster.from_toml(folder / "lab.toml")
    plan = make_plan(chain, cluster, batch_size=experiment.batch_size)
    used = {name for _, stage in plan.stages() for name in stage.devices}
    assert used == {"box/0", "box/1", "box/2"}
    assert sum(replica.samples for replica in plan.replicas) == experiment.batch_size


def test_own_model_trains_on_stand_ins_for_own_cluster(
    folder: Path, chain: Chain, monkeypatch: pytest.MonkeyPatch
):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # `run` writes to them
    plan = make_plan(
        chain,
        Cluster.from_toml(folder / "lab.toml"),
        batch_size=4,
        options=PlanOptions(use_all_devices=True),
    )
    (folder / "plan.txt").write_text(text.render(plan, chain))
    command = ["run", str(folder / "net.py"), "--cluster", str(folder / "lab.toml")]
    command += ["--plan", str(folder / "plan.txt"), "--emulate"]
    command += ["--set", "steps=2", "--set", "batch_size=4", "--out", str(folder)]
    assert main(command) == 0
    first, second = read_metrics(folder / "net-001" / "metrics.jsonl")
    assert second["loss"] < first["loss"] < 5.6  # ln 256 is 5.55


def test_an_own_loop_changes_by_three_lines_and_no_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = block("diff").replace("range(20)", "range(4)").splitlines()
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    assert [line.split("(")[0] for line in added] == [
        "import hexijax; hexijax.emulate",
        "return losses, np.ones",
        "trainer = hexijax.Trainer",
        "value = trainer.step",
    ]
    monkeypatch.chdir(folder)
    printed = []
    for other in "+-":  # the program without the lines of the other
        program = "\n".join(x[1:] for x in lines if not x.startswith(other))
        exec(compile(program, "loop.py", "exec"), {})
        printed.append(capsys.readouterr().out)
    plain, ours = printed
    assert ours == plain
    assert len(ours.splitlines()) == 4


def test_every_extra_for_a_card_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"-e '\.\[(\w+)\]'", README))
    assert named <= project["optional-dependencies"].keys()
    assert {"cuda12", "cuda13", "rocm", "tpu", "test"} == named


def test_every_file_it_names_is_there():
    links = re.findall(r"\]\(([\w./]+)\)", README)
    named = re.findall(r"experiments/[\w/]+\.\w+|CONTRIBUTING\.md", README)
    for path in {*links, *named}:
        assert (ROOT / path).is_file(), path
    for room in re.findall(r"hexijax/\w+(?=  )", README):
        assert (ROOT / room).is_dir(), room


def test_a_newcomers_slips_are_answered(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # `plan` writes to them
    without = re.sub(r", optimizer=[^)]*\)", "", block("python"))
    (folder / "bare.py").write_text(without)
    cluster = str(folder / "lab.toml")
    assert main(["plan", str(folder / "bare.py"), "--cluster", cluster]) == 2
    assert capsys.readouterr().err == (
        "Error: The experiment 'bare' has no optimizer. Give it an optax gradient "
        "transformation, such as optax.adamw(1e-3).\n"
    )
    monkeypatch.chdir(ROOT)
    for name in ("experiments/quikstart.py", "experiments.quikstart"):
        assert main(["plan", name]) == 2
        said = capsys.readouterr().err
        assert "Did you mean 'experiments/quickstart.py'?" in said
        assert "bench_llama" not in said  # it is no experiment
