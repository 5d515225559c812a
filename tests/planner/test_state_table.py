"""The table of what fits is made of as few plans as it needs."""

from typing import Any

import pytest

from experiments import state_table
from experiments.state_table import EVEN, FSDP, OURS, STEP, Plans
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain

CEPHALO = Cluster.from_toml("experiments/clusters/cephalo.toml")


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
