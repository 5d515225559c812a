"""Plans for small clusters: valid, within memory, repeatable, and as asked."""

import dataclasses

import pytest

from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Remat
from hexijax.plan.checks import check
from hexijax.plan.plan import Plan, PlanError, Schedule
from hexijax.plan.text import parse, render
from hexijax.planner import (
    Grouping,
    InfeasiblePlanError,
    PlanOptions,
    make_plan,
    single_plan,
)
from tests.plan.examples import make_chain, make_cluster, make_kind

CHAIN = make_chain(10, width=256, rows=512)
TWO_KINDS = (make_kind("fast", tflops=10), make_kind("slow", tflops=2.5))


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """What holds of everything the planner returns."""
    check(plan, CHAIN, cluster)
    assert plan.prediction is not None
    assert parse(render(plan, CHAIN)) == plan
    promised = plan.prediction.memory_bytes
    assert promised == {
        name: parts.total_bytes
        for name, parts in plan_memory(plan, CHAIN, cluster).items()
    }
    for name, num_bytes in promised.items():
        assert num_bytes <= cluster.device(name).usable_memory_bytes


NODES = {
    "2+4": [[("fast", 2)], [("slow", 4)]],
    "1+8": [[("fast", 1)], [("slow", 8)]],
    "3+5": [[("fast", 3)], [("slow", 5)]],
    "mixed": [[("fast", 1), ("slow", 2)], [("slow", 1)]],
    "one": [[("fast", 1)]],
}


def test_a_zero_bubble_pipeline_fits_and_is_shorter():
    chain = make_chain(10, width=1024, rows=1024)
    cluster = make_cluster([[("fast", 4)]], kinds=TWO_KINDS[:1])
    options = PlanOptions(layers_per_stage=((3, 3, 3, 3),), grouping=Grouping.ONE)
    plain, split = (
        make_plan(
            chain,
            cluster,
            batch_size=16,
            options=dataclasses.replace(options, schedule=schedule),
        )
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)
    )
    check(split, chain, cluster)
    assert split.schedule is Schedule.ZERO_BUBBLE
    assert plain.prediction is not None
    assert split.prediction is not None
    assert split.prediction.step_s < 0.95 * plain.prediction.step_s


def test_slow_borders_hide_under_eager_1f1b():
    chain = make_chain(9, width=1024, rows=1024)
    names = [[("fast", 1)]] * 3
    cluster = make_cluster(names, kinds=TWO_KINDS[:1], gb_per_s=0.05)
    options = PlanOptions(grouping=Grouping.ONE, use_all_devices=True)
    found, plain = (
        make_plan(
            chain,
            cluster,
            batch_size=32,
            options=dataclasses.replace(options, schedule=schedule),
        )
        for schedule in (None, Schedule.ONE_F_ONE_B)
    )
    check(found, chain, cluster)
    assert found.schedule is Schedule.EAGER
    assert found.prediction is not None
    assert plain.prediction is not None
    assert found.prediction.step_s < 0.9 * plain.prediction.step_s


@pytest.mark.parametrize(
    ("nodes", "grouping"),
    [
        *((nodes, Grouping.AUTO) for nodes in NODES),
        ("2+4", Grouping.ONE),
        ("2+4", Grouping.MESH),
        ("mixed", Grouping.NODE),
        ("mixed", Grouping.KIND),
    ],
)
def test_nodes_with_unlike_counts(nodes: str, grouping: Grouping):
    kinds = TWO_KINDS if nodes != "one" else TWO_KINDS[:1]
    cluster = make_cluster(NODES[nodes], kinds, gb_per_s=10)
    options = PlanOptions(grouping=grouping)
    plan = make_plan(CHAIN, cluster, batch_size=26, options=options)
    check_plan(plan, cluster)


def test_equal_input_gives_an_equal_plan():
    cluster = make_cluster([[("fast", 1)], [("slow", 2)]], TWO_KINDS)
    first, second = (make_plan(CHAIN, cluster, batch_size=26) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("schedule", Schedule)
def test_every_schedule(schedule: Schedule):
    cluster = make_cluster([[("fast", 2)], [("slow", 2)]], TWO_KINDS)
    options = PlanOptions(schedule=schedule, grouping=Grouping.ONE)
    plan = make_plan(CHAIN, cluster, batch_size=16, options=options)
    check_plan(plan, cluster)
    assert plan.schedule is schedule


def test_work_follows_speed():
    cluster = make_cluster([[("fast", 1)], [("slow", 1)]], TWO_KINDS, gb_per_s=100)
    plan = make_plan(
        CHAIN,
        cluster,
        batch_size=50,
        options=PlanOptions(grouping=Grouping.MESH, use_all_devices=True),
    )
    assert [replica.samples for replica in plan.replicas] == [40, 10]
    plan = make_plan(
        CHAIN,
        cluster,
        batch_size=64,
        options=PlanOptions(grouping=Grouping.ONE, use_all_devices=True),
    )
    by_kind = {s.devices[0]: s.num_layers for s in plan.replicas[0].stages}
    assert by_kind["n0/0"] > 2 * by_kind["n1/0"]


def test_a_card_behind_a_slow_link_is_left_out():
    near = make_cluster([[("fast", 4)], [("slow", 4)]], TWO_KINDS, gb_per_s=100)
    far = make_cluster([[("fast", 4)], [("slow", 4)]], TWO_KINDS, gb_per_s=1e-4)
    used = {
        name: {d for _, s in plan.stages() for d in s.devices}
        for name, plan in {
            "near": make_plan(CHAIN, near, batch_size=64),
            "far": make_plan(CHAIN, far, batch_size=64),
        }.items()
    }
    assert len(used["near"]) == 8
    assert used["far"] == {"n0/0", "n0/1", "n0/2", "n0/3"}


@pytest.mark.parametrize("room_mib", [80, 48, 36])
def test_less_memory_means_more_remat_or_smaller_pieces(room_mib: int):
    kinds = [make_kind("fast", memory_bytes=room_mib * 2**20)]
    cluster = make_cluster([[("fast", 2)]], kinds)
    chain = make_chain(10, width=128, rows=128, activation_bytes=2**21)
    plan = make_plan(chain, cluster, batch_size=16)
    check(plan, chain, cluster)
    assert plan.prediction
    assert max(plan.prediction.memory_bytes.values()) <= room_mib * 2**20


def test_remat_is_chosen_where_memory_asks_for_it():
    chain = make_chain(10, width=128, rows=128, activation_bytes=2**24)
    cluster = make_cluster([[("fast", 1)]], [make_kind(memory_bytes=3 * 2**26)])
    plan = make_plan(chain, cluster, batch_size=8)
    check(plan, chain, cluster)
    policies = {p for _, stage in plan.stages() for p in stage.remat}
    assert policies - {Remat.NONE}


def test_a_split_of_ones_own_is_honoured():
    cluster = make_cluster([[("fast", 2)], [("slow", 2)]], TWO_KINDS)
    options = PlanOptions(layers_per_stage=((7, 5),), grouping=Grouping.NODE)
    options = dataclasses.replace(options, tensor_degrees=(1,))
    plan = make_plan(CHAIN, cluster, batch_size=16, options=options)
    check_plan(plan, cluster)
    for replica in plan.replicas:
        assert [stage.num_layers for stage in replica.stages] == [7, 5]
    with pytest.raises(PlanError) as caught:
        make_plan(
            CHAIN,
            cluster,
            batch_size=16,
            options=PlanOptions(layers_per_stage=((7, 6),)),
        )
    assert "The split 7+6 was asked for: 13 layers, and toy has 12." in str(
        caught.value
    )
    most = (4, *(1,) * 8)  # more than four devices hold, in any number of rounds
    with pytest.raises(InfeasiblePlanError, match=r"with 4(\+1){8} layers a stage"):
        make_plan(
            CHAIN,
            cluster,
            batch_size=16,
            options=PlanOptions(layers_per_stage=(most,), offload=False),
        )


def test_the_microbatch_cap_is_of_one_lane():
    cluster = make_cluster([[("fast", 2)]], TWO_KINDS[:1])
    for cap in (1, 3):
        plan = make_plan(
            CHAIN,
            cluster,
            batch_size=30,
            options=PlanOptions(max_microbatch_size=cap),
        )
        for replica in plan.replicas:
            for stage in replica.stages:
                assert replica.microbatch_size // stage.lanes <= cap


def test_a_kind_computes_in_the_next_dtype_it_has():
    bf16 = dataclasses.replace(
        make_kind("fast"),
        dense_flops_per_s={"float32": 1e13, "bfloat16": 4e13},
        native_dtypes=("bfloat16", "float32"),
    )
    cluster = make_cluster([[("fast", 1)], [("slow", 1)]], (bf16, TWO_KINDS[1]))
    plan = make_plan(
        CHAIN,
        cluster,
        batch_size=64,
        dtype="bfloat16",
        options=PlanOptions(use_all_devices=True),
    )
    dtypes = {stage.devices[0]: stage.dtype for _, stage in plan.stages()}
    assert dtypes == {"n0/0": "bfloat16", "n1/0": "float32"}
    with pytest.raises(PlanError, match="The compute dtype 'int8' was asked for"):
        make_plan(CHAIN, cluster, batch_size=8, dtype="int8")


def test_a_model_that_fits_nowhere_is_refused_with_numbers():
    kinds = [
        make_kind("fast", memory_bytes=2**26),
        make_kind("slow", memory_bytes=2**25),
    ]
    cluster = make_cluster([[("fast", 2)], [("slow", 1)]], kinds)
    chain = make_chain(10, width=2048, rows=2048)
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(chain, cluster, batch_size=8, options=PlanOptions(offload=False))
    need, stays = chain.num_params * 20, chain.num_params * 16
    assert str(caught.value) == (
        "No split of the 12 layers of toy over 3 devices fits in memory: the layers "
        f"hold {need:,} bytes of parameters, gradients and state, and the devices have "
        "167,772,160 usable together (2 x fast with 67,108,864, 1 x slow with "
        "33,554,432). Where parameters are gathered for each pass and freed after it, "
        f"sums of gradients and state stay, {stays:,} bytes. "
        "Add devices, or devices with more memory, or a smaller sample (shorter "
        "sequences)."
    )
    with pytest.raises(InfeasiblePlanError) as caught:
        single_plan(chain, cluster, batch_size=8)
    assert "toy does not fit on n0/0 alone: at microbatch 1 and remat full" in str(
        caught.value
    )


def test_the_single_plan_is_the_plain_program():
    cluster = make_cluster()
    plan = single_plan(CHAIN, cluster, batch_size=24)
    check_plan(plan, cluster)
    (replica,) = plan.replicas
    (stage,) = replica.stages
    assert stage.devices == ("n0/0",)
    assert stage.segments == (12,)
    assert (replica.microbatches, replica.microbatch_size) == (1, 24)
    capped = PlanOptions(max_microbatch_size=5)
    plan = single_plan(CHAIN, cluster, batch_size=24, device="n1/2", options=capped)
    check_plan(plan, cluster)
    assert plan.replicas[0].microbatch_size == 5


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_has_samples(batch_size: int):
    with pytest.raises(
        PlanError, match=f"A global batch of {batch_size} was asked for"
    ):
        make_plan(CHAIN, make_cluster(), batch_size=batch_size)


def test_one_sample_is_a_batch():
    plan = make_plan(CHAIN, make_cluster(), batch_size=1)
    check_plan(plan, make_cluster())
    assert plan.replicas[0].samples == 1
