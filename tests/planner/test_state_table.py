"""The table of what fits is made of as few plans as it needs, and ours are the best."""

import dataclasses
import math
from typing import Any

import pytest

from experiments import state_table
from experiments.state_table import EVEN, FSDP, OURS, STEP, Plans
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain

CEPHALO = Cluster.from_toml("experiments/clusters/cephalo.toml")
A100_V100 = Cluster.from_toml("experiments/clusters/a100_v100.toml")


@pytest.mark.parametrize("most", [4, 16, 64, 128])
@pytest.mark.parametrize("fits", [0, 4, 12, 28, 64, 128])
def test_the_deepest_is_found_by_halving(
    fits: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    tried: list[int] = []

    def plan(_: Plans, system: str, layers: int, size: int) -> Any:
        tried.append(layers)
        return layers <= fits

    monkeypatch.setattr(Plans, "plan", plan)
    assert Plans(CEPHALO).deepest(OURS, most) == min(fits, most)
    assert len(tried) == len(set(tried)) <= 8
    assert all(0 < layers <= most and layers % STEP == 0 for layers in tried)


def test_the_whole_model_on_every_card_ends_first():
    fsdp = Plans(CEPHALO)
    assert fsdp.plan(FSDP, 28, 64)
    assert fsdp.plan(FSDP, 32, 64) is None


@pytest.mark.laws
def test_uneven_state_fits_what_even_state_does_not():
    plans = Plans(CEPHALO)
    assert plans.plan(OURS, 64, 64)
    assert plans.plan(EVEN, 64, 64) is None


def test_a_family_is_told_apart_by_its_depth():
    small: Chain = state_table.model(4)
    assert state_table.model(8).num_params > small.num_params


def smaller(cluster: Cluster, layers: int, least: int) -> Cluster:
    """With as much less memory as a model of ``least`` layers has fewer parameters."""
    part = state_table.model(least).num_params / state_table.model(layers).num_params
    profiles = (
        dataclasses.replace(p, usable_memory_bytes=int(p.usable_memory_bytes * part))
        for p in cluster.profiles
    )
    return dataclasses.replace(cluster, profiles=tuple(profiles))


@pytest.mark.parametrize(
    ("cluster", "layers", "least", "batch_size"),
    [
        pytest.param(CEPHALO, 28, 6, 16, id="cephalo 28", marks=pytest.mark.laws),
        pytest.param(CEPHALO, 32, 6, 16, id="cephalo 32", marks=pytest.mark.laws),
        pytest.param(A100_V100, 64, 12, 64, id="a100_v100 64", marks=pytest.mark.laws),
        pytest.param(A100_V100, 96, 6, 16, id="a100_v100 96", marks=pytest.mark.laws),
    ],
)
def test_no_plan_of_another_system_is_faster_than_ours(
    cluster: Cluster, layers: int, least: int, batch_size: int
):
    """What may put state where there is room may also leave it even."""
    plans = Plans(smaller(cluster, layers, least))
    steps_s = {}
    for system in state_table.SYSTEMS:
        plan = plans.plan(system, least, batch_size)
        steps_s[system] = math.inf
        if plan:
            assert plan.prediction
            steps_s[system] = plan.prediction.step_s
    assert steps_s[OURS] == min(steps_s.values()) < math.inf
