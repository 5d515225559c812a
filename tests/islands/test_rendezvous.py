"""Who is at fault, who is numbered how, who may come, at the place where they meet."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hexijax.errors import UserError
from hexijax.islands import array_rates, rates
from hexijax.islands.asking import Asking
from hexijax.islands.launcher import Launcher, Outcome
from hexijax.islands.member import Dismissed, Member
from hexijax.islands.rendezvous import Rendezvous
from hexijax.islands.transfer import start_server
from hexijax.islands.wire import checked, joined, new_token, split_address
from hexijax.islands.world import IslandLost
from tests.islands.nearby import all_at_once

NAMES = ("a", "b", "c")


def until(true: Callable[[], bool]) -> None:
    by_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < by_s
        time.sleep(0.01)


@pytest.fixture
def three() -> Iterator[tuple[Rendezvous, dict[str, Member]]]:
    """Three islands that have met; they beat five times a second."""
    meeting = Rendezvous(NAMES, run="test", silence_s=2.0)
    meeting.brief({})
    members = {
        name: Member.connect(meeting.address, name, token=meeting.token, seconds=5.0)
        for name in NAMES
    }
    all_at_once(
        [
            lambda m=member: m.join(
                m.welcome(-1, 5.0), address="h:1", facts={}, seconds=5.0, pull_s=1.0
            )
            for member in members.values()
        ]
    )
    yield meeting, members
    for member in members.values():
        member.leave(0)
    meeting.close()


def test_of_islands_that_wait_in_a_chain_the_last_is_at_fault(three: Any):
    meeting, members = three
    assert meeting.culprit("b", 4.0) == "b"
    members["b"].waits = lambda: ("c", 5.0)
    until(lambda: meeting.culprit("b", 4.0) == "c")
    assert meeting.culprit("b", 20.0) == "b"  # it waits since just now
    assert meeting.culprit("b", 0.0) == "b"  # what it sent was wrong
    members["c"].waits = lambda: ("a", 5.0)
    until(lambda: meeting.culprit("b", 4.0) == "a")
    members["a"].waits = lambda: ("b", 5.0)  # a circle
    until(lambda: meeting.culprit("b", 4.0) == "b")


def test_who_does_not_come_where_all_meet_is_named_in_time(three: Any):
    meeting, members = three

    def meet(name: str) -> str:
        with pytest.raises(IslandLost) as lost:
            members[name].gather("halt", 1, 1.0)
        assert "all islands at 'halt' did not come within 1.0 s" in str(lost.value)
        return lost.value.island

    threading.Timer(0.6, lambda: found.append(meeting.culprit("a", 0.5))).start()
    found: list[str] = []
    assert all_at_once([lambda: meet("a"), lambda: meet("b")]) == ["c", "c"]
    assert found == ["c"]


def test_who_comes_after_another_was_lost_hears_of_it():
    meeting = Rendezvous(NAMES, run="test")
    meeting.brief({})
    meeting.lose("b", "it was killed")

    def connect(name: str) -> Member:
        return Member.connect(meeting.address, name, token=meeting.token, seconds=5.0)

    def join(member: Member, after: int) -> None:
        welcome = member.welcome(after, 5.0)
        member.join(welcome, address="h:1", facts={}, seconds=5.0, pull_s=1.0)

    first = connect("a")
    with pytest.raises(IslandLost, match="it was killed") as lost:
        join(first, -1)
    assert lost.value.island == "b"
    meeting.anew(("a", "c"), {})
    members = (first, connect("c"))
    all_at_once([lambda m=member: join(m, 0) for member in members])
    assert [member.lost() for member in members] == [None, None]
    for member in members:
        member.leave(0)
    meeting.close()


def test_islands_are_numbered_as_in_the_cluster_and_who_is_not_needed_goes():
    """The second of three has nothing to do under this plan."""
    meeting = Rendezvous(("a", "c"), run="test", known=NAMES)
    meeting.brief({})
    outcome: list[Outcome] = []
    launcher = Launcher(meeting, None)
    thread = threading.Thread(target=lambda: outcome.append(launcher.run()))
    thread.start()
    members = [
        Member.connect(
            meeting.address, str(i), token=meeting.token, seconds=5.0, of=len(NAMES)
        )
        for i in range(len(NAMES))
    ]
    assert [m.welcome(-1, 5.0).islands for m in (members[0], members[2])] == [
        ("a", "c")
    ] * 2
    with pytest.raises(Dismissed):
        members[1].welcome(-1, 5.0)
    assert [member.name for member in members] == list(NAMES)
    for member in members:
        member.leave(0)
    thread.join(10.0)
    assert outcome[0].code == 0
    assert outcome[0].lost == ()


def test_a_token_that_can_be_guessed_is_refused():
    assert checked(new_token())
    for weak in ("guess", "a" * 64, "0123456701234567"[:15]):
        with pytest.raises(
            UserError, match="HEXIJAX_TOKEN has .* unlike, and needs 16"
        ):
            checked(weak)


@pytest.mark.usefixtures("backend")
def test_addresses_of_version_6():
    meeting = Rendezvous(["a"], run="test", address="[::1]:0")
    host, port = split_address(meeting.address)
    assert (host, joined(host, port)) == ("::1", meeting.address)
    member = Member.connect(meeting.address, "a", token=meeting.token, seconds=5.0)
    assert member.host == "::1"
    assert split_address(start_server(joined(member.host, 0)).address)[0] == "::1"
    member.leave(0)
    meeting.close()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("way", [rates, array_rates])
def test_a_way_is_timed(way: Any, host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hexijax.islands.rates.MOST_S", 0.2)
    told: list[str] = []
    token = new_token()
    server = threading.Thread(target=lambda: way.serve(host, token, told.append))
    server.start()
    until(lambda: bool(told))
    latency_s, bytes_per_s = way.measure(told[0], token)
    server.join(5.0)
    assert not server.is_alive()
    assert 0 < latency_s < 0.1
    assert bytes_per_s > 1e6


def test_the_last_question_counts_and_nobody_waits_for_an_answer():
    gate, asked = threading.Event(), list[str]()

    def ask(question: str) -> str:
        asked.append(question)
        gate.wait(10.0)
        if question == "why":
            raise UserError("no answer")
        return question.upper()

    asking = Asking(ask)
    assert asking.answer() is None
    asking.begin("first")
    until(lambda: asked == ["first"])
    for question in ("second", "last", "last"):
        asking.begin(question)
    assert asking.answer() is None
    gate.set()
    found: list[Any] = []
    until(lambda: bool(found.append(asking.answer()) or found[-1]))
    assert found[-1] == ("last", "LAST")
    assert asked == ["first", "last"]  # nobody asked for the second any more
    assert asking.answer() is None
    asking.begin("why")
    with pytest.raises(UserError, match="no answer"):
        until(lambda: asking.answer() is not None)
