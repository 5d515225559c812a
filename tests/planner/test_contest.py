"""Contests: sensible clusters, models that fit, and an honest verdict."""

import json
import math
from pathlib import Path

import pytest

from hexijax.planner.contest import Score, Verdict, __main__, draw
from hexijax.planner.contest.draw import FAMILIES, ROOM, STATE_BYTES


@pytest.mark.parametrize("number", range(12))
def test_what_is_drawn_makes_sense(number: int):
    contest = draw(1, number)
    devices = contest.cluster.devices
    assert 4 <= len(devices) <= 512
    assert 2 <= len({device.kind for device in devices}) <= 6
    assert contest.chain.name.startswith(FAMILIES)
    room = sum(device.usable_memory_bytes for device in devices)
    assert contest.chain.num_params * STATE_BYTES <= ROOM * room
    assert contest.batch_size >= 2 * len(devices)
    for node in contest.cluster.nodes:
        assert node.num_slots <= 8
        assert node.link
        assert node.nic
        assert 0.1e9 <= node.nic.bytes_per_s <= 25e9


def test_equal_seeds_draw_equal_contests_and_others_do_not():
    assert draw(3, 5) == draw(3, 5)
    assert draw(3, 5) != draw(3, 6)
    assert draw(3, 5) != draw(4, 5)
    drawn = [draw(0, number) for number in range(60)]
    families = {contest.chain.name.split("-")[0] for contest in drawn}
    assert families == set(FAMILIES)
    sizes = sorted(len(contest.cluster.devices) for contest in drawn)
    assert sizes[0] < 8
    assert sizes[-1] > 256


def score(ours_s: float, *others_s: float, number: int = 0) -> Score:
    """A contest whose bound is one second."""
    return Score(
        contest=draw(0, number, most_devices=4),
        step_s=ours_s,
        others_s={f"style-{i}": s for i, s in enumerate(others_s)},
        bound_s=1.0,
        search_s=0.1,
    )


def test_the_median_is_of_contests_that_leave_something_to_win():
    near = [score(1.0, 1.05, 9.0)] * 5  # 0.95 of the bound: nobody can win much
    far = [score(1.0, 2.0, 1.2), score(1.0, 1.5), score(1.0, 1.4)]
    verdict = Verdict(scores=(*near, *far))
    assert [s.best_s for s in verdict.open] == [1.2, 1.5, 1.4]
    assert verdict.open_median == 1.4
    assert verdict.is_good
    assert verdict.deciles[0] == 1.05
    assert verdict.deciles[10] == 1.5
    text = "\n".join(verdict.lines())
    assert "below 0.90 of the bound in 38%; median ratio there 1.400" in text
    assert "style-0 7x, style-1 1x" in text


def test_one_lost_contest_is_one_too_many():
    won = [score(1.0, 2.0)] * 99
    lost = score(2.0, 1.99, number=7)
    verdict = Verdict(scores=(*won, lost))
    assert not verdict.is_good
    assert verdict.lost == [lost]
    assert f"lost: 0.9950 number 7, to style-0: {lost.contest}" in "".join(
        verdict.lines()
    )


def test_a_plan_that_only_one_side_has():
    assert score(1.0, math.inf).ratio == math.inf
    assert score(1.0, math.inf).is_open
    assert score(math.inf, 1.0).ratio == 0
    assert score(math.inf, math.inf).is_void
    assert score(1.0, math.inf).to_json()["ratio"] is None


@pytest.mark.parametrize(("other_s", "code"), [(2.0, 0), (1.05, 0), (1.15, 1)])
def test_the_command_says_whether_the_goal_is_met(
    other_s: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    ours_s = 1.1 if code else 1.0
    monkeypatch.setattr(
        __main__,
        "match",
        lambda contest: score(ours_s, other_s, number=contest.number),
    )
    file = tmp_path / "scores.json"
    argv = ["--seed", "0", "--clusters", "3", "--most-devices", "4"]
    assert __main__.main([*argv, "--json", str(file)]) == code
    assert [row["number"] for row in json.loads(file.read_text())] == [0, 1, 2]
    out, err = capsys.readouterr()
    assert "ratio to the best of 1 baselines, 3 contests" in out
    assert err.count("ours") == 3
