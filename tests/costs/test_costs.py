"""Rates, layer times, links and instructions, reckoned by hand."""

import dataclasses

import pytest

from hexijax.cluster import LinkProfile, catalog
from hexijax.costs import MeshShape, PlanCosts, layer_times, rate
from hexijax.costs.links import all_reduce_s, slowest_link, transfer_s
from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import Remat
from hexijax.plan.plan import Plan, Replica, Stage, stage_place
from hexijax.program.lower import lower
from hexijax.program.placement import StepRules
from hexijax.program.program import Backward, Forward, Part, Send
from tests.plan.examples import make_chain, make_cluster, make_kind

CHAIN = make_chain(6)
FAST = MeshShape(profile=make_kind(tflops=10), dtype="float32")
LINK = LinkProfile(latency_s=1e-6, bytes_per_s=1e9)


def test_an_h100_sustains_what_was_measured():
    h100 = catalog.profiles()["h100-80g-sxm"]
    assert rate(h100, "bfloat16").flops_per_s / 1e12 == pytest.approx(524, abs=5)
    assert "520 of 989" in rate(h100, "bfloat16").source
    # JAX's default float32 products run in tf32 there.
    assert rate(h100, "float32").flops_per_s > h100.dense_flops_per_s["float32"]


def test_arithmetic_or_memory_whichever_is_longer():
    block = layer_times(CHAIN, FAST, samples=4)[1]
    assert block.forward_s == pytest.approx(4e9 / 10e12)
    slow_memory = dataclasses.replace(FAST.profile, memory_bytes_per_s=1e9)
    starved = dataclasses.replace(FAST, profile=slow_memory)
    moved = 4 * 2**20 + 4 * (64 * 64 + 64)  # activations and weights
    assert layer_times(CHAIN, starved, samples=4)[1].forward_s == pytest.approx(
        moved / 0.8e9
    )


def test_remat_adds_a_share_of_the_forward():
    block = layer_times(CHAIN, FAST, samples=4)[1]
    assert block.recompute_s[Remat.NONE] == 0
    assert 0 < block.recompute_s[Remat.DOTS] < block.recompute_s[Remat.FULL]
    assert block.total_s(Remat.FULL) < 2 * block.forward_s + block.backward_s


def test_tensor_parallelism_divides_work_and_pays_for_sums():
    alone = layer_times(CHAIN, FAST, samples=4)[1].forward_s
    split = dataclasses.replace(FAST, tensor=2, link=LINK)
    paid = 2 * all_reduce_s(LINK, 2, 4 * 2**14)
    assert layer_times(CHAIN, split, samples=4)[1].forward_s == pytest.approx(
        alone / 2 + paid
    )


def test_measured_times_overrule_the_roofline():
    rows = tuple(
        {
            "signature": "blocks",
            "dtype": "float32",
            "samples": samples,
            "forward_s": samples * 1.0,
            "backward_s": 1.0 + samples * 2.0,
        }
        for samples in (4, 1)
    )
    profile = dataclasses.replace(FAST.profile, layer_times=rows)
    measured = dataclasses.replace(FAST, profile=profile)
    for samples in (1, 2, 4, 8):
        block = layer_times(CHAIN, measured, samples)[1]
        assert block.forward_s == pytest.approx(samples)
        assert block.backward_s == pytest.approx(1 + 2 * samples)
    # A layer nobody measured keeps the roofline.
    assert layer_times(CHAIN, measured, 1)[0] == layer_times(CHAIN, FAST, 1)[0]


def test_transfers_share_the_way_between_nodes():
    cluster = make_cluster(gb_per_s=1)
    pair = ["n0/0", "n0/1"]
    assert transfer_s(cluster, pair, pair, 10**9) == 0
    assert transfer_s(cluster, pair, ["n0/2", "n0/3"], 10**9) == pytest.approx(
        5e-6 + 0.01
    )
    assert transfer_s(cluster, pair, ["n1/0", "n1/1"], 10**9) == pytest.approx(
        50e-6 + 1
    )
    assert slowest_link(cluster, ["n0/0"]) is None
    slowest = slowest_link(cluster, ["n0/0", "n0/1", "n1/0"])
    assert slowest
    assert slowest.bytes_per_s == 1e9


def test_every_instruction_has_a_duration():
    first = Stage(devices=("n0/0", "n0/1"), layers=(0, 5), lanes=2, segments=(2, 3))
    last = Stage(devices=("n1/0",), layers=(5, 8), remat=(Remat.FULL,) * 3)
    plan = Plan(
        replicas=(
            Replica(
                stages=(first, last), microbatches=3, microbatch_size=4, samples=12
            ),
        ),
        batch_size=12,
    )
    cluster = make_cluster()
    costs = PlanCosts(plan, CHAIN, cluster)
    program = lower(plan, CHAIN, rules=StepRules(clip=True), costs=costs)
    seconds = {instr: costs.duration_s(instr) for instr in program.body}
    assert all(value >= 0 for value in seconds.values())

    place = stage_place(0, 0)
    times = layer_times(CHAIN, FAST, samples=2)
    forward = Forward(place=place, segment=0, microbatches=(0, 2))
    assert costs.duration_s(forward) == pytest.approx(
        2 * (CALL_S + times[0].forward_s + times[1].forward_s)
    )
    backward = Backward(place=place, segment=1, microbatches=(0, 1))
    half = dataclasses.replace(backward, part=Part.WEIGHT)
    assert costs.duration_s(half) == costs.duration_s(backward) / 2
    sends = [s for instr, s in seconds.items() if isinstance(instr, Send)]
    assert sends
    assert sends[0] == pytest.approx(50e-6 + 4 * 2**14 / 1e9)
