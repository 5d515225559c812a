"""A stage's layers as the choice sees them: times of the cost model, each byte once."""

from collections.abc import Callable

import pytest

from hexijax.cluster import Cluster
from hexijax.costs import PlanCosts
from hexijax.costs.compute import layer_times
from hexijax.costs.instructions import mesh_shape
from hexijax.costs.rates import HOST_PIECE_S
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.known import gpt, llama
from hexijax.plan.plan import (
    Memory,
    Params,
    Plan,
    Replica,
    Schedule,
    Stage,
    StateShare,
)
from hexijax.planner.offload.choice import Profile, State
from hexijax.planner.offload.profile import stage_profile
from hexijax.program import names
from hexijax.program.program import Buffer, Prefetch, WriteBack

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
    pieces_s = block.state_pieces * HOST_PIECE_S
    assert rate == pytest.approx(
        block.num_params / (block.num_params * 12 / 46e9 + pieces_s)
    )
    assert found.update_s(1)[State.HOST] == pytest.approx(
        block.num_params / (3.2e9 / 4)
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


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("update", Memory)
def test_copies_take_what_the_simulator_is_given(lanes: int, update: Memory):
    """Chunk by chunk: bytes of all its arrays, and each array's start."""
    chain = llama(depth=2, width=4096, num_heads=32, ff_width=11008, length=512)
    found = profiled(chain, lanes=lanes)
    depth = len(chain.layers)
    stage = Stage(
        devices=tuple(d.name for d in CLUSTER.devices[:lanes]),
        layers=(0, depth),
        lanes=lanes,
        dtype="bfloat16",
        segments=(1,) * depth,
        params=(Params.STREAMED,) * depth,
    )
    plan = Plan(
        replicas=(
            Replica(
                stages=(stage,), microbatches=1, microbatch_size=2 * lanes, samples=2
            ),
        ),
        batch_size=2 * lanes,
        schedule=Schedule.LAYERED,
        state=(
            StateShare(groups=("*",), shares={}, memory=Memory.HOST, update=update),
        ),
    )
    costs = PlanCosts(plan, chain, CLUSTER)

    def taken_s(make: Callable[[str], Prefetch | WriteBack], layer: int) -> float:
        mine = [g.name for g in costs.groups.values() if g.layers == (layer,)]
        return sum(costs.duration_s(make(name)) for name in mine)

    def state(group: str) -> Buffer:
        return names.state("r0.s0", group)

    def grad(group: str) -> Buffer:
        return names.grad("r0.s0", group)

    def param(group: str) -> Buffer:
        return names.param("r0.s0", group)

    for i, own in enumerate(found.layers):
        comes_s = taken_s(lambda g: Prefetch(buffer=state(g), pool="state"), i)
        leaves_s = taken_s(lambda g: WriteBack(buffer=state(g), pool="state"), i)
        sent_s = taken_s(lambda g: WriteBack(buffer=grad(g), pool="grads"), i)
        fetched_s = taken_s(lambda g: Prefetch(buffer=param(g), pool="params"), i)
        if update is Memory.DEVICE:
            assert found.state_s(i) == pytest.approx((comes_s, leaves_s))
        assert found.grads_s(i) == pytest.approx(sent_s)
        moved = own.weights_bytes, own.weights_pieces
        assert found.in_s(*moved) == pytest.approx(fetched_s)
