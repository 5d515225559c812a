"""`hexijax launch`: the same plan over islands, with the numbers of one process."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hexijax.cli.main import main
from hexijax.islands.wire import new_token
from hexijax.report.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("backend")

ROOT = Path(__file__).parents[2]
TINY = str(Path(__file__).with_name("tiny.py"))
THREE = str(ROOT / "experiments/clusters/three.toml")
PLAN = """\
hexijax plan 1

objective   step_time
batch       8
schedule    1f1b
reductions  exact

replica 0  microbatches 2  size 3  samples 5
  stage 0  devices a/0-1  tensor 2  dtype float32  layers 0-1
  stage 1  devices b/0    dtype float32  layers 2-3

replica 1  microbatches 1  size 3  samples 3
  stage 0  devices c/0  dtype float32  layers 0-3

state *  even
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch):
    """`platform.prepare` writes to the environment; here it is put back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def command(tmp_path: Path, *arguments: str, what: str = "launch") -> list[str]:
    plan = tmp_path / "plan.txt"
    plan.write_text(PLAN)
    own = [TINY, "--cluster", THREE, "--plan", str(plan), "--out", str(tmp_path)]
    return [sys.executable, "-m", "hexijax.cli.main", what, *own, *arguments]


def run(
    words: list[str],
    meanwhile: Callable[[subprocess.Popen[str], str], None],
    seconds: float = 240.0,
) -> tuple[int, str]:
    """Runs a command; ``meanwhile`` sees each of its lines. Nobody is left behind."""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,  # XLA's flags are this process's, whose numbers are compared
    )
    shown: list[str] = []
    children: dict[str, int] = {}
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            shown.append(line)
            children |= islands(process.pid)
            meanwhile(process, line)
    timer.cancel()
    assert not [pid for pid in children.values() if Path(f"/proc/{pid}").exists()]
    return process.returncode, "".join(shown)


def islands(launcher: int) -> dict[str, int]:
    """Processes of a launcher's islands."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = file.read_text().rpartition(")")[2].split()[1]
            words = (file.parent / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == str(launcher) and "--island" in words:
            found[words[words.index("--island") + 1]] = int(file.parent.name)
    return found


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def test_islands_have_the_numbers_of_one_process_and_leave_one_run(tmp_path: Path):
    report = tmp_path / "report.json"
    words = command(tmp_path, "--local", "--json", str(report))
    code, shown = run(words, lambda process, line: None)
    assert code == 0, shown
    folder = tmp_path / "tiny-001"
    assert main(command(tmp_path, what="run")[3:]) == 0
    alone = tmp_path / "tiny-002"
    assert losses(folder) == losses(alone)
    assert json.loads(report.read_text())["status"] == "done"
    assert {p.stem for p in (folder / "logs").iterdir()} == {"a", "b", "c"}
    assert losses(folder / "islands" / "c") == losses(alone)
    weights = []
    for each in (folder, alone):
        assert main(["export", str(each), "--to", "safetensors"]) == 0
        weights.append((each / "safetensors" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "launch: no way to start islands was given. Choose one of --local, --ssh"),
        (["--local", "--serve"], "launch: --local and --serve were both given. Cho"),
        (["--local", "--serve", "--ray", "auto"], "--ray and --serve were all given"),
        (["--local", "--elastic", "--no-save"], "--elastic and --no-save were both"),
        (["--local", "--neighbour-every", "2"], "launch --neighbour-every 2: copies"),
        (["--local", "--elastic", "a"], "launch --elastic a: names of nodes are for"),
        (["--local", "--listen", "here"], "no address: HOST:PORT is needed"),
    ],
)
def test_bad_flags_are_one_message_and_2(arguments: list[str], says: str, capsys):
    assert main(["launch", TINY, "--cluster", THREE, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_weak_token_is_refused_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("HEXIJAX_TOKEN", "secret")
    assert main(["launch", TINY, "--cluster", THREE, "--serve"]) == 2
    said = capsys.readouterr()
    assert "HEXIJAX_TOKEN has 6 characters, 5 of them unlike, and needs 16" in said.err
    assert said.out == ""


def test_an_island_wants_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("HEXIJAX_TOKEN", raising=False)
    for arguments, says in [
        (["--island", "a"], "--island a: --rendezvous HOST:PORT is not given."),
        (
            ["--island", "a", "--rendezvous", "127.0.0.1:1"],
            "--island a: HEXIJAX_TOKEN is not given.",
        ),
    ]:
        assert main(["run", TINY, *arguments]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.laws
def test_an_island_killed_ends_the_job_by_name(tmp_path: Path):
    killed: list[int] = []

    def kill(process: subprocess.Popen[str], line: str) -> None:
        if line.startswith("step 1/") and not killed:  # b's own last lines follow
            killed.append(islands(process.pid)["b"])
            os.kill(killed[0], signal.SIGKILL)

    endless = ("--local", "--set", "steps=100000", "--save-every", "2")
    code, shown = run(command(tmp_path, *endless), kill)
    assert code == 3, shown
    assert "island b is lost: it was killed by SIGKILL\n" in shown


Says = Callable[[str, str], None]
"""Waits until what one has printed matches."""


@contextlib.contextmanager
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> Iterator[tuple[dict[str, subprocess.Popen[bytes]], Says]]:
    """A launcher and islands that others started, as a scheduler does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("HEXIJAX_TOKEN", new_token())
    serve = ("--serve", "--listen", address, "--set", "steps=60000", *flags)
    words = {"launch": command(tmp_path, *serve)}
    island = [sys.executable, "-m", "hexijax.cli.main", "run", TINY, "--island"]
    words |= {name: [*island, name, "--rendezvous", address] for name in "abc"}
    logs = {name: tmp_path / f"{name}.txt" for name in words}
    with contextlib.ExitStack() as stack:
        started: dict[str, subprocess.Popen[bytes]] = {}
        for name, each in words.items():
            log = stack.enter_context(logs[name].open("wb"))
            process = subprocess.Popen(each, cwd=ROOT, stdout=log, stderr=log)
            started[name] = process
            stack.callback(process.wait)
            stack.callback(process.kill)

        def says(name: str, what: str) -> None:
            until = time.monotonic() + 120.0
            while not re.search(what, logs[name].read_text()):
                assert time.monotonic() < until, (name, what, logs[name].read_text())
                time.sleep(0.05)

        yield started, says


@pytest.mark.laws
def test_islands_that_a_scheduler_ends_save_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with served(tmp_path, monkeypatch) as (started, says):
        says("a", "step [0-9]{3,}/")
        for name in "abc":
            started[name].send_signal(signal.SIGTERM)
        codes = {name: process.wait(60.0) for name, process in started.items()}
    assert codes == dict.fromkeys(("launch", *"abc"), 130)
    report = json.loads((tmp_path / "tiny-001" / "report.json").read_text())
    assert (tmp_path / "tiny-001" / "checkpoints" / str(report["steps"])).is_dir()


@pytest.mark.laws
def test_an_island_that_wakes_after_the_others_went_on_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Others started it, so that nobody could kill it when it fell silent."""
    steps = ("--elastic", "--silence", "3", "--save-every", "100")
    with served(tmp_path, monkeypatch, *steps) as (started, says):
        says("a", r"step [0-9]{3,}/")
        started["b"].send_signal(signal.SIGSTOP)
        says("launch", "island b is lost: .*\n.*generation 1: a")
        says("a", r"going on after step [0-9]+00:")
        says("a", r"going on after step (.*\n)+step ")
        woke = time.monotonic()
        started["b"].send_signal(signal.SIGCONT)
        assert started["b"].wait(20.0) == 3
        assert time.monotonic() - woke < 12.0
        assert started["launch"].poll() is None
        assert started["a"].poll() is None
        started["launch"].send_signal(signal.SIGINT)
        assert started["launch"].wait(60.0) == 130


FOUR = """\
format = 1
name = "four"
[kinds.slow]
vendor = "cpu"
memory_gib = 2
peak_tflops = { float32 = 0.00001 }
memory_gb_per_s = 10
host_link_gb_per_s = 10
source = "declared: so slow that no device is left out"
[links]
between_nodes = { latency_us = 50, bandwidth_gb_per_s = 1 }
"""
NODE = """\
[[nodes]]
name = "NAME"
devices = [{ kind = "slow", count = 1 }]
host_memory_gib = 4
host_cores = 1
"""


@pytest.mark.laws
def test_from_a_kill_to_the_next_step_of_those_left(
    tmp_path: Path, record_property: Any
):
    """What is between is told, part by part; programs are cached the second time."""
    file = tmp_path / "four.toml"
    file.write_text(FOUR + "".join(NODE.replace("NAME", name) for name in "abcd"))
    words = [sys.executable, "-m", "hexijax.cli.main", "launch", TINY, "--local"]
    words += ["--cluster", str(file), "--elastic", "--save-every", "10"]
    words += ["--set", "steps=100000", "--out", str(tmp_path)]

    def lose_one() -> tuple[float, str]:
        killed: list[float] = []
        trained: list[float] = []  # since when anew
        new: list[float] = []

        def watch(process: subprocess.Popen[str], line: str) -> None:
            step = re.match(r"step ([0-9]+)/", line)
            if killed and line.startswith("training:"):
                trained.append(time.monotonic())
            elif step and not killed and int(step[1]) > 50:
                time.sleep(5.0)  # plans for a loss are there
                os.kill(islands(process.pid)["b"], signal.SIGKILL)
                killed.append(time.monotonic())
            elif step and trained and not new:
                new.append(time.monotonic())
                process.send_signal(signal.SIGINT)

        code, shown = run(words, watch)
        assert code == 130, shown
        return new[0] - killed[0], shown

    lose_one()
    seconds, shown = lose_one()
    record_property("seconds", round(seconds, 2))
    after = shown[shown.index("island b is lost") :]
    (planned,) = re.findall(r"generation 1: a, c, d; planned in ([0-9.]+) s", after)
    parts = re.findall(r"(met|compiled|all had|moved) in ([0-9.]+) s", after)[:4]
    record_property("parts", {"planned": planned, **dict(parts)})
    assert [name for name, _ in parts] == ["met", "compiled", "all had", "moved"]
    assert " GB from memory in " in after  # but for what was the lost one's
    assert seconds < 20.0


@pytest.mark.laws
def test_twenty_kills_at_any_moment_leave_the_curve_as_it_is(tmp_path: Path):
    """While they train, save, recover or join; the launcher brings each back."""
    at, killed, busy = random.Random(1), [], threading.Lock()

    def kill_now(launcher: int) -> None:
        with busy:
            time.sleep(at.uniform(0.0, 5.0))
        there = islands(launcher)
        # Losses in a row before it joins keep an island away, so not the same twice.
        names = [name for name in sorted(there) if killed[-1:] != [name]]
        if names and len(killed) < 20:
            name = at.choice(names)
            with contextlib.suppress(ProcessLookupError):
                os.kill(there[name], signal.SIGKILL)
                killed.append(name)

    def kill(process: subprocess.Popen[str], line: str) -> None:
        moments = ("step ", "generation ", "training:", "compiling:", "going on")
        if line.startswith(moments) and not busy.locked():
            threading.Thread(target=kill_now, args=(process.pid,), daemon=True).start()

    steps = ("--set", "steps=500")
    elastic = ("--local", "--elastic", "--save-every", "1", "--silence", "30")
    code, shown = run(command(tmp_path, *elastic, *steps), kill, seconds=1500.0)
    assert code == 0, shown
    print(shown, killed)
    assert main(command(tmp_path, "--no-save", *steps, what="run")[3:]) == 0
    found, whole = (losses(tmp_path / f"tiny-00{i}") for i in (1, 2))
    assert found == pytest.approx(whole, rel=1e-5)
    assert len(found) == 500
    assert len(killed) == 20
