"""Rates, layer times, links and instructions, reckoned by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.cluster import LinkProfile, Links, catalog
from hexijax.costs import MeshShape, PlanCosts, layer_times, products, rate
from hexijax.costs.links import all_reduce_s, slowest_link, transfer_s
from hexijax.costs.rates import CALL_S, SPLIT_SHARE
from hexijax.layers.chain import Product, Remat
from hexijax.layers.known import gpt, llama
from hexijax.plan.plan import Plan, Replica, Stage, stage_place
from hexijax.program.lower import lower
from hexijax.program.placement import StepRules
from hexijax.program.program import Backward, Forward, Part, Send, Update
from tests.plan.examples import make_chain, make_cluster, make_kind

CHAIN = make_chain(6)
KINDS = catalog.profiles()
LLAMA = llama(
    depth=24, width=2048, num_heads=16, length=2048, ff_width=5504, name="llama-1.35b"
)
FAST = MeshShape(profile=make_kind(tflops=10), dtype="float32")
LINK = LinkProfile(latency_s=1e-6, bytes_per_s=1e9)


def test_an_h100_sustains_what_was_measured():
    h100 = MeshShape(profile=KINDS["h100-80g-sxm"], dtype="bfloat16")
    large = Product(rows=8192, inner=8192, columns=8192)
    reached = large.flops / products.forward_s(large, 1, 1, h100.rate)
    assert reached / 1e12 == pytest.approx(800, rel=0.01)
    assert "800 of 989" in h100.rate.source
    # JAX's default float32 products run in tf32 there.
    single = rate(h100.profile, "float32").flops_per_s
    assert single > h100.profile.dense_flops_per_s["float32"]


@pytest.mark.parametrize(
    ("policy", "tflops"), [(Remat.NONE, 520), (Remat.DOTS, 500), (Remat.FULL, 425)]
)
def test_a_llama_on_an_h100_takes_what_was_measured(policy: Remat, tflops: float):
    h100 = MeshShape(profile=KINDS["h100-80g-sxm"], dtype="bfloat16")
    times = layer_times(LLAMA, h100, samples=8)
    seconds = sum(time.total_s(policy) for time in times)
    a_token = 6 * LLAMA.num_params + 6 * 24 * 2048 * 2048  # half of attention's
    flops = 8 * 2048 * a_token
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.08)


def test_forward_and_backward_apart_cost_their_residuals():
    h100 = MeshShape(profile=KINDS["h100-80g-sxm"], dtype="bfloat16")
    times = layer_times(LLAMA, h100, samples=4)

    def step_s(policy: Remat, joined: bool) -> float:
        return sum(
            t.forward(policy, joined=joined) + t.backward(policy, joined=joined)
            for t in times
        )

    assert step_s(Remat.NONE, joined=True) == pytest.approx(0.133, rel=0.04)
    assert step_s(Remat.DOTS, joined=False) == pytest.approx(0.143, rel=0.04)
    assert step_s(Remat.NONE, joined=False) == pytest.approx(0.153, rel=0.04)


@given(
    kind=st.sampled_from(["h100-80g-sxm", "v100-16g-sxm", "t4-16g", "rtx4090-24g"]),
    rows=st.integers(1, 20_000),
    inner=st.integers(1, 20_000),
    columns=st.integers(1, 20_000),
    shared=st.booleans(),
)
def test_no_product_beats_the_sustained_rate_or_its_operands(
    kind: str, rows: int, inner: int, columns: int, shared: bool
):
    profile = KINDS[kind]
    sustained = rate(profile, profile.train_dtype)
    product = Product(rows=rows, inner=inner, columns=columns, shared=shared)
    for way, times in ((products.forward_s, 1), (products.backward_s, 2)):
        seconds = way(product, 2, 1, sustained)
        assert seconds >= times * 2 * product.flops / sustained.flops_per_s
        moved = rows * inner + inner * columns + rows * columns
        assert seconds >= times * moved * 2 / sustained.memory_bytes_per_s
        # Twice the samples never take less; heads split over four cards do.
        assert way(product, 4, 1, sustained) >= seconds
    if not shared:
        many = dataclasses.replace(product, count=64.0)
        whole = products.forward_s(many, 8, 1, sustained)
        assert products.forward_s(many, 8, 4, sustained) <= whole


def test_thin_products_are_less_efficient():
    sustained = rate(KINDS["a100-40g-sxm"], "bfloat16")

    def efficiency(rows: int, inner: int = 4096) -> float:
        product = Product(rows=rows, inner=inner, columns=4096)
        return product.flops / products.forward_s(product, 1, 1, sustained)

    reached = [efficiency(rows) for rows in (16, 128, 1024, 8192)]
    assert reached == sorted(reached)
    assert reached[0] < 0.1 * reached[-1]
    assert efficiency(8192, inner=64) < 0.7 * efficiency(8192)


def test_a_card_of_little_power_never_holds_its_clock():
    def share(kind: str, dtype: str) -> float:
        profile = KINDS[kind]
        peak = profile.dense_flops_per_s[dtype]
        return rate(profile, dtype).flops_per_s / peak

    assert share("h100-80g-sxm", "bfloat16") == pytest.approx(0.85)
    assert share("a100-40g-sxm", "bfloat16") == pytest.approx(0.85)
    for kind, dtype in (("l4-24g", "bfloat16"), ("t4-16g", "float16")):
        assert 0.5 < share(kind, dtype) < 0.8


def test_layers_take_their_products_and_then_the_traffic_between_them():
    block = layer_times(CHAIN, FAST, samples=4)[1]
    moved_s = 4 * 2**20 / 0.8e12
    assert block.forward_s == pytest.approx(4e9 / 10e12 + moved_s)
    slow_memory = dataclasses.replace(FAST.profile, memory_bytes_per_s=1e9)
    starved = dataclasses.replace(FAST, profile=slow_memory)
    assert layer_times(CHAIN, starved, samples=4)[1].forward_s == pytest.approx(
        4e9 / 10e12 + 1000 * moved_s
    )


def test_a_hundred_layers_are_priced_in_no_time():
    deep = gpt(depth=98, width=1024, num_heads=16, length=1024)
    mesh = MeshShape(profile=KINDS["l4-24g"], dtype="bfloat16")
    times = layer_times(deep, mesh, 2)
    assert len({id(time) for time in times}) == 3  # equal layers once
    assert layer_times(deep, mesh, 2) is times


def test_remat_adds_a_share_of_the_forward():
    block = layer_times(CHAIN, FAST, samples=4)[1]
    assert block.recompute_s[Remat.NONE] == 0
    assert 0 < block.recompute_s[Remat.DOTS] < block.recompute_s[Remat.FULL]
    assert block.total_s(Remat.FULL) < 2 * block.forward_s + block.backward_s


def test_tensor_parallelism_divides_work_and_pays_for_sums():
    split = dataclasses.replace(FAST, tensor=2, link=LINK)
    work_s, moved_s = 4e9 / 10e12, 4 * 2**20 / 0.8e12
    paid_s = 2 * all_reduce_s(LINK, 2, 4 * 2**14)
    assert layer_times(CHAIN, split, samples=4)[1].forward_s == pytest.approx(
        work_s / 2 + moved_s * (1 - SPLIT_SHARE / 2) + paid_s
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


def test_one_pair_of_devices_may_get_a_part_of_the_way_only():
    cluster = make_cluster()
    link = LinkProfile(latency_s=0.0, bytes_per_s=4e9, flow_bytes_per_s=1e9)
    cluster = dataclasses.replace(
        cluster, links=Links(in_node=LINK, between_nodes=link)
    )
    for pairs, seconds in ((1, 1.0), (2, 0.5), (4, 0.25)):
        sources, targets = (
            [f"{node}/{i}" for i in range(pairs)] for node in ("n0", "n1")
        )
        assert transfer_s(cluster, sources, targets, 10**9) == pytest.approx(seconds)


def test_a_measured_link_is_filled_by_large_messages():
    link = LinkProfile(
        latency_s=1.0, bytes_per_s=1e3, measured=((1000, 3.0), (10_000, 12.0))
    )
    assert link.filled(1000) == pytest.approx(0.5)
    assert link.filled(10_000) == pytest.approx(10 / 11)
    assert LINK.filled(123) == pytest.approx(1)
    assert LINK.filled(0) == 1


def test_a_measured_update_overrules_the_memory_traffic():
    rows = ({"update_params": 1000, "update_s": 5.0},)
    kinds = [
        make_kind("fast"),
        dataclasses.replace(make_kind("slow"), layer_times=rows),
    ]
    stages = (Stage(devices=("n0/0",), layers=(0, 4)),)
    stages += (Stage(devices=("n1/0",), layers=(4, 8)),)
    replica = Replica(stages=stages, microbatches=1, microbatch_size=1, samples=1)
    plan = Plan(replicas=(replica,), batch_size=1)
    costs = PlanCosts(plan, CHAIN, make_cluster(kinds=kinds))
    program = lower(plan, CHAIN, rules=StepRules(), costs=costs)
    updates = [i for i in program.body if isinstance(i, Update)]
    seconds = {i.home: costs.duration_s(i) for i in updates}
    size = sum(CHAIN.group(name).size for x in CHAIN.layers[4:] for name in x.groups)
    assert seconds[stage_place(0, 1)] == pytest.approx(CALL_S + size * 0.005)
    assert seconds[stage_place(0, 0)] < 1e-3


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
    parts_s = {
        part: costs.duration_s(dataclasses.replace(backward, part=part))
        for part in Part
    }
    assert parts_s[Part.INPUT] + parts_s[Part.WEIGHT] == pytest.approx(
        parts_s[Part.BOTH] + CALL_S  # one call more, and nothing twice
    )
    layers = range(*plan.stage(place).segment_layers(1))
    weight_s = sum(times[i].weight_s for i in layers)
    assert parts_s[Part.WEIGHT] == pytest.approx(CALL_S + weight_s)
    assert weight_s == pytest.approx(sum(times[i].backward_s for i in layers) / 2)
    sends = [s for instr, s in seconds.items() if isinstance(instr, Send)]
    assert sends
    assert sends[0] == pytest.approx(50e-6 + 4 * 2**14 / 1e9)
