"""Plans that are predicted before they are measured: what is drawn, kept, compared."""

import dataclasses
import itertools

import pytest

from experiments.bench_equal import read
from experiments.equal import table as equal
from experiments.predicted import table
from experiments.predicted.cells import CELLS
from experiments.predicted.drawing import SCHEDULES, Drawing
from experiments.predicted.listing import (
    Listed,
    check_measured,
    digest,
    promised,
    read_list,
)
from experiments.predicted.measuring import devices_of, on_host, turns
from hexijax.errors import UserError
from hexijax.plan.checks import check

CELL = CELLS["small"]
KINDS = {
    "one card": 3,
    "uneven batches": 1,
    "pipeline": 3,
    "tensor": 1,
    "lanes": 1,
    "offloaded": 2,
}


@pytest.fixture(scope="module")
def chain():
    return CELL.chain()


@pytest.fixture(scope="module")
def cluster():
    return CELL.measured_cluster(None)


@pytest.fixture(scope="module")
def listed(chain, cluster):
    drawn = Drawing(CELL, chain, cluster, seed=3).all(KINDS)
    return Listed(
        cell="small",
        clip=True,
        cluster=cluster,
        what={"date": "2026-11-30", "command": "test"},
        promises={name: promised(judged) for name, judged in drawn},
    )


def test_drawn_plans_are_whole_and_of_their_kind(listed, chain, cluster):
    for name, promise in listed.promises.items():
        check(promise.plan, chain, cluster)
        assert promise.step_s > 0
        assert set(promise.memory_bytes) >= set(devices_of(promise.plan)), name
    plans = {name: promise.plan for name, promise in listed.promises.items()}
    first, second = plans["uneven batches 1"].replicas
    assert first.samples != second.samples
    for number, schedule in enumerate(SCHEDULES, 1):
        pipeline = plans[f"pipeline {number}"]
        assert pipeline.schedule is schedule
        layers = [stage.num_layers for stage in pipeline.replicas[0].stages]
        assert len(set(layers)) > 1
    assert plans["tensor 1"].replicas[0].stages[0].tensor == 2
    assert on_host(plans["offloaded 1"])
    assert all(a != b for a, b in itertools.combinations(plans.values(), 2))


def test_a_seed_draws_the_same_list_again(listed, chain, cluster):
    again = Drawing(CELL, chain, cluster, seed=3).all(KINDS)
    assert {name: promised(judged) for name, judged in again} == listed.promises
    other = Drawing(CELL, chain, cluster, seed=4).all({"one card": 3})
    mine = [listed.promises[f"one card {i}"] for i in (1, 2, 3)]
    assert [promised(judged) for _, judged in other] != mine


def test_a_list_is_read_as_it_was_written(listed, tmp_path):
    path = tmp_path / "list.json"
    listed.write(path)
    assert read_list(path) == listed
    before = digest(path)
    dataclasses.replace(listed, clip=False).write(path)
    assert digest(path) != before


def test_a_list_of_another_format_is_refused(tmp_path):
    path = tmp_path / "list.json"
    path.write_text('{"format": 0}')
    with pytest.raises(UserError, match="has format 0, and 1 is read here"):
        read_list(path)


def test_plans_that_were_not_profiled_are_refused(listed, chain, cluster):
    plan = listed.promises["tensor 1"].plan
    with pytest.raises(UserError, match="8 of 8 layers have no measured time on cpu"):
        check_measured(plan, chain, cluster)


def test_plans_of_one_card_run_in_pairs_but_for_two_that_use_the_host(listed):
    found = turns(listed, cards=2)
    assert sorted(name for turn in found for name in turn) == sorted(listed.promises)
    for turn in found:
        plans = [listed.promises[name].plan for name in turn]
        assert sum(map(on_host, plans)) <= 1
        assert len(turn) == 1 or all(len(devices_of(plan)) == 1 for plan in plans)
    assert any(len(turn) == 2 for turn in found)


def row(predicted_s: float, step_s: float, promised: int, peak: int):
    return {
        "predicted_s": predicted_s,
        "step_s": step_s,
        "promised_bytes": {"a/0": promised},
        "peak_bytes": {"a/0": peak},
    }


def test_errors_count_either_way_and_plans_that_did_not_run_do_not():
    rows = {
        "short": row(0.99, 1.0, 105, 100),
        "long": row(1.05, 1.0, 102, 100),
        "missing": {"predicted_s": 5.0, "promised_bytes": {"a/0": 1}},
    }
    mean, largest, least, most = table.figures({"plans": rows})
    assert mean.name == "2 plans predicted before: mean error of a step"
    assert mean.measured == pytest.approx(0.03)
    assert largest.measured == pytest.approx(0.05)
    assert (least.measured, most.measured) == (1.02, 1.05)
    assert [f.at_most for f in (mean, largest, least, most)] == [
        True,
        True,
        False,
        True,
    ]


def test_the_section_names_what_was_not_measured():
    rows = {"ran": row(1.0, 1.0, 100, 100) | {"least_s": 0.9, "most_s": 1.1}}
    rows["left"] = {"predicted_s": 5.0, "promised_bytes": {}}
    found = {"plans": rows, "list": {"file": "list.json"}}
    page = "\n".join(table.section(found))
    assert "| ran | 1.000 s | 1.000 s | 0.900 s | 1.100 s | 1.000 | 1.000 |" in page
    assert page.endswith("On the list and not measured: left.")


def test_ours_is_held_against_the_best_and_the_best_full_checkpointing():
    lines = [
        f"{what} remat={remat} microbatch=8 tokens_per_s={rate} step_s=1 torch=2.11"
        for what, remat, rate in (
            ("try", "none", 500),
            ("whole", "full", 80),
            ("whole", "none", 100),
        )
    ]
    found = {
        "ours": {"tokens_per_s": 120.0},
        "plain": {"tokens_per_s": 60.0},
        "fsdp": [read(line) for line in lines],
    }
    full, best, plain = equal.figures(found)
    assert (full.measured, best.measured, plain.measured) == (1.5, 1.2, 2.0)
