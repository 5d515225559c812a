"""What went wrong in the field elsewhere, as small cases with what must come out."""

import dataclasses
import itertools

import pytest

from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Remat
from hexijax.plan import Plan
from hexijax.plan.plan import Replica, Schedule, Stage
from hexijax.planner import Grouping, InfeasiblePlanError, PlanOptions, make_plan
from hexijax.planner.search import search
from hexijax.simulator import predict
from tests.trials.cases import GIB, MIB, chain_of, kind, layers_by_kind, machines

ONE = PlanOptions(
    grouping=Grouping.ONE,
    use_all_devices=True,
    schedule=Schedule.ONE_F_ONE_B,
    offload=False,
)
"""All devices in one pipeline, and nothing on a host."""


def test_same_memory_and_4_8_times_the_speed_gives_4_8_times_the_layers():
    """Layers follow speed, not memory."""
    cluster = machines([(kind("fast", tflops=48), 1)], [(kind("slow", tflops=10), 1)])
    chain = chain_of([1] * 29)
    plan = make_plan(chain, cluster, batch_size=64, options=ONE)
    assert layers_by_kind(plan, cluster) == {"fast": 24, "slow": 5}


def test_they_do_whatever_the_search_may_choose():
    """Layers times samples, where replicas of their own are allowed too."""
    cluster = machines([(kind("fast", tflops=48), 1)], [(kind("slow", tflops=10), 1)])
    plan = make_plan(chain_of([1] * 29), cluster, batch_size=64)
    work = {"fast": 0, "slow": 0}
    for replica in plan.replicas:
        for stage in replica.stages:
            its = cluster.device(stage.devices[0]).kind
            work[its] += stage.num_layers * replica.samples
    assert work["fast"] / work["slow"] == pytest.approx(4.8, rel=0.1)


SMALL, LARGE = 16 * GIB, 32 * GIB


def test_of_16_and_32_gb_the_small_card_stays_in_its_budget():
    """40 GiB of parameters and state: half of it is more than the small one has."""
    cluster = machines(
        [(kind("small", memory_bytes=SMALL), 1)],
        [(kind("large", memory_bytes=LARGE), 1)],
    )
    chain = chain_of([1] * 20, params=107_374_080, kept_bytes=8 * MIB)
    any_way = PlanOptions(use_all_devices=True, offload=False)
    pipeline, free = (
        make_plan(chain, cluster, batch_size=32, options=options)
        for options in (ONE, any_way)
    )
    assert pipeline.prediction
    assert free.prediction
    for prediction in (pipeline.prediction, free.prediction):
        promised = prediction.memory_bytes
        assert promised["n0/0"] <= SMALL
        assert promised["n1/0"] <= LARGE
    held = layers_by_kind(pipeline, cluster)
    assert held == {"small": 7, "large": 13}  # 2 GiB a layer, and activations
    assert free.prediction.step_s <= pipeline.prediction.step_s
    even = dataclasses.replace(ONE, layers_per_stage=((10, 10),))
    with pytest.raises(InfeasiblePlanError, match="small with 17,179,869,184, 1 x"):
        make_plan(chain, cluster, batch_size=32, options=even)


def shape(plan: Plan) -> object:
    return tuple(
        tuple((s.devices, s.layers, s.lanes, s.tensor) for s in replica.stages)
        for replica in plan.replicas
    )


def test_bandwidth_cut_100_times_changes_the_plan_and_never_shortens_the_step():
    card = kind("card", tflops=20)
    chain = chain_of([1] * 12, params=2**22, flops=5e10, border_bytes=2**20)
    plans = [
        make_plan(
            chain,
            machines([(card, 2)], [(card, 2)], gb_per_s=rate),
            batch_size=32,
            options=PlanOptions(use_all_devices=True),
        )
        for rate in (12.5, 0.125)
    ]
    times = [plan.prediction.step_s for plan in plans if plan.prediction]
    assert times[0] <= times[1]
    assert shape(plans[0]) != shape(plans[1])
    # What was best over the fast link is no longer: the search saw the link.
    slow = machines([(card, 2)], [(card, 2)], gb_per_s=0.125)
    assert predict(plans[0], chain, slow).step_s > times[1] * 1.05


def crossings(plan: Plan, cluster: Cluster) -> int:
    nodes = [cluster.device(s.devices[0]).node for s in plan.replicas[0].stages]
    return sum(a != b for a, b in itertools.pairwise(nodes))


@pytest.mark.parametrize("grouping", [Grouping.ONE, Grouping.AUTO])
def test_32_stages_on_4_nodes_of_8_cross_between_nodes_3_times(grouping: Grouping):
    cluster = machines(*([[(kind("card"), 8)]] * 4), gb_per_s=1.0)
    chain = chain_of([1] * 32, border_bytes=16 * MIB)
    options = PlanOptions(
        grouping=grouping,
        use_all_devices=True,
        layers_per_stage=((1,) * 32,),
        tensor_degrees=(1,),
        schedule=Schedule.ONE_F_ONE_B,
    )
    plan = make_plan(chain, cluster, batch_size=8, options=options)
    assert len(plan.replicas[0].stages) == 32
    assert crossings(plan, cluster) == 3


def test_every_further_crossing_would_cost():
    """31 of them, stages dealt round the nodes: the simulator must see each."""
    cluster = machines(*([[(kind("card"), 8)]] * 4), gb_per_s=1.0)
    chain = chain_of([1] * 32, border_bytes=16 * MIB)
    near = [f"n{s // 8}/{s % 8}" for s in range(32)]
    dealt = [f"n{s % 4}/{s // 4}" for s in range(32)]
    steps = [
        predict(pipeline(names, [1] * 32, microbatches=32), chain, cluster).step_s
        for names in (near, dealt)
    ]
    assert steps[1] > steps[0] * 1.1


def pipeline(names: list[str], layers: list[int], microbatches: int) -> Plan:
    edges = [0, *itertools.accumulate(layers)]
    stages = tuple(
        Stage(
            devices=(name,),
            layers=span,
            dtype="float32",
            remat=(Remat.NONE,) * (span[1] - span[0]),
        )
        for name, span in zip(names, itertools.pairwise(edges), strict=True)
    )
    replica = Replica(
        stages=stages,
        microbatches=microbatches,
        microbatch_size=1,
        samples=microbatches,
    )
    return Plan(replicas=(replica,), batch_size=microbatches)


@pytest.mark.parametrize("layers", sorted(set(itertools.permutations([1, 2, 2, 3]))))
def test_the_heaviest_stage_paces_the_step_not_the_average(layers: tuple[int, ...]):
    """Each further microbatch adds three layers, not two."""
    cluster = machines([(kind("card"), 4)])
    chain = chain_of([1] * 8)
    names = [f"n0/{i}" for i in range(4)]
    one, many = (
        predict(pipeline(names, [*layers], count), chain, cluster).step_s
        for count in (24, 40)
    )
    layer_s = predict(pipeline(["n0/0"], [8], 16), chain, cluster).step_s / (16 * 8)
    assert (many - one) / 16 == pytest.approx(3 * layer_s, rel=0.02)


def test_a_planner_told_of_1_2_2_3_gives_the_heaviest_layer_a_stage_of_its_own():
    cluster = machines(*([[(kind("card"), 1)]] * 3))
    plan = make_plan(chain_of([1, 2, 2, 3]), cluster, batch_size=64, options=ONE)
    spans = [s.layers for s in plan.replicas[0].stages]
    assert spans == [(0, 2), (2, 3), (3, 4)]  # 3, 2, 3: no stage is worth more than 3


NUM_STAGES = 4


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 9])
def test_stage_k_keeps_min_of_s_minus_k_and_m_microbatches(microbatches: int):
    """In the promise, of what a microbatch keeps; the curve's peak is below it."""
    cluster = machines([(kind("card"), NUM_STAGES)])
    chain = chain_of([1] * NUM_STAGES, kept_bytes=100 * MIB, border_bytes=0)
    names = [f"n0/{i}" for i in range(NUM_STAGES)]
    plan = pipeline(names, [1] * NUM_STAGES, microbatches)
    parts = plan_memory(plan, chain, cluster)
    curves = predict(plan, chain, cluster, memory=True).memory
    for k, name in enumerate(names[:-1]):  # the last one's programs are joined
        live = min(NUM_STAGES - k, microbatches)
        kept = parts[name].activations_bytes / (100 * MIB)
        assert kept == pytest.approx(live, abs=0.01), name
        assert curves[name].peak_bytes <= parts[name].total_bytes
        assert curves[name].peak_bytes >= live * 100 * MIB


def test_so_the_same_card_holds_more_layers_the_later_its_stage():
    """Room for about 20 layers' activations: 5 at depth 4, 6 at depth 3, and so on."""
    card = kind("card", memory_bytes=22 * 100 * MIB)
    cluster = machines(*([[(card, 1)]] * NUM_STAGES))
    chain = chain_of([1] * 26, kept_bytes=100 * MIB)
    options = dataclasses.replace(ONE, remat=(Remat.NONE,), layers_per_segment=1)
    plan = make_plan(chain, cluster, batch_size=16, options=options)
    layers = [s.num_layers for s in plan.replicas[0].stages]
    assert layers[:2] == [5, 6]
    assert sorted(layers[2:]) == [7, 8]
    even = dataclasses.replace(options, layers_per_stage=((7, 7, 6, 6),))
    with pytest.raises(InfeasiblePlanError):
        make_plan(chain, cluster, batch_size=16, options=even)


def test_found_plans_and_runners_up_all_fit():
    """No plan is handed over that its own promise refuses."""
    card = kind("card", memory_bytes=2 * GIB)
    small = kind("small", tflops=5, memory_bytes=GIB)
    cluster = machines([(card, 2)], [(small, 2)])
    chain = chain_of([1] * 12, params=2**22, kept_bytes=60 * MIB)
    found = search(chain, cluster, batch_size=48)
    for plan in (found.plan, *found.runners_up):
        for name, parts in plan_memory(plan, chain, cluster).items():
            assert parts.total_bytes <= cluster.device(name).usable_memory_bytes
