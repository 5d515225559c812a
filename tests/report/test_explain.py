"""What people read of a plan is what its simulation says."""

import dataclasses

import pytest

from hexijax.cli.choosing import search
from hexijax.cluster import Cluster
from hexijax.report.drawing import alike, picture
from hexijax.report.explain import explain, others, stages
from hexijax.report.judged import Judged, judge
from hexijax.report.limits import What, faster_kind, faster_links, limits
from hexijax.report.rows import label
from hexijax.report.verdict import Choices
from hexijax.report.words import columns, gib, seconds, short_kinds
from tests.report.problems import make_judged, make_problem


def test_the_figures_follow_from_the_step():
    judged = make_judged()
    figures = judged.figures()
    assert figures["tokens_per_s"] == pytest.approx(32 * 16 / figures["step_s"])
    assert figures["fraction_of_bound"] == figures["bound_s"] / figures["step_s"]
    flops = sum(x.forward_flops + x.backward_flops for x in judged.problem.chain.layers)
    peak = 2 * 10e12 + 2 * 2.5e12
    assert figures["mfu"] == pytest.approx(flops * 32 / figures["step_s"] / peak)
    assert figures["memory_bytes_by_device"].keys() == set(judged.used)
    assert figures["fraction_of_bound"] <= 1


def test_replicas_hold_all_that_an_outside_simulator_needs():
    for replica in make_judged().figures()["replicas"]:
        assert {"microbatches", "microbatch_size", "samples"} < replica.keys()
        for stage in replica["stages"]:
            assert stage["data_degree"] * stage["tensor_degree"] == len(
                stage["devices"]
            )
            first, stop = stage["layer_range"]
            assert stop - first == stage["layers"] == len(stage["remat"])


@pytest.mark.parametrize("gb_per_s", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("nodes", [[[("fast", 2)], [("slow", 2)]], [[("fast", 3)]] * 2])
def test_speeding_up_the_named_bottleneck_shortens_the_step(nodes, gb_per_s: float):
    problem = make_problem(nodes, gb_per_s=gb_per_s)
    judged = search(problem, "all", everyone=True).best
    first = limits(judged)[0]
    faster = faster_cluster(problem.cluster, first.what, first.name)
    again = judge("again", judged.plan, problem.on(faster))
    assert again.step_s < judged.step_s
    assert first.saves == pytest.approx(1 - again.step_s / judged.step_s)


def faster_cluster(cluster: Cluster, what: What, name: str) -> Cluster:
    if what is What.DEVICE:
        return faster_kind(cluster, name)
    assert what is What.LINK
    return faster_links(cluster, between=name == "between nodes")


def test_a_slow_link_is_named_and_a_fast_one_is_not():
    named = [
        limits(search(make_problem(gb_per_s=rate), "all", everyone=True).best)[0].what
        for rate in (1e-5, 100.0)
    ]
    assert named == [What.LINK, What.DEVICE]


def test_an_explanation_has_every_stage_and_the_limit():
    judged = make_judged()
    text = explain(Choices(ours=judged), limits(judged))
    for place, stage in judged.plan.stages():
        del stage
        assert place.removesuffix(" x2") in text
    assert "limited by device fast: 10% faster, it saves " in text
    assert f"step {seconds(judged.step_s)}, " in text
    assert "/ " not in stages(judged)[1][1]


def test_runners_up_stand_in_order_behind_ours():
    problem = make_problem()
    ours = make_judged(problem)
    alone = [
        search(problem, kind, on=problem.cluster.without(node)).best
        for kind, node in (("slow alone", "n0"), ("fast alone", "n1"))
    ]
    rows = others(Choices(ours=ours, alone=tuple(alone)))
    assert [row[0] for row in rows[1:]] == ["hexijax", "fast alone", "slow alone"]
    ratio = alone[1].step_s / ours.step_s
    assert rows[2][-1] == f"{ratio:.2f}x"


def test_alike_replicas_are_drawn_once():
    judged = make_judged(make_problem([[("fast", 1)]] * 4))
    assert len(judged.plan.replicas) == 4
    (run,) = alike(judged.plan, judged.problem.cluster)
    assert run.title == "replicas 0-3, alike"
    drawn = picture(judged.plan, judged.problem.chain, judged.problem.cluster)
    assert len(drawn.splitlines()) == 3
    assert stages(judged)[1][0] == "r0.s0 x4"


def test_a_long_pipeline_is_drawn_downwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hexijax.report.drawing.WIDEST", 90)
    judged = make_judged()
    deep = deep_plan(judged)
    drawn = picture(deep.plan, judged.problem.chain, judged.problem.cluster)
    lines = drawn.splitlines()
    assert len(lines) == 1 + 4
    assert max(map(len, lines)) <= 90
    assert "embed..blocks/1 (3)" in lines[1]


def deep_plan(judged: Judged) -> Judged:
    """Four stages of a device each."""
    (replica, *_) = judged.plan.replicas
    stage = replica.stages[0]
    names = [device.name for device in judged.problem.cluster.devices]
    parts = tuple(
        dataclasses.replace(
            stage,
            devices=(name,),
            layers=(3 * i, 3 * i + 3),
            lanes=1,
            tensor=1,
            segments=(3,),
            remat=stage.remat[:3],
        )
        for i, name in enumerate(names)
    )
    whole = dataclasses.replace(
        replica, stages=parts, microbatches=32, microbatch_size=1, samples=32
    )
    plan = dataclasses.replace(judged.plan, replicas=(whole,))
    return judge("deep", plan, judged.problem)


def test_names_and_figures_are_short():
    assert [seconds(x) for x in (46.61, 1234.0, 3.4e-3, 0.0, 2e-7)] == [
        "46.6 s",
        "1,234 s",
        "3.40 ms",
        "0 us",
        "0.200 us",
    ]
    assert (gib(71.128 * 2**30), gib(3.14 * 2**20)) == ("71.13 GiB", "3.14 MiB")
    assert [*columns([("a", "1"), ("bb", "22")], right=[1])] == ["a    1", "bb  22"]
    names = [f"n{i}/{j}" for i in range(9) for j in range(4)]
    assert label(names[:2]) == "n0/0-1"
    assert label(names[2:6]) == "n0/2-3, n1/0-1"
    assert label(names) == "n0/0-3 and 32 more"


def test_kinds_have_the_names_people_use():
    text = """
        format = 1
        name = "mix"
        [links]
        in_node = { latency_us = 1, bandwidth_gb_per_s = 1 }
        [[nodes]]
        name = "box"
        host_memory_gib = 1
        host_cores = 1
        devices = [
          { kind = "h100-80g-sxm", count = 1 },
          { kind = "rtx3090-24g", count = 1 },
          { kind = "a100-40g-sxm", count = 1 },
          { kind = "a100-80g-sxm", count = 1 },
        ]
    """
    assert short_kinds(Cluster.from_toml(text)) == {
        "h100-80g-sxm": "H100",
        "rtx3090-24g": "3090",
        "a100-40g-sxm": "a100-40g-sxm",
        "a100-80g-sxm": "a100-80g-sxm",
    }


def test_uneven_state_is_told_by_device():
    judged = make_judged()
    plan = judged.plan
    share = dataclasses.replace(plan.state[0], shares={"n1/0": 3.0, "n0/0": 1.0})
    uneven = judge("uneven", dataclasses.replace(plan, state=(share,)), judged.problem)
    text = explain(Choices(ours=uneven), limits(uneven))
    amounts = {name: gib(uneven.memory[name].state_bytes) for name in ("n1/0", "n0/0")}
    assert f"state is where there is room: {amounts['n1/0']} on n1/0" in text
    assert f"{amounts['n0/0']} on n0/0" in text
    assert "state is where" not in explain(Choices(ours=judged), limits(judged))


def test_a_device_that_only_stores_is_said_to_and_nothing_is_claimed_unasked():
    problem = make_problem([[("fast", 2)], [("slow", 1)]])
    judged = make_judged(problem)
    replica = dataclasses.replace(
        judged.plan.replicas[0],
        stages=(
            dataclasses.replace(
                judged.plan.replicas[0].stages[0],
                devices=("n0/0",),
                layers=(0, len(problem.chain.layers)),
                lanes=1,
                tensor=1,
                segments=(),
                remat=(),
            ),
        ),
        samples=judged.plan.batch_size,
        microbatch_size=judged.plan.batch_size,
        microbatches=1,
    )
    share = dataclasses.replace(judged.plan.state[0], shares={"n1/0": 1.0})
    plan = dataclasses.replace(judged.plan, replicas=(replica,), state=(share,))
    text = explain(Choices(ours=(one := judge("one", plan, problem))), limits(one))
    assert "to compute; some hold state" in text
    assert "`hexijax plan` compares with a plan that uses them" in text
    assert "because no plan" not in text
