"""Life and death of islands, with stand-ins that have no JAX."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexijax.errors import UserError
from hexijax.islands.facts import disagreement
from hexijax.islands.launcher import Launcher, Outcome
from hexijax.islands.member import LauncherGone, Member
from hexijax.islands.processes import Started
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.wire import TOKEN, Refused

ROOT = Path(__file__).parents[2]
NAMES = ("a", "b", "c")
ENDLESS = 1_000_000


class Job:
    """A launcher over stand-ins, run in this process's main thread."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        elastic: bool = False,
        slow_s: float = 0.0,
        **ways: str,
    ):
        """``slow_s``: what a plan takes that is not for all."""
        self.brief = {"steps": steps, "elastic": elastic}
        self.meeting = Rendezvous(NAMES, run="test", silence_s=2.0)
        self.meeting.brief(self.brief)
        self.started: dict[str, Started] = {}
        self.said: list[str] = []
        self.ways, self.folder, self.slow_s = ways, folder, slow_s
        self.starts: list[str] = []
        self.launcher = Launcher(
            self.meeting,
            self.start,
            replan=self.replan if elastic else None,
            restart=elastic,
            join_s=60.0,
            grace_s=5.0,
            say=self.said.append,
        )

    def replan(self, names: tuple[str, ...]) -> Any:
        if names != NAMES:
            time.sleep(self.slow_s)
        return names, self.brief

    def start(self, name: str) -> Started:
        self.starts.append(name)
        words = [name, self.meeting.address, self.ways.get(name, "well")]
        self.started[name] = Started(
            name,
            [sys.executable, "-m", "tests.islands.standin", *words],
            log=self.folder / f"{name}.log",
            environ={TOKEN: self.meeting.token, "PYTHONPATH": str(ROOT)},
        )
        return self.started[name]

    def run(self, meanwhile: Callable[["Job"], None] | None = None) -> Outcome:
        if meanwhile:
            threading.Thread(target=meanwhile, args=(self,), daemon=True).start()
        outcome = self.launcher.run()
        assert all(p.poll() is not None for p in self.started.values())
        return outcome

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text() if file.is_file() else ""

    def trains(self, generation: int = 0) -> None:
        """Waits until all do."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if all(f"generation {generation} " in self.log(n) for n in NAMES):
                time.sleep(0.1)
                return
            time.sleep(0.02)
        raise AssertionError(f"no generation {generation}: {self.said}")


def test_islands_meet_count_and_leave(tmp_path: Path):
    job = Job(tmp_path, steps=5)
    outcome = job.run()
    assert outcome.code == 0, job.said
    assert not outcome.lost
    assert {k: v["done"] for k, v in outcome.said.items()} == dict.fromkeys(NAMES, 5)


def test_a_killed_island_is_named_and_ends_the_job(tmp_path: Path):
    job = Job(tmp_path, steps=ENDLESS, b="child")

    def kill(job: Job) -> None:
        job.trains()
        os.kill(job.started["b"].pid, signal.SIGKILL)

    outcome = job.run(kill)
    assert outcome.code == 3
    assert outcome.lost == (("b", "it was killed by SIGKILL"),)
    assert "IslandLost: Island 'b' is lost" in job.log("a")
    assert not alive(int(job.log("b").split()[1]))  # what it started has ended too


def test_a_stopped_island_is_fenced_and_named_within_the_set_time(tmp_path: Path):
    job, when = Job(tmp_path, steps=ENDLESS), [0.0]

    def stop(job: Job) -> None:
        job.trains()
        when[0] = time.monotonic()
        os.kill(job.started["c"].pid, signal.SIGSTOP)

    outcome = job.run(stop)
    assert outcome.code == 3
    ((name, why),) = outcome.lost
    assert (name, why[:26]) == ("c", "it has said nothing for 2.")
    assert job.started["c"].poll() == -signal.SIGKILL
    assert time.monotonic() - when[0] < 8.0


def test_an_island_that_is_cut_off_is_named_and_ends(tmp_path: Path):
    job = Job(tmp_path, steps=ENDLESS, b="cut")
    outcome = job.run()
    assert outcome.code == 3
    ((name, why),) = outcome.lost
    assert name == "b"
    assert why.startswith(("it hung up", "it ended with exit code 3"))


def test_a_fault_of_an_island_ends_all_with_its_code_and_its_words(tmp_path: Path):
    job = Job(tmp_path, steps=ENDLESS, b="fault")
    assert job.run().code == 70
    assert "ValueError: a fault of its own" in "\n".join(job.said)


def test_unlike_code_is_refused_before_anything_runs(tmp_path: Path):
    job = Job(tmp_path, steps=5, c="code")
    assert job.run().code == 2
    (said,) = job.said  # once, not by each
    assert "The islands' code is not the same: c on a, b and other on c." in said
    assert "generation" not in job.log("a")


def test_ctrl_c_ends_all_after_one_step_and_twice_at_once(tmp_path: Path):
    job = Job(tmp_path, steps=ENDLESS)

    def interrupt(job: Job) -> None:
        job.trains()
        os.kill(os.getpid(), signal.SIGINT)

    outcome = job.run(interrupt)
    assert outcome.code == 130
    assert len({words["done"] for words in outcome.said.values()}) == 1

    job = Job(tmp_path / "twice", steps=ENDLESS)

    def twice(job: Job) -> None:
        job.trains()
        os.kill(job.started["a"].pid, signal.SIGSTOP)  # no step will end
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    began = time.monotonic()
    assert job.run(twice).code == 130
    assert time.monotonic() - began < 30


def test_an_elastic_job_outlives_kills_and_takes_islands_back(tmp_path: Path):
    job = Job(tmp_path, steps=120, elastic=True)

    def kill(job: Job) -> None:
        job.trains()
        os.kill(job.started["b"].pid, signal.SIGKILL)
        job.trains(2)  # 1: without it, 2: with it again
        os.kill(job.started["a"].pid, signal.SIGSTOP)
        job.trains(4)

    outcome = job.run(kill)
    assert outcome.code == 0, job.said
    assert [name for name, _ in outcome.lost] == ["b", "a"]
    assert {v["done"] for v in outcome.said.values()} == {120}
    assert "generation 1 from" not in job.log("b")


def test_while_it_plans_the_launcher_sees_who_else_is_lost(tmp_path: Path):
    job = Job(tmp_path, steps=120, elastic=True, slow_s=2.0)
    when: dict[str, float] = {}

    def say(line: str) -> None:
        job.said.append(line)
        when.setdefault(line.split(":")[0].removesuffix(" is lost"), time.monotonic())

    job.launcher._say = say

    def kill(job: Job) -> None:
        job.trains()
        os.kill(job.started["b"].pid, signal.SIGKILL)
        while not job.said:
            time.sleep(0.02)
        os.kill(job.started["c"].pid, signal.SIGKILL)

    outcome = job.run(kill)
    assert outcome.code == 0, job.said
    assert [name for name, _ in outcome.lost] == ["b", "c"]
    assert when["island c"] - when["island b"] < 1.0
    assert when["generation 1"] > when["island b"] + 2.0
    assert {v["done"] for v in outcome.said.values()} == {120}


def test_an_island_that_never_joins_stays_away_after_a_few_losses(tmp_path: Path):
    job = Job(tmp_path, steps=400, elastic=True, b="dies")
    outcome = job.run()
    assert outcome.code == 0, job.said
    assert "island b was lost 5 times before it joined; it stays away" in job.said
    assert job.starts.count("b") == len(outcome.lost) == 5


def test_no_island_outlives_its_launcher(tmp_path: Path):
    """Killed, it can tell nobody: one island is stopped, and cannot hear either."""
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.islands.test_launcher import ENDLESS, Job\n"
        "job = Job(Path(sys.argv[1]), steps=ENDLESS); job.run()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT)
    try:
        job = object.__new__(Job)
        job.folder, job.said = tmp_path, []
        job.trains()
        pids = children(launcher.pid)
        assert len(pids) == 3
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        launcher.kill()
        launcher.wait()
    until = time.monotonic() + 5
    while time.monotonic() < until and any(map(alive, pids)):
        time.sleep(0.05)
    assert not any(map(alive, pids))


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_who_does_not_know_the_token_is_turned_away_and_harms_nobody():
    said: list[str] = []
    meeting = Rendezvous(["a"], run="test", say=said.append)
    meeting.brief({})
    with pytest.raises(Refused, match="The launcher has another token. HEXIJAX_TOKEN"):
        Member.connect(meeting.address, "a", token="guess", seconds=2.0)
    host, port = meeting.address.split(":")
    odd = [
        struct.pack(">I", len(words)) + words
        for words in (
            b"[" * 4000,
            b'{"hexijax": 1, "nonce": "\\ud800", "proof": "x"}',
            b'{"hexijax": 1, "nonce": "x", "proof": "\xc3\xa4"}',
        )
    ]
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\xff" * 9, b"", *odd):
        stranger = socket.create_connection((host, int(port)), timeout=2)
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    member = Member.connect(meeting.address, "a", token=meeting.token, seconds=2.0)
    for name, says in [
        ("a", "Island 'a' is there already: process"),
        ("b", "This run has no island 'b'."),
    ]:
        other = Member.connect(meeting.address, name, token=meeting.token, seconds=2.0)
        with pytest.raises(Refused, match=says):
            other.welcome(-1, 2.0)
    turned_away = "127.0.0.1 was turned away: a wrong token"
    assert any(turned_away in line for line in said)
    world = member.join(
        member.welcome(-1, 2.0), address="h:1", facts={}, seconds=2.0, pull_s=1.0
    )
    assert len(world.key) == 32
    with pytest.raises(
        UserError, match="Island a waited 0.1 s for the launcher's plan"
    ):
        member.welcome(5, 0.1)
    member.leave(0)
    meeting.close()


def test_a_port_in_use_is_said_and_a_rendezvous_that_is_none():
    meeting = Rendezvous(["a"], run="test")
    port = meeting.address.rpartition(":")[2]
    with pytest.raises(UserError, match=f"Port {port} of 127.0.0.1 is in use"):
        Rendezvous(["a"], run="test", address=meeting.address)
    with pytest.raises(UserError, match="'nowhere' is no address: HOST:PORT"):
        Rendezvous(["a"], run="test", address="nowhere")
    meeting.close()
    with pytest.raises(
        UserError, match=f"No launcher at 127.0.0.1:{port} within 0.3 s"
    ):
        Member.connect(f"127.0.0.1:{port}", "a", token="", seconds=0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = "{}:{}".format(*other.getsockname())
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with pytest.raises(Refused, match="is no rendezvous of hexijax"):
            Member.connect(address, "a", token="", seconds=2.0)


def test_an_island_whose_launcher_goes_is_ended_wherever_it_is():
    meeting = Rendezvous(["a"], run="test")
    meeting.brief({})
    ended = threading.Event()
    member = Member.connect(
        meeting.address,
        "a",
        token=meeting.token,
        seconds=2.0,
        end=ended.set,
        grace_s=0.05,
    )
    member.welcome(-1, 2.0)
    meeting.close()
    with pytest.raises(LauncherGone, match="the launcher has gone"):
        member.welcome(0, 2.0)
    assert ended.wait(2.0)
    assert member.lost() == "the launcher"


def test_facts_that_differ_are_named_with_the_islands_that_have_them():
    same = {"plan": "p", "data": "d"}
    assert disagreement({"a": same, "b": same}) == ""
    said = disagreement({"a": same, "b": same, "c": {"plan": "p", "data": "e"}})
    assert said.startswith("The islands' data is not the same: d on a, b and e on c.")
    assert said.endswith("bring the data's files to one state everywhere.")


def test_a_launcher_that_slept_blames_nobody():
    now = [0.0]
    meeting = Rendezvous(["a"], run="test", silence_s=10.0, clock=lambda: now[0])
    member = Member.connect(meeting.address, "a", token=meeting.token, seconds=2.0)
    meeting.heard.get(timeout=2.0)
    now[0] = 3600.0
    assert meeting.check() == {}
    member.leave(0)
    meeting.close()
