"""Who takes part: told by anyone, in order, and never by a clock that jumped."""

import os
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.cluster import ClusterError
from hexijax.elastic.heartbeat import Beating, Heartbeats
from hexijax.elastic.members import Members, lost
from hexijax.elastic.notice import on_sigterm
from hexijax.elastic.replans import Replans
from hexijax.elastic.roll import Roll
from hexijax.elastic.stragglers import Stragglers
from hexijax.errors import UserError
from tests.elastic.examples import NODES, four

CLUSTER = four()


def told(members: Members) -> list[str]:
    return [str(event) for event in members.take()]


def test_what_happens_is_told_once_and_in_order():
    members = Members(CLUSTER, ["a", "b", "c"])
    assert members.present == ("a", "b", "c")
    assert not members.changed.is_set()
    members.lose("b")
    members.lose("b")
    members.join("d")
    members.notice("a", 120)
    assert members.changed.is_set()
    assert told(members) == ["b lost", "d joined", "a leaves within 120 s"]
    assert not members.changed.is_set()
    # Who is about to leave can be read, and is not planned for.
    assert members.present == ("a", "c", "d")
    assert members.staying == ("c", "d")
    assert [node.name for node in members.cluster().nodes] == ["c", "d"]
    members.join("a")  # it stays
    assert members.staying == ("a", "c", "d")
    members.take()
    # Lost and back again: it is there, and what it held is not.
    members.lose("c")
    members.join("c")
    assert members.intact == {"a", "d"}
    events = members.take()
    assert lost(events) == {"c"}
    assert members.intact == {"a", "c", "d"}
    assert members.staying == ("a", "c", "d")
    with pytest.raises(ClusterError, match="has no node 'e'"):
        members.join("e")
    for node in NODES:
        members.lose(node)
    with pytest.raises(UserError, match=r"All 4 nodes of cluster 'four' are lost or"):
        members.cluster()


def test_a_slow_node_is_planned_for_at_its_speed():
    members = Members(CLUSTER)
    assert members.cluster() is CLUSTER
    members.slow("b", 0.5)
    members.slow("b", 0.5)
    assert told(members) == ["b runs at 0.50 of its speed"]
    seen = members.cluster()
    slow, usual = seen.device("b/0").profile, seen.device("a/0").profile
    assert slow.dense_flops_per_s["float32"] == usual.dense_flops_per_s["float32"] / 2
    assert slow.memory_bytes_per_s == usual.memory_bytes_per_s / 2
    assert seen.fingerprint() != CLUSTER.fingerprint()
    members.slow("b", 1.0)
    assert members.cluster() is CLUSTER
    members.slow("b", 0.5)
    members.lose("b")
    members.join("b")  # another machine, perhaps
    assert members.speed("b") == 1.0
    with pytest.raises(UserError, match=r"run at 0 of its speed\. A speed is above 0"):
        members.slow("a", 0)


GAPS = st.sampled_from([1.0, 1.0, 1.0, 0.4, 2.0, 3600.0, -50.0, 0.0])


@given(gaps=st.lists(GAPS, min_size=1, max_size=60))
def test_no_jump_of_the_clock_is_a_silence(gaps: list[float]):
    """A node that beats between any two checks is never lost, whatever the clock does;
    nor is one that the watcher did not hear while it slept."""
    now = [100.0]
    members = Members(CLUSTER, ["a"])
    beats = Heartbeats(members, silence_s=5, every_s=1, clock=lambda: now[0])
    for count, gap in enumerate(gaps):
        beats.beat("a", "first", count)
        now[0] += gap
        assert beats.check() == ()
    assert members.present == ("a",)


def test_silence_is_a_loss():
    now = [0.0]
    members = Members(CLUSTER, ["a", "b"])
    beats = Heartbeats(members, silence_s=5, every_s=1, clock=lambda: now[0])
    lost_at: list[float] = []
    for count in range(20):
        now[0] += 1
        beats.beat("a", "first", count)
        beats.beat("b", "first", min(count, 7))  # an old message says nothing
        if beats.check():
            lost_at.append(now[0])
    assert members.present == ("a",)
    assert lost_at == [13.0]  # its last beat was at 8
    assert told(members) == ["b lost"]
    beats.beat("b", "first", 8)
    assert told(members) == ["b joined"]
    # A node that starts again before it is missed was lost all the same.
    beats.beat("a", "second", 0)
    assert told(members) == ["a lost", "a joined"]
    beats.beat("d", "first", 0)
    assert told(members) == ["d joined"]
    ticks = threading.Event()
    with Beating(ticks.set, 0.01):
        assert ticks.wait(5)


def test_a_slow_node_is_one_that_falls_behind_the_others():
    members = Members(CLUSTER)
    watch = Stragglers(members)
    expected = dict.fromkeys("abc", 1.0)
    # All take three times as long as expected: that is the model of costs.
    usual = {"a": 3.0, "b": 3.1, "c": 2.9}
    for _ in range(20):
        assert watch.step(usual, expected) == ()
    # One slow step is none.
    watch.step(usual | {"b": 30.0}, expected)
    for _ in range(5):
        assert watch.step(usual, expected) == ()
    found = [watch.step(usual | {"b": 6.0}, expected) for _ in range(9)]
    assert [node for nodes in found for node in nodes] == ["b"]
    assert members.speed("b") == pytest.approx(0.5, rel=0.05)
    # It is told once, and again when it has recovered.
    for _ in range(10):
        assert watch.step(usual | {"b": 6.0}, expected) == ()
    found = [watch.step(usual, expected) for _ in range(10)]
    assert [node for nodes in found for node in nodes] == ["b"]
    assert members.speed("b") == 1.0
    assert Stragglers(members).step({"a": 9.0}, {"a": 1.0}) == ()


def test_a_new_plan_must_pay_unless_it_is_forced():
    replans = Replans(most=10)
    worth = {"now_s": 2.0, "then_s": 1.0, "cost_s": 20.0}
    assert replans.pays(**worth, steps_left=41)
    assert not replans.pays(**worth, steps_left=40)
    assert not replans.pays(**worth | {"then_s": 2.0}, steps_left=10**9)
    assert not Replans(horizon_steps=40).pays(**worth, steps_left=10**9)
    for done in range(5):
        replans.begin(done)
    assert not replans.pays(**worth, steps_left=10**9)  # what is left is for losses
    for done in range(5, 10):
        replans.begin(done)
    with pytest.raises(UserError, match=r"again 10 times, and members changed once mo"):
        replans.begin(11)
    vain = Replans(most_in_vain=5)
    for _ in range(6):
        vain.begin(7)
        vain.ended(5)
        vain.begin(6)  # a step was done, if one that had been done before
        vain.ended(6)
    for _ in range(5):
        vain.begin(6)
    with pytest.raises(UserError, match="6 times in a row without a step, and members"):
        vain.begin(6)


def test_a_file_says_who_takes_part(tmp_path: Path):
    members, file = Members(CLUSTER, ["a", "b"]), tmp_path / "run" / "members.txt"
    roll = Roll(file, members)
    roll.look()  # there is none
    roll.write()
    assert file.read_text() == (
        "# node  here | leaves SECONDS | gone\na  here\nb  here\nc  gone\nd  gone\n"
    )
    roll.look()
    assert told(members) == []
    file.write_text("a leaves 90  # a note\n\nb gone\nc here\n")
    roll.look()
    roll.look()
    assert told(members) == ["a leaves within 90 s", "b lost", "c joined"]
    for line, says in [
        ("a went", r"line 1: 'a went'\. A line is a node's name and `here`, `gone` or"),
        ("a leave 3", r"'a leave 3'.* Did you mean 'leaves'\?"),
        ("a here 3", "'a here 3'"),
        ("a leaves soon", "'a leaves soon'"),
        ("a", r"line 1: 'a'\. A"),
    ]:
        file.write_text(line)
        with pytest.raises(UserError, match=says):
            roll.look()
    file.write_text("e here")
    with pytest.raises(ClusterError, match="has no node 'e'"):
        roll.look()


def test_the_first_sigterm_is_a_notice():
    before = signal.getsignal(signal.SIGTERM)
    calls: list[int] = []
    with on_sigterm(lambda: calls.append(1)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == before  # the second one ends it
    assert calls == [1]
    assert signal.getsignal(signal.SIGTERM) == before
