"""What a step takes at least, beside what the simulator says."""

import dataclasses
import itertools

import pytest

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node
from hexijax.layers.known import gpt
from hexijax.plan.plan import Plan, Schedule
from hexijax.planner.judge import Judge
from hexijax.planner.mesh import MeshMaker
from hexijax.planner.options import PlanOptions
from hexijax.planner.refine import variants
from hexijax.planner.score import Scorer

CHAIN = gpt(depth=6, width=1024, num_heads=16, length=1024)
CLUSTER = Cluster(
    name="floor",
    nodes=tuple(
        Node(
            name=name,
            devices=(DeviceGroup(kind=kind, count=3),),
            host_memory_bytes=2**38,
            host_cores=64,
            link=LinkProfile(latency_s=5e-6, bytes_per_s=2e11),
        )
        for name, kind in (("a", "a100-40g-sxm"), ("v", "v100-16g-sxm"))
    ),
    links=Links(between_nodes=LinkProfile(latency_s=5e-5, bytes_per_s=2e9)),
)
OPTIONS = PlanOptions()
LAYOUTS = (
    (("a/0", "a/1", "v/0"), ("v/1", "a/2")),
    (("a/0", "v/0"), ("a/1", "v/1")),
    (("a/0",), ("v/0",)),
)
"""Devices of the stages of each replica."""


def plan_of(replicas: tuple[tuple[str, ...], ...]) -> Plan:
    maker = MeshMaker(CLUSTER, "bfloat16")
    scorer = Scorer(CHAIN, CLUSTER, 24, OPTIONS)
    scored = scorer.score(
        tuple(tuple(maker.mesh((name,), 1) for name in names) for names in replicas)
    )
    assert scored
    return scorer.plan(scored)


@pytest.mark.parametrize("schedule", [*Schedule])
@pytest.mark.parametrize("replicas", LAYOUTS)
def test_no_step_is_shorter_than_what_it_takes_at_least(
    replicas: tuple[tuple[str, ...], ...], schedule: Schedule
):
    judge = Judge(CHAIN, CLUSTER, OPTIONS)
    plan = dataclasses.replace(plan_of(replicas), schedule=schedule)
    near = itertools.islice(variants(plan, OPTIONS), 0, None, 5)
    for made in (plan, *(x for x in near if judge.fits(x))):
        assert 0 < judge.floor(made) <= judge.step_s(made)


def test_a_search_that_forgets_its_tables_scores_alike(
    monkeypatch: pytest.MonkeyPatch,
):
    plans = [plan_of(replicas) for replicas in LAYOUTS]
    monkeypatch.setattr("hexijax.planner.tables.MOST_TABLE_BYTES", 0)
    assert [plan_of(replicas) for replicas in LAYOUTS] == plans
