"""A trace is replayed by the rules of a run, and little is lost."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import spot_replay
from hexijax.elastic.replay import Costs, Turn, drawn, from_counts, replay
from tests.elastic.examples import NODES, four

CLUSTER = four()
COSTS = Costs(
    step_s=lambda nodes: 4.0 / nodes,
    state_bytes=4e9,
    detect_s=2,
    plan_s=5,
    compile_s=3,
    start_s=10,
)


def turns(*what: str) -> list[Turn]:
    """Of ``3+a``: a comes at 3 s, or ``3-a``: it is lost then."""
    found = []
    for word in what:
        sign = "+" if "+" in word else "-"
        at_s, _, nodes = word.partition(sign)
        found += [Turn(at_s=float(at_s), node=n, here=sign == "+") for n in nodes]
    return found


def test_what_a_loss_costs():
    # Start 10 s and plan 5 s, state read from afar 8 s: 23 s; then a step a second.
    found = replay(CLUSTER, turns("0+abcd"), COSTS, until_s=123.5)
    assert (found.steps, found.free_steps, found.replans) == (100, 123.5, 0)
    # b is lost in the middle of the 21st step. Noticed 2 s after its end, compiled 3 s,
    # moved 4/3 s; 4/3 s a step from there. Nothing but the half step is lost.
    found = replay(CLUSTER, turns("0+abcd", "43.5-b"), COSTS, until_s=123.5)
    assert found.replans == 1
    assert found.again == 0
    assert found.steps == 20 + int((123.5 - 44 - 2 - 3 - 4 / 3) / (4 / 3))
    assert found.free_steps == pytest.approx(43.5 + (123.5 - 43.5) * 3 / 4)
    # Its neighbour c, which had its copy, goes too: back to the far tier's step.
    found = replay(
        CLUSTER,
        turns("0+abcd", "43.5-bc"),
        dataclasses.replace(COSTS, far_every=15),
        until_s=60,
    )
    assert (found.replans, found.again) == (1, 5)
    # a and c are none of each other's neighbours.
    assert replay(CLUSTER, turns("0+abcd", "43.5-ac"), COSTS, until_s=60).again == 0
    # All go, and come back: what was saved far away is all there is.
    found = replay(CLUSTER, turns("0+abcd", "43.5-abcd", "50+abc"), COSTS, until_s=60)
    assert (found.steps, found.again, found.stopped) == (0, 20, 1)


def test_a_join_is_waited_for_until_it_pays():
    late = replay(CLUSTER, turns("0+abc", "100+d"), COSTS, until_s=200, steps=70)
    assert late.replans == 0
    worth = replay(CLUSTER, turns("0+abc", "100+d"), COSTS, until_s=200, steps=500)
    assert worth.replans == 1
    assert worth.again == 0
    assert worth.steps > late.steps


@given(seed=st.integers(0, 50), rate=st.sampled_from([0.5, 5.0, 50.0]))
def test_never_more_than_for_free(seed: int, rate: float):
    trace = drawn(NODES, lost_per_hour=rate, back_s=60, until_s=1800, seed=seed)
    assert [turn.at_s for turn in trace] == sorted(turn.at_s for turn in trace)
    found = replay(CLUSTER, trace, COSTS, until_s=1800)
    assert 0 <= found.steps <= found.free_steps


def test_counts_are_turns():
    assert from_counts([0, 2, 1, 5], 300, ["a", "b"]) == turns(
        "300+ab", "600-b", "900+b"
    )


def test_a_trace_is_read(tmp_path: Path):
    file = tmp_path / "zone.json"
    file.write_text(
        '{"metadata": {"gap_seconds": 300}, "data": [0, 16, 16, 16, 0, 7, 16, 16, 16]}'
    )
    ((name, found),) = spot_replay.rows([file])
    assert (name, found.stopped) == ("zone", 1)
    assert 0 < found.kept < 1


def test_at_published_rates_nine_tenths_are_kept():
    for _, found in spot_replay.rows([]):
        assert found.kept >= 0.9
        assert found.replans > 20
    assert "| drawn, 33% an hour |" in spot_replay.render(spot_replay.rows([]))
