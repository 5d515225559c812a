"""Plans of the baselines: valid, within memory, no worse than the plain even ones."""

import random

import pytest

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.checks import check
from hexijax.plan.plan import Plan
from hexijax.planner import PlanOptions
from hexijax.planner.baselines import all_baselines
from hexijax.planner.judge import Judge
from tests.cluster.random_clusters import random_cluster
from tests.plan.examples import make_chain, make_cluster, make_kind

CHAIN = make_chain(10, width=256, rows=512)
TWO_KINDS = (make_kind("fast", tflops=10), make_kind("slow", tflops=2.5))
OPTIONS = PlanOptions()
NAMES = list(all_baselines())


def make(
    name: str, chain: Chain, cluster: Cluster, batch_size: int = 32
) -> Plan | None:
    """A baseline's plan, after what holds of every such plan was checked."""
    plan = all_baselines()[name](
        chain, cluster, batch_size=batch_size, dtype="float32", options=OPTIONS
    )
    if plan is None:
        return None
    check(plan, chain, cluster)
    assert plan.prediction
    judge = Judge(chain, cluster, OPTIONS)
    memory_bytes = judge.memory_bytes(plan)
    assert judge.fits(memory_bytes)
    assert plan.prediction.memory_bytes == memory_bytes
    assert plan.prediction.step_s == judge.step_s(plan)
    return plan


def step_s(plan: Plan | None) -> float:
    """Predicted seconds of a plan that was found."""
    assert plan
    assert plan.prediction
    return plan.prediction.step_s


SEEDS = [
    *((0, 4)),
    *(
        pytest.param(seed, marks=pytest.mark.laws)
        for seed in (*range(1, 4), *range(5, 30))
    ),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_random_clusters_are_valid_and_fit(name: str, seed: int):
    make(name, CHAIN, random_cluster(random.Random(seed)))


@pytest.mark.parametrize("name", NAMES)
def test_a_card_behind_a_slow_link_is_left_out(name: str):
    nodes = [[("fast", 4)], [("slow", 1)]]
    plan = make(name, CHAIN, make_cluster(nodes, TWO_KINDS, gb_per_s=1e-4))
    assert plan
    assert {d.split("/")[0] for _, s in plan.stages() for d in s.devices} == {"n0"}


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_nowhere_gives_no_plan(name: str):
    kinds = [make_kind("fast", memory_bytes=2**26)]
    chain = make_chain(10, width=2048, rows=2048)
    assert make(name, chain, make_cluster([[("fast", 2)]], kinds)) is None
