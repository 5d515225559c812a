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
STARTING_S = 10.0


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
            "ssh b ended without an exit code: it was killed there, or the connection "
            "broke",
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
