"""The promised peak: by hand, and by what must hold of every plan."""

import dataclasses
import json
import math

import pytest

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node
from hexijax.costs.activations import (
    batch_bytes,
    handed_microbatches,
    live_microbatches,
)
from hexijax.costs.memory import (
    GAPS_BYTES,
    GAPS_SHARE,
    plan_memory,
    room_bytes,
)
from hexijax.costs.parts import MemoryParts
from hexijax.costs.sums import GRAD_BYTES, GROUPS_IN_FLIGHT
from hexijax.costs.temp import TempKey, Temps, temp_factor
from hexijax.layers.chain import ITEM_BYTES, Remat
from hexijax.plan.plan import (
    Place,
    Plan,
    Replica,
    Schedule,
    Stage,
    StateShare,
    UpdateOrder,
    stage_place,
)
from hexijax.program.check import check
from hexijax.program.lower import StepRules, lower
from tests.plan.examples import make_chain, make_cluster

MIB = 2**20
CHAIN = make_chain(6, width=256, rows=256)
CLUSTER = make_cluster([[("fast", 5)], [("slow", 2)], [("fast", 1)]])
FAST = CLUSTER.device("n0/0").profile
BLOCK = 256 * 256 + 256


def make_plan(
    *stages: Stage, microbatches: int = 4, size: int = 2, **fields: object
) -> Plan:
    """One replica."""
    samples = microbatches * size
    replica = Replica(
        stages=stages,
        microbatches=microbatches,
        microbatch_size=size,
        samples=samples,
    )
    return Plan(replicas=(replica,), batch_size=samples, **fields)  # pyrefly: ignore


def test_parts_by_hand():
    plan = make_plan(
        Stage(devices=("n0/0",), layers=(0, 3), remat=(Remat.FULL,) * 3),
        Stage(devices=("n1/0", "n1/1"), layers=(3, 8), lanes=2),
    )
    memory = plan_memory(plan, CHAIN, CLUSTER)
    assert memory.keys() == {"n0/0", "n1/0", "n1/1"}
    first = memory["n0/0"]
    assert first.params_bytes == (256 * 256 + 2 * BLOCK) * 4
    assert first.grads_bytes == first.params_bytes
    assert first.state_bytes == 3 * first.params_bytes
    second = memory["n1/0"]
    assert second.params_bytes == (4 * BLOCK + 256 * 256) * 4
    assert second.state_bytes == pytest.approx(3 * second.params_bytes / 2)
    # Stage 0 of 2 holds two microbatches of two samples, three inputs of 16 KiB each.
    assert 2 * 2 * 3 * 2**14 <= first.activations_bytes < 2 * MIB // 2
    assert first.transient_bytes >= 2 * MIB
    # The last stage runs one, of one sample a lane, both ways in one program.
    assert second.activations_bytes < MIB
    assert 5 * MIB <= second.transient_bytes / temp_factor(FAST, "float32") < 8 * MIB
    apart = dataclasses.replace(plan, schedule=Schedule.GPIPE)
    held = plan_memory(apart, CHAIN, CLUSTER)["n1/0"].activations_bytes
    assert 4 * 5 * MIB <= held < 4 * 6 * MIB


def test_what_was_compiled_overrules_the_model():
    stage = Stage(devices=("n0/0",), layers=(0, 8))
    plan = make_plan(stage)
    promised = plan_memory(plan, CHAIN, CLUSTER)["n0/0"]
    key = TempKey.of(
        FAST, CHAIN.layers, stage.remat, dtype="float32", tensor=1, samples=2,
        joined=True,
    )  # fmt: skip
    temps = Temps().with_rows([(key, 12345)])
    again = Temps.from_json(json.loads(json.dumps(temps.to_json())))
    known = plan_memory(plan, CHAIN, CLUSTER, temps=again)["n0/0"]
    assert known == dataclasses.replace(promised, transient_bytes=12345)
    # Of another microbatch size nothing is known.
    other = make_plan(stage, size=4)
    assert plan_memory(other, CHAIN, CLUSTER, temps=again) == plan_memory(
        other, CHAIN, CLUSTER
    )


def test_tables_that_are_looked_up_are_held_as_they_are():
    bf16 = dataclasses.replace(
        FAST, dense_flops_per_s={"bfloat16": 1e12}, native_dtypes=("bfloat16",)
    )
    cluster = make_cluster([[("fast", 1)]], [bf16])
    plan = make_plan(Stage(devices=("n0/0",), layers=(0, 8), dtype="bfloat16"))
    embed = dataclasses.replace(CHAIN.layers[0], uncast=("embed/table",))
    chain = dataclasses.replace(CHAIN, layers=(embed, *CHAIN.layers[1:]))
    cast, uncast = (
        plan_memory(plan, x, cluster)["n0/0"].params_bytes for x in (CHAIN, chain)
    )
    assert uncast - cast == 2 * CHAIN.group("embed").size


def test_state_lies_where_the_shares_say():
    share = StateShare(groups=("*",), shares={Place("n2/0"): 1.0})
    plan = make_plan(Stage(devices=("n0/0",), layers=(0, 8)), state=(share,))
    memory = plan_memory(plan, CHAIN, CLUSTER)
    assert memory["n0/0"].state_bytes == 0
    assert memory["n2/0"].state_bytes == CHAIN.num_params * 12
    assert memory["n2/0"].params_bytes == 0
    momentum = plan_memory(plan, CHAIN, CLUSTER, moments=1)
    assert momentum["n2/0"].state_bytes == CHAIN.num_params * 8


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_state_is_stored_once(num_stages: int, microbatches: int):
    edges = [8 * k // num_stages for k in range(num_stages + 1)]
    plan = make_plan(
        *(
            Stage(devices=(f"n0/{k}",), layers=(edges[k], edges[k + 1]))
            for k in range(num_stages)
        ),
        microbatches=microbatches,
    )
    memory = plan_memory(plan, CHAIN, CLUSTER)
    assert sum(m.state_bytes for m in memory.values()) == CHAIN.num_params * 12
    live = live_microbatches(Schedule.ONE_F_ONE_B, plan.replicas[0])
    assert live == [min(num_stages - k, microbatches) for k in range(num_stages)]


def test_live_microbatches_of_the_other_schedules():
    stages = [Stage(devices=(f"n0/{k % 2}",), layers=(k, k + 1)) for k in range(4)]
    replica = make_plan(*stages, microbatches=8).replicas[0]
    assert live_microbatches(Schedule.GPIPE, replica) == [8] * 4
    assert live_microbatches(Schedule.EAGER, replica) == [7, 5, 3, 1]
    live = live_microbatches(Schedule.INTERLEAVED, replica)
    assert max(live) < 8
    assert live[-1] == 1


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_a_split_backward_s_promise_is_what_the_program_holds(
    num_stages: int, microbatches: int
):
    width = 8 // num_stages
    stages = [
        Stage(devices=(f"n0/{k}",), layers=(k * width, (k + 1) * width))
        for k in range(num_stages)
    ]
    plan = make_plan(*stages, microbatches=microbatches, schedule=Schedule.ZERO_BUBBLE)
    (replica,) = plan.replicas
    report = check(lower(plan, CHAIN, rules=StepRules()), plan, CHAIN)
    live = live_microbatches(plan.schedule, replica)
    handed = handed_microbatches(plan.schedule, replica)
    whole = dataclasses.replace(plan, schedule=Schedule.ONE_F_ONE_B)
    split_parts, parts = (plan_memory(p, CHAIN, CLUSTER) for p in (plan, whole))
    for k, stage in enumerate(stages):
        place, device = stage_place(0, k), stage.devices[0]
        assert report.live_microbatches[place] == live[k]
        assert report.live_handed.get(place, 0) == handed[k]
        more = split_parts[device].activations_bytes - parts[device].activations_bytes
        layers = CHAIN.layers[slice(*stage.layers)]
        # Both operands of each product are not known here: twice what is kept.
        each = sum(2 * 2 * layer.activation_bytes[Remat.NONE] + 1 for layer in layers)
        batch = batch_bytes(CHAIN, *stage.layers, 2)
        assert more == handed[k] * (each + batch)


def test_tensor_parallelism_divides_split_weights_only():
    plan = make_plan(Stage(devices=("n0/0", "n0/1"), layers=(0, 8), tensor=2))
    parts = plan_memory(plan, CHAIN, CLUSTER)["n0/0"]
    scales = 6 * 256
    assert parts.params_bytes == ((CHAIN.num_params - scales) / 2 + scales) * 4


def test_two_stages_of_a_device_are_never_in_a_backward_at_once():
    one = MemoryParts(params_bytes=10, activations_bytes=5, transient_bytes=3)
    other = MemoryParts(grads_bytes=2, sync_bytes=9, transient_bytes=7)
    assert one.total_bytes == 18
    assert (one + other).total_bytes == 10 + 5 + 2 + 9 + 7
    assert one.largest == "params"


def test_whole_leaves_never_promise_less():
    stage = Stage(devices=("n0/0", "n0/1"), layers=(0, 8), lanes=2, dtype="bfloat16")
    cut = plan_memory(make_plan(stage), CHAIN, CLUSTER)["n0/0"]
    whole = plan_memory(make_plan(stage), CHAIN, CLUSTER, whole_leaves=True)["n0/0"]
    assert whole.sync_bytes >= cut.sync_bytes
    assert whole.state_bytes > cut.state_bytes


def test_gradients_cut_otherwise_are_put_together_at_home():
    def replica(*devices: str, lanes: int) -> Replica:
        stage = Stage(devices=devices, layers=(0, 8), lanes=lanes)
        return Replica(stages=(stage,), microbatches=1, microbatch_size=2, samples=2)

    def promised(other: Replica) -> MemoryParts:
        alike = replica("n0/0", lanes=1)
        share = StateShare(groups=("*",), shares={Place("r0.s0"): 1.0})
        plan = Plan(
            replicas=(alike, other),
            batch_size=4,
            state=(share,),
            order=UpdateOrder.PRIORITY,
        )
        return plan_memory(plan, CHAIN, CLUSTER)["n0/0"]

    plain = promised(replica("n1/0", lanes=1))
    pieces = promised(replica("n1/0", "n1/1", lanes=2))
    # One bucket; two of them may be in flight, each with one gradient in pieces.
    assert pieces.sync_bytes - plain.sync_bytes == 2 * CHAIN.num_params * 4


@pytest.mark.parametrize("segments", [(8,), (4, 4), (1,) * 8])
def test_sums_take_the_room_that_activations_leave(segments: tuple[int, ...]):
    """Not where updates wait for the next step, whose forward is there beside them."""

    def promised(samples: int, order: UpdateOrder) -> MemoryParts:
        replicas = tuple(
            Replica(
                stages=(Stage(devices=(name,), layers=(0, 8), segments=segments),),
                microbatches=1,
                microbatch_size=samples,
                samples=samples,
            )
            for name in ("n0/0", "n1/0")
        )
        plan = Plan(replicas=replicas, batch_size=2 * samples, order=order)
        return plan_memory(plan, CHAIN, CLUSTER)["n0/0"]

    few, many = (promised(n, UpdateOrder.FIFO) for n in (1, 64))
    beside = promised(64, UpdateOrder.PRIORITY)
    waiting = GRAD_BYTES * (CHAIN.num_params // 2)
    assert beside.sync_bytes > few.sync_bytes + waiting * 0.99
    assert 0 < many.sync_bytes <= few.sync_bytes
    if len(segments) == 1:  # none are left when the only program has ended
        new = GROUPS_IN_FLIGHT * (CHAIN.num_params * 3 // 2) * ITEM_BYTES["float32"]
        assert many.sync_bytes == pytest.approx(new, rel=0.01)


@pytest.mark.parametrize("kind", ["h100-80g-sxm", "rtx2080-8g", "mi210-64g", "cpu"])
def test_an_allocator_gives_more_than_it_is_asked_for(kind: str):
    """What fills a card's room fills its usable memory; a host's has no gaps."""
    node = Node(
        name="n",
        devices=(DeviceGroup(kind=kind, count=1),),
        host_memory_bytes=2**36,
        host_cores=4,
        link=LinkProfile(latency_s=1e-5, bytes_per_s=1e10),
    )
    kinds = (dataclasses.replace(FAST, kind="cpu", vendor="cpu"),)
    cluster = Cluster(
        name="c", nodes=(node,), links=Links(), profiles=kinds if kind == "cpu" else ()
    )
    (device,) = cluster.devices
    plan = make_plan(Stage(devices=("n/0",), layers=(0, 8)))
    parts = plan_memory(plan, CHAIN, cluster)["n/0"]
    asked, room = parts.total_bytes - parts.gaps_bytes, room_bytes(device)
    if kind == "cpu":
        assert parts.gaps_bytes == 0
        assert room == device.usable_memory_bytes
        return
    assert parts.gaps_bytes == math.ceil(min(GAPS_BYTES, asked * GAPS_SHARE))
    gaps = device.usable_memory_bytes - room
    assert abs(gaps - min(GAPS_BYTES, room * GAPS_SHARE)) <= 2
