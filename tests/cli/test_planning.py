"""Planning commands on a plan.json alone: what they write, change and refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hexijax.cli.changes import changed
from hexijax.cli.choosing import search
from hexijax.cli.main import main
from hexijax.cli.prices import per_hour, read_prices
from hexijax.cli.whatif import best_of
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.plan import serial
from hexijax.planner.effort import Effort
from hexijax.report.judged import judge
from hexijax.report.page import page
from hexijax.report.worth import Offer, Worth, classes
from tests.plan.examples import make_cluster
from tests.report.problems import make_judged, make_problem

FIELDS = {
    "step_s",
    "tokens_per_s",
    "mfu",
    "bound_s",
    "fraction_of_bound",
    "search_s",
    "memory_bytes_by_device",
    "replicas",
}


@pytest.fixture(autouse=True)
def _quick_searches(monkeypatch: pytest.MonkeyPatch):
    few = Effort(scored=40, played=2, refined=2, remade=2)
    monkeypatch.setattr(Effort, "of", classmethod(lambda cls, num_devices: few))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    judged = make_judged(make_problem([[("fast", 1)], [("slow", 1)]]))
    problem, path = judged.problem, tmp_path / "plan.json"
    serial.save(path, judged.plan, problem.cluster, problem.chain, problem.training)
    return path


def run(command: str, saved: Path, *flags: str) -> dict[str, object]:
    out, file = str(saved.parent / "out"), saved.parent / "figures.json"
    assert main([command, str(saved), "--out", out, "--json", str(file), *flags]) == 0
    return json.loads(file.read_text())


def test_plan_writes_figures_pictures_and_a_page_that_stands_alone(saved, capsys):
    html = saved.parent / "page.html"
    figures = run("plan", saved, "--html", str(html))
    assert figures.keys() >= FIELDS
    shown = capsys.readouterr().out
    assert shown.startswith(f"{figures['verdict']}\n")
    text = html.read_text()
    assert text.count("data:image/png;base64,") == 4
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text
    names = {path.name for path in (saved.parent / "out" / "toy").iterdir()}
    pictures = {"plan.png", "timeline.png", "memory.png", "held.png"}
    assert names == {"plan.txt", "plan.json", *pictures}
    assert "<h2>Memory over a step</h2>" in text
    again = serial.load(saved.parent / "out" / "toy" / "plan.json")
    assert again.training == serial.load(saved).training
    assert again.chain == serial.load(saved).chain


def test_plan_and_compare_by_price(saved, capsys):
    prices = saved.parent / "prices.toml"
    prices.write_text("[usd_per_hour]\nfast = 40.0\nslow = 1\n")
    flags = ("--objective", "price", "--price", str(prices))
    figures = run("plan", saved, *flags)
    assert figures["objective"] == "price"
    assert figures["unused"] == ["n0/0"]
    assert figures["usd_per_token"] == pytest.approx(
        1.0 / 3600 / figures["tokens_per_s"]
    )
    assert figures["joules_per_token"] is None
    shown = capsys.readouterr().out
    assert shown.startswith("leave the FAST out: it costs ")
    assert " a million tokens, " in shown
    saved_plan = serial.load(saved.parent / "out" / "toy" / "plan.json").plan
    assert saved_plan.objective == "price"
    figures = run("compare", saved, *flags)
    for row in figures["rows"]:
        assert row["ratio"] == pytest.approx(
            row["usd_per_token"] / figures["rows"][0]["usd_per_token"]
        )
        assert row["ratio"] > 1 - 1e-9
    assert (
        "hexijax gives the tokens a dollar of the best other, " in figures["headline"]
    )


def test_an_objective_without_figures_is_refused(saved, capsys):
    out = ["--out", str(saved.parent)]
    assert main(["plan", str(saved), "--objective", "price", *out]) == 2
    assert "costs: fast, slow. Give --price FILE" in capsys.readouterr().err
    assert main(["compare", str(saved), "--objective", "energy", *out]) == 2
    assert "`tdp_w = 300`, in watts, in its table [kinds.fast]" in (
        capsys.readouterr().err
    )


def test_seconds_says_what_it_gives_up(saved, capsys):
    run("plan", saved, "--seconds", "30")
    assert "note: --seconds 30 bounds each search by the clock" in (
        capsys.readouterr().out
    )


def test_compare_has_a_row_a_plan_ours_first(saved, capsys):
    figures = run("compare", saved)
    rows = figures["rows"]
    assert isinstance(rows, list)
    assert rows[0]["name"] == "hexijax"
    assert {"megatron-style", "fsdp-style"} <= {
        *(row["name"] for row in rows),
        *figures["misfits"],
    }
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["ratio"] == pytest.approx(row["step_s"] / rows[0]["step_s"])
    shown = capsys.readouterr().out
    assert shown.startswith(str(figures["headline"]))
    assert (saved.parent / "out" / "toy" / "compare.png").is_file()


def test_explain_and_simulate_a_plan_without_jax(saved):
    """Nothing of JAX is imported on the way."""
    code = (
        "import sys; from hexijax.cli.main import main; "
        f"a = [{str(saved)!r}, '--out', {str(saved.parent)!r}]; "
        "assert main(['explain', *a]) == 0 == main(['simulate', *a]); "
        "assert not {'jax', 'flax', 'optax'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "limited by " in done.stdout
    assert "simulated; parts of it:" in done.stdout
    assert (saved.parent / "toy" / "trace.json").is_file()


def test_ctrl_c_still_works_after_a_search(saved):
    """CP-SAT, left alone, would put the system's own handler in Python's place.

    Where tests run in the background, Python begins without one.
    """
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from hexijax.cli.main import main; "
        f"assert main(['compare', {str(saved)!r}, '--out', {str(saved.parent)!r}]) == 0"
        "\ntry: signal.raise_signal(signal.SIGINT)"
        "\nexcept KeyboardInterrupt: print('caught')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("caught\n"), done.stderr


def test_whatif_tells_money_time_and_worth(saved, capsys):
    prices = saved.parent / "prices.toml"
    prices.write_text("[usd_per_hour]\nfast = 3.0\nslow = 1\n")
    flags = ("--add", "slow:1", "--price", str(prices), "--tokens", "1e9")
    figures = run("whatif", saved, *flags)
    now, then = figures["rows"]
    assert (now["usd_per_hour"], then["usd_per_hour"]) == (4.0, 5.0)
    for row in (now, then):
        assert row["days"] == pytest.approx(1e9 / row["tokens_per_s"] / 86400)
        assert row["tokens_per_usd"] == pytest.approx(
            row["tokens_per_s"] * 3600 / row["usd_per_hour"]
        )
    assert then["tokens_per_s"] >= now["tokens_per_s"]
    assert all(0 <= card["share"] <= 1 for card in figures["worth"])
    assert "1 x slow stand in a node added1, linked as n1" in capsys.readouterr().out


def test_whatif_by_price_pays_for_what_is_used(saved, capsys):
    prices = saved.parent / "prices.toml"
    prices.write_text("[usd_per_hour]\nfast = 40.0\nslow = 1\n")
    figures = run("whatif", saved, "--objective", "price", "--price", str(prices))
    (now,) = figures["rows"]
    assert now["usd_per_hour"] == 1.0
    shares = {card["kind"]: card["share"] for card in figures["worth"]}
    assert shares["fast"] == 0
    assert shares["slow"] > 0.5
    assert "tokens/USD" in capsys.readouterr().out


def test_drop_is_planning_without(saved):
    figures = run("whatif", saved, "--drop", "n1")
    problem = make_problem([[("fast", 1)], [("slow", 1)]])
    alone = search(problem.on(problem.cluster.without("n1")), "alone").best
    assert figures["rows"][1]["step_s"] == alone.step_s
    assert figures["rows"][1]["replicas"] == alone.figures()["replicas"]


def test_an_added_card_never_costs():
    problem = make_problem()
    slow = search(problem, "slow", on=problem.cluster.without("n0")).best
    fast = search(problem, "fast", on=problem.cluster.without("n1")).best
    offer = Offer(name="then", judged=slow, usd_per_hour=None)
    less = judge("less", fast.plan, problem.on(problem.cluster.without("n1")))
    assert best_of(offer, [less]).judged.step_s == fast.step_s
    smaller = Offer(name="then", judged=less, usd_per_hour=None)
    assert best_of(smaller, [slow]).judged is less  # it has not those devices
    assert Worth.of((), 10.0, 10.0).share == 0


def test_cards_are_told_apart_by_node_where_nodes_are_few():
    few, many = make_cluster([[("fast", 2)]] * 2), make_cluster([[("fast", 2)]] * 9)
    assert [len(cards) for cards in classes(few)] == [2, 2]
    assert [len(cards) for cards in classes(many)] == [18]


def test_links_change_for_the_pair_alone():
    cluster = make_cluster([[("fast", 1)]] * 3)
    after, _ = changed(cluster, link=["n0-n2=100Gbit/s"])
    assert after.link("n0/0", "n2/0").bytes_per_s == 12.5e9
    assert after.link("n0/0", "n2/0").latency_s == 50e-6
    assert after.link("n0/0", "n1/0") == cluster.link("n0/0", "n1/0")
    assert changed(after, link=["n2-n0=1"])[0].link("n0/0", "n2/0").bytes_per_s == 1e9


def test_cards_go_where_they_are_sent():
    cluster = make_cluster([[("fast", 1)]])
    after, notes = changed(cluster, add=["fast:2"])
    assert [d.name for d in after.devices] == ["n0/0", "n0/1", "n0/2"]
    assert notes == ["2 x fast go into n0, the only node"]
    two = make_cluster([[("fast", 1)], [("slow", 1)]])
    after, notes = changed(two, add=["slow:2@n0", "H100 80GB HBM3:1"])
    assert [d.name for d in after.devices if d.node == "n0"][1:] == ["n0/1", "n0/2"]
    assert after.device("added1/0").kind == "h100-80g-sxm"
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"add": ["fats:1"]}, "--add fats:1: kind 'fats' is neither .* mean 'fast'"),
        ({"add": ["fast"]}, "--add fast: give a kind and a number"),
        ({"add": ["fast:0"]}, "--add fast:0: give a kind and a number"),
        ({"add": ["fast:1@n7"]}, "has no node 'n7'"),
        ({"drop": ["n00"]}, "has no node or device 'n00'. Did you mean 'n0"),
        ({"drop": ["n0", "n1"]}, "nothing is left without n0, n1"),
        ({"link": ["n0-n11=1"]}, "'n0-n11' is no pair of two nodes. Did you mean 'n1'"),
        ({"link": ["n0-n1=x"]}, "--link n0-n1=x: the rate is 'x'; it must be GB/s"),
        ({"link": ["n0-n1=0"]}, "the rate is '0'"),
    ],
)
def test_changes_that_are_none(change: dict[str, list[str]], says: str):
    with pytest.raises(UserError, match=says):
        changed(make_cluster([[("fast", 1)], [("slow", 1)]]), **change)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[usd_per_hour]\nfats = 1", "usd_per_hour.fats: .* Did you mean 'fast'"),
        (
            "[usd_per_hr]\nfast = 1",
            "one table .*usd_per_hr. Did you mean 'usd_per_hour",
        ),
        ("[usd_per_hour]\nfast = -1", "must be dollars an hour, 0 or more"),
        ("[usd_per_hour]\nfast = 'x'", "is 'x'; it must be dollars an hour"),
        ("fast", "prices.toml is not TOML"),
    ],
)
def test_price_files_that_are_none(tmp_path: Path, text: str, says: str):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        read_prices(file, make_cluster())


def test_a_cluster_has_a_price_if_all_its_kinds_have():
    cluster: Cluster = make_cluster([[("fast", 3)], [("slow", 1)]])
    assert per_hour(cluster.devices, {"fast": 2.0, "slow": 0.5}) == (6.5, [])
    assert per_hour(cluster.devices, {"fast": 2.0}) == (None, ["slow"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plna", "x"], "There is no command 'plna'. Did you mean 'plan'? Commands "),
        (["plan", "x.json", "--jsno", "y"], "no flag --jsno. Did you mean '--json'?"),
        (["explain", "x.txt"], "a plan's text, which says nothing of the model"),
        (["plan", "x.json", "--set", "a=1"], "--set was given with x.json."),
        (["simulate", "x.json"], "Cannot read the plan x.json: No such file"),
    ],
)
def test_slips_are_answered(words: list[str], says: str, capsys):
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_pages_escape_what_they_show():
    text = page(
        title="a<b",
        verdict="x & y",
        lines=["<i>"],
        pictures={},
        tables={"t": [("h",), ("<td>",)]},
        text="1 < 2",
        made_by="us",
    )
    assert "<title>a&lt;b</title>" in text
    assert "X &amp; y.</h1>" in text
    assert "<p>&lt;i&gt;.</p>" in text
    assert "<td>&lt;td&gt;</td>" in text
    assert "<pre>1 &lt; 2</pre>" in text
