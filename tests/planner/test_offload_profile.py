"""A stage's layers as the choice sees them: times of the cost model, each byte once."""

import pytest

from hexijax.cluster import Cluster
from hexijax.costs.compute import layer_times
from hexijax.costs.instructions import mesh_shape
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.known import gpt, llama
from hexijax.plan.plan import Stage
from hexijax.planner.offload.choice import Profile, State
from hexijax.planner.offload.profile import stage_profile

CLUSTER = Cluster.from_toml("experiments/clusters/h100_x4.toml")


def profiled(chain: Chain, *, lanes: int = 1) -> Profile:
    stage = Stage(
        devices=tuple(d.name for d in CLUSTER.devices[:lanes]),
        layers=(0, len(chain.layers)),
        lanes=lanes,
        dtype="bfloat16",
    )
    return stage_profile(chain, CLUSTER, stage, samples=2, microbatches=1, moments=2)


def test_streamed_updates_run_at_what_the_link_allows():
    """24 bytes a parameter cross the link: 3.8 billion a second on PCIe 5."""
    found = profiled(
        llama(depth=2, width=4096, num_heads=32, ff_width=11008, length=512)
    )
    block = found.layers[1]
    rate = block.num_params / found.update_s(1)[State.STREAMED]
    assert rate == pytest.approx(46e9 / 12)
    assert found.update_s(1)[State.HOST] == pytest.approx(
        block.num_params / (2.3e9 / 4)
    )


def test_a_tied_table_counts_once_and_its_gradient_ends_with_its_first_user():
    chain = gpt(depth=3, width=256, num_heads=4, length=64)
    found = profiled(chain)
    assert sum(x.num_params for x in found.layers) == chain.num_trained
    assert [x.last_user for x in found.layers] == [4, None, None, None, None]


def test_lanes_share_state_and_exchange_gradients():
    chain = gpt(depth=3, width=256, num_heads=4, length=64)
    one, two = profiled(chain), profiled(chain, lanes=2)
    for alone, shared in zip(one.layers, two.layers, strict=True):
        assert shared.homed_params == -(-alone.num_params // 2)
        assert shared.state_bytes == 12 * shared.homed_params
        assert shared.weights_bytes == alone.weights_bytes
        assert shared.reduce_s > 0 == alone.reduce_s


def test_times_are_the_cost_models():
    chain = llama(depth=2, width=512, num_heads=4, ff_width=1024, length=128)
    found = profiled(chain)
    stage = Stage(devices=("h100/0",), layers=(0, 4), dtype="bfloat16")
    times = layer_times(chain, mesh_shape(CLUSTER, stage), 2)
    for own, time in zip(found.layers[1:3], times[1:3], strict=True):
        for policy in Remat:
            more_s = own.backward_s[policy] - time.backward(policy, joined=False)
            assert more_s == pytest.approx(5e-5)
            assert own.recompute_s[policy] == time.recompute_s[policy]
        assert own.kept_bytes[Remat.FULL] < own.kept_bytes[Remat.NONE]
