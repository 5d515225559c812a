"""The first line of `hexijax plan`: is mixing worth it?"""

import dataclasses
import functools

import pytest

from hexijax.cli.choosing import Searched, choose, parts, search
from hexijax.cli.screen import Searching
from hexijax.planner import Objective
from hexijax.report.comparison import Comparison
from hexijax.report.explain import headline
from hexijax.report.judged import Judged
from hexijax.report.problem import Problem
from hexijax.report.verdict import Choices, verdict
from tests.report.problems import make_problem


@functools.cache
def usual() -> Choices:
    return chosen(make_problem())


def chosen(problem: Problem) -> Choices:
    return choose(problem, None, Searching())


def with_step(judged: Judged, step_s: float) -> Judged:
    timeline = dataclasses.replace(judged.timeline, step_s=step_s)
    return dataclasses.replace(judged, timeline=timeline)


def test_it_says_what_mixing_gives():
    choices = usual()
    best = min(choices.alone, key=lambda judged: judged.step_s)
    (name,) = (judged.name for judged in choices.alone)
    assert name == "fast alone", "the slow ones could not beat it, and are not searched"
    gain = best.step_s / choices.ours.step_s
    assert gain > 1.1
    assert verdict(choices) == f"mixing gives {gain:.2f}x over your 2 FASTs alone"


def test_it_says_what_to_leave_out_and_what_it_costs():
    choices = chosen(make_problem(gb_per_s=0.0001))
    assert choices.ours.unused == ("n1/0", "n1/1")
    assert choices.everyone is not None
    cost = choices.everyone.step_s / choices.ours.step_s - 1
    assert verdict(choices) == f"leave the SLOWs out: they cost {cost:.0%}"
    assert choices.runners_up()[0].step_s >= choices.ours.step_s


@pytest.mark.parametrize(
    ("step_s", "says"),
    [
        (1.3, "hexijax is 1.30x faster than the best other, fsdp-style"),
        (1.0049, "hexijax is as fast as the best other, fsdp-style (within 0.5%)"),
        (0.9951, "hexijax is as fast as the best other, fsdp-style (within 0.5%)"),
        (0.8, "fsdp-style is 1.25x faster than hexijax"),
    ],
)
def test_what_no_digit_shows_is_equal(step_s: float, says: str):
    ours = with_step(usual().ours, 1.0)
    other = dataclasses.replace(with_step(ours, step_s), name="fsdp-style")
    slow = dataclasses.replace(with_step(ours, 9.0), name="whale-style")
    assert Comparison(rows=(ours, slow, other)).headline() == says


def priced(usd_per_hour: dict[str, float], **changes: object) -> Choices:
    problem = make_problem([[("fast", 1)], [("slow", 1)]])
    return chosen(
        dataclasses.replace(
            problem,
            objective=Objective.PRICE,
            usd_per_hour=usd_per_hour,
            **changes,  # pyrefly: ignore
        )
    )


def test_by_price_it_says_what_a_card_costs():
    choices = priced({"fast": 40.0, "slow": 1.0})
    ours, everyone = choices.ours, choices.everyone
    assert ours.unused == ("n0/0",)
    assert everyone is not None
    dearer = everyone.usd_per_token / ours.usd_per_token - 1
    assert dearer > 1
    assert verdict(choices) == (
        f"leave the FAST out: it costs {dearer:.0%} more a token"
    )
    assert ours.usd_per_token == pytest.approx(
        ours.step_s * 1.0 / 3600 / (32 * 16), rel=1e-9
    )
    assert f"${ours.usd_per_token * 1e6:.3g} a million tokens, " in headline(ours)
    assert [j.cost for j in choices.runners_up()] == sorted(
        j.cost for j in choices.runners_up()
    )
    assert 0 < ours.fraction_of_bound <= 1


def test_by_price_what_is_free_is_mixed_in():
    choices = priced({"fast": 0.0, "slow": 0.0})
    best = choices.best_alone
    assert best is not None
    assert not choices.ours.unused
    gain = best.step_s / choices.ours.step_s
    assert verdict(choices) == (
        f"mixing gives {gain:.2f}x the tokens a dollar of your FAST alone"
    )
    assert choices.ours.fraction_of_bound == 1


def test_one_device_of_each_kind_reads_as_one():
    choices = chosen(make_problem([[("fast", 1)], [("slow", 1)]]))
    assert "x over your FAST alone" in verdict(choices)
    choices = chosen(make_problem([[("fast", 1)], [("slow", 1)]], gb_per_s=1e-4))
    assert verdict(choices).startswith("leave the SLOW out: it costs ")


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([[("fast", 1)]], "one device: nothing to mix; the plan reaches "),
        ([[("fast", 4)]], "4 equal FASTs: nothing to mix; the plan reaches "),
        ([[("fast", 2)], [("fast", 2)]], "2 nodes give "),
    ],
)
def test_equal_devices_are_not_called_a_mix(nodes, says: str):
    assert verdict(chosen(make_problem(nodes))).startswith(says)


def test_a_plan_given_is_held_against_the_one_found():
    problem = make_problem()
    found = usual()
    slow = search(problem, "slow alone", on=problem.cluster.without("n0")).best
    choices = choose(problem, slow.plan, Searching())
    assert choices.found is not None
    assert choices.ours.plan.replicas == slow.plan.replicas
    ratio = slow.step_s / choices.found.step_s
    assert verdict(choices) == (
        f"{verdict(found)}; the plan given takes {ratio:.2f}x the step of the plan a "
        "search finds"
    )


def test_what_fits_nowhere_alone_is_no_rival():
    choices = dataclasses.replace(usual(), alone=())
    assert verdict(choices) == (
        "mixing makes it fit: no kind and no node holds the model alone"
    )


def test_a_faster_rival_becomes_ours(monkeypatch: pytest.MonkeyPatch):
    fast = usual()
    searched = {judged.name: judged for judged in (*fast.alone, fast.ours)}
    searched["hexijax"] = with_step(fast.ours, 1e9)
    monkeypatch.setattr(
        "hexijax.cli.choosing.search",
        lambda problem, name, **_: Searched(
            best=searched[name], next_best=(), interrupted=False
        ),
    )
    choices = chosen(make_problem())
    assert choices.ours.name == "hexijax"
    assert choices.ours.plan == searched["fast alone"].plan


@pytest.mark.parametrize(("slower", "looks"), [(1.2, 2), (1.3, 1)])
def test_a_part_that_comes_near_with_its_host_is_searched_in_full(
    monkeypatch: pytest.MonkeyPatch, slower: float, looks: int
):
    ours = usual().ours
    asked: list[str] = []

    def search(problem: Problem, name: str, **_: object) -> Searched:
        asked.append(name)
        best = ours if name == "hexijax" else with_step(ours, ours.step_s * slower)
        return Searched(best=best, next_best=(), interrupted=False)

    monkeypatch.setattr("hexijax.cli.choosing.search", search)
    monkeypatch.setattr("hexijax.cli.choosing.rests_on_host", lambda plan: True)
    chosen(make_problem())
    assert asked.count("fast alone") == looks


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys):
    ours = usual().ours
    asked: list[str] = []

    def search(problem: Problem, name: str, **_: object) -> Searched:
        asked.append(name)
        return Searched(best=ours, next_best=(), interrupted=True)

    monkeypatch.setattr("hexijax.cli.choosing.search", search)
    choices = chosen(make_problem())
    assert asked == ["hexijax"]
    assert choices.cut_short
    assert choices.ours == ours
    assert "what was found so far counts" in capsys.readouterr().err
    assert verdict(choices).startswith("interrupted before mixing was compared; ")


def test_equal_nodes_are_searched_once():
    problem = make_problem([[("fast", 2)]] * 3 + [[("slow", 2)]])
    assert [name for name, _ in parts(problem.cluster)] == [
        "fast alone",
        "slow alone",
        "n0 alone",
    ]
