"""Islands over OpenSSH itself: a server of the test's own, on loopback."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hexijax.islands.launcher import Launcher, Outcome
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.ssh import Remote, address_of, run
from hexijax.report.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SERVER = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PasswordAuthentication no
UsePAM no
"""
CLIENT = """\
Host a b
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""
STARTING_S = 30.0
TINY = "tests/cli/tiny.py"
PLAN = """\
hexijax plan 1

objective   step_time
batch       8
schedule    1f1b
reductions  exact

replica 0  microbatches 2  size 4  samples 8
  stage 0  devices a/0  dtype float32  layers 0-1
  stage 1  devices b/0  dtype float32  layers 2-3

state *  even
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of an ``ssh`` that knows the hosts a and b, which are this one."""
    system = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    sshd, ssh = shutil.which("sshd", path=system), shutil.which("ssh")
    if sshd is None or ssh is None:
        pytest.skip("needs OpenSSH's client and server")
    made = tmp_path_factory.mktemp("ssh")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"port": port, "folder": made, "user": getpass.getuser()}
    for name in ("host", "key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made / name)]
        subprocess.run(make, check=True)
    (made / "server").write_text(SERVER.format(**given))
    (made / "client").write_text(CLIENT.format(**given))
    (made / "bin").mkdir()
    wrapper = made / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {ssh} -F {made}/client "$@"\n')
    wrapper.chmod(0o755)
    command = [sshd, "-D", "-e", "-f", str(made / "server")]
    with (made / "log").open("w") as log:
        server = subprocess.Popen(command, stderr=log)
    try:
        until = time.monotonic() + STARTING_S
        while subprocess.run([wrapper, "a", "true"], capture_output=True).returncode:
            if server.poll() is not None or time.monotonic() > until:
                pytest.skip(f"no sshd for this user: {(made / 'log').read_text()}")
            time.sleep(0.1)
        yield made
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(autouse=True)
def _path(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def launch(
    folder: Path,
    steps: int,
    way: str = "well",
    meanwhile: Callable[[Rendezvous], None] | None = None,
) -> Outcome:
    """Two stand-ins over ssh; ``way``: how b goes wrong."""
    meeting = Rendezvous(("a", "b"), run="test", silence_s=2.0)
    meeting.brief({"steps": steps})

    def start(name: str) -> Remote:
        def process() -> int | None:
            there = meeting.where(name)
            return there[1] if there else None

        words = [sys.executable, "-m", "tests.islands.standin", name, meeting.address]
        return Remote(
            name,
            name,
            [*words, way if name == "b" else "well"],
            folder=str(ROOT),
            token=meeting.token,
            log=folder / f"{name}.log",
            process=process,
            tell=lambda name, line: None,
        )

    if meanwhile:
        threading.Thread(target=meanwhile, args=(meeting,), daemon=True).start()
    return Launcher(meeting, start, join_s=60.0, grace_s=5.0, say=print).run()


def process_of_b(meeting: Rendezvous) -> int:
    """Its number, once all have joined."""
    while meeting.missing() or meeting.where("b") is None:
        time.sleep(0.05)
    found = meeting.where("b")
    assert found is not None
    return found[1]


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_islands_on_hosts_train_and_end(tmp_path: Path):
    assert launch(tmp_path, steps=3).code == 0
    assert (tmp_path / "b.log").read_text().endswith("done 3\n")
    assert address_of("b") == "127.0.0.1"
    assert run("a", ["cat"], folder="/", seconds=10.0) == ""


def test_who_is_killed_on_its_host_is_lost_and_not_at_fault(tmp_path: Path):
    outcome = launch(tmp_path, steps=3, way="dies")
    assert outcome.code == 3
    assert outcome.lost == (
        (
            "b",
            "ssh b ended without an exit code: it was killed there, or there is no "
            "connection",
        ),
    )


def test_a_fault_of_its_own_keeps_its_exit_code(tmp_path: Path):
    assert launch(tmp_path, steps=3, way="fault").code == 70


def test_who_is_stopped_on_its_host_is_killed_there(tmp_path: Path):
    stopped: list[int] = []

    def stop(meeting: Rendezvous) -> None:
        stopped.append(process_of_b(meeting))
        os.kill(stopped[0], signal.SIGSTOP)

    outcome = launch(tmp_path, steps=1_000_000, meanwhile=stop)
    assert (outcome.code, [name for name, _ in outcome.lost]) == (3, ["b"])
    until = time.monotonic() + 5.0
    while runs(stopped[0]) and time.monotonic() < until:
        time.sleep(0.05)  # the server has yet to see its end
    assert not runs(stopped[0])


@pytest.mark.laws
def test_from_the_names_of_hosts_to_a_job_with_the_numbers_of_one_process(
    tmp_path: Path,
):
    lab, plan = tmp_path / "lab.toml", tmp_path / "plan.txt"
    plan.write_text(PLAN)
    train = (TINY, "--plan", str(plan), "--out", str(tmp_path))
    own = {k: v for k, v in os.environ.items() if not k.startswith(("XLA", "JAX"))}
    for words in (
        ("cluster", "init", "--ssh", "a,b", "-o", str(lab)),
        ("cluster", "check", str(lab)),
        ("launch", *train, "--ssh", str(lab)),
        ("run", *train, "--cluster", str(lab)),
    ):
        command = [sys.executable, "-m", "hexijax.cli.main", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=own, capture_output=True, text=True
        )  # as on hosts: ssh hands no environment on
        assert done.returncode == 0, done.stdout + done.stderr
    apart, alone = (
        [x["loss"] for x in read_metrics(tmp_path / f"tiny-00{i}" / "metrics.jsonl")]
        for i in (1, 2)
    )
    assert len(apart) == 4
    assert apart == alone
