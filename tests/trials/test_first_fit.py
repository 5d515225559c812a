"""The first plan fits: what the search returns, the compiler refuses neither.

A first fit after a number of plans that ran out of memory is a memory model that
failed. So on cards that are made as small as the model allows, every plan that a search
hands over, runners-up too, is compiled, and the figures of its programs are put where
the promise has its own. XLA's word then counts, and each must still fit.
"""

import dataclasses

import pytest

from experiments.memory_table import Sizes, make_cluster, make_experiment
from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.costs.temp import Temps
from hexijax.layers.chain import Chain
from hexijax.layers.kernels import trace_chain
from hexijax.plan import Plan
from hexijax.plan.plan import Schedule
from hexijax.planner import InfeasiblePlanError, PlanOptions
from hexijax.planner.found import Found
from hexijax.planner.search import search
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine, abstract_params

BATCH = 8
LEAST = 2**30 // 100 + 1
"""Bytes: a cluster file allows no smaller card."""


def with_memory(num_bytes: int, cards: int) -> Cluster:
    cluster = make_cluster(count=cards)
    profile = dataclasses.replace(
        cluster.profiles[0], nominal_memory_bytes=num_bytes, usable_memory_bytes=0
    )
    return dataclasses.replace(cluster, profiles=(profile,))


def tightest(chain: Chain, cards: int, steps: int) -> tuple[Found, Cluster]:
    """What is found on about the smallest cards that hold the model, by halving."""
    low, high = LEAST, 2**26
    best: tuple[Found, Cluster] | None = None
    for _ in range(steps):
        middle = (low + high) // 2
        cluster = with_memory(middle, cards)
        try:
            found = search(
                chain,
                cluster,
                batch_size=BATCH,
                options=PlanOptions(schedule=Schedule.ONE_F_ONE_B, offload=False),
            )
        except InfeasiblePlanError:
            low = middle
            continue
        best, high = (found, cluster), middle
    assert best is not None
    return best


def compiled(name: str, plan: Plan, chain: Chain, cluster: Cluster) -> Temps:
    """What XLA says of the plan's backwards."""
    experiment, _ = make_experiment(name, Sizes(length=64))
    experiment = dataclasses.replace(experiment, batch_size=BATCH)
    engine = Engine(experiment, plan, chain, cluster, assign(cluster, emulate=True))
    return engine.temps()


def check(name: str, cards: int, *, most: int, steps: int = 6) -> int:
    """Compiles the best plans of about the tightest cards; returns how many."""
    experiment, batch = make_experiment(name, Sizes(length=64))
    chain = trace_chain(
        experiment.loss, abstract_params(experiment), batch, dtype="float32", name=name
    )
    found, cluster = tightest(chain, cards, steps)
    plans = (found.plan, *found.runners_up)[:most]
    for plan in plans:
        temps = compiled(name, plan, chain, cluster)
        for device, parts in plan_memory(plan, chain, cluster, temps=temps).items():
            usable = cluster.device(device).usable_memory_bytes
            assert parts.total_bytes <= usable, (device, plan)
    return len(plans)


def test_the_first_plan_on_two_tight_cards_compiles_to_what_fits():
    assert check("llama", cards=2, most=1, steps=3) == 1


@pytest.mark.laws
@pytest.mark.parametrize("cards", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_every_plan_on_tight_cards_compiles_to_what_fits(name: str, cards: int):
    assert check(name, cards, most=4) >= 1
