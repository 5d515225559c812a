"""What a plan must be, and what is said where it is not."""

import dataclasses
from typing import Any

import pytest

from hexijax.cluster import Cluster
from hexijax.layers.chain import Remat
from hexijax.plan.checks import adopt, check
from hexijax.plan.plan import (
    Place,
    Plan,
    PlanError,
    Prediction,
    Replica,
    Schedule,
    Stage,
    StateShare,
)
from tests.plan.examples import GIB, make_chain, make_cluster, make_kind

CHAIN = make_chain(6, width=96)  # 8 layers: embed, blocks/0-5, head
CLUSTER = make_cluster()


def make_plan(*stages: Stage, size: int = 4, **fields: Any) -> Plan:
    """One replica of 3 microbatches, 12 samples; fields overrule the plan's."""
    replica = Replica(stages=stages, microbatches=3, microbatch_size=size, samples=12)
    return Plan(**{"replicas": (replica,), "batch_size": 12, **fields})


FAST = Stage(devices=("n0/0", "n0/1", "n0/2", "n0/3"), layers=(0, 6), lanes=2, tensor=2)
SLOW = Stage(devices=("n1/0",), layers=(6, 8))


def stage(of: Stage = FAST, **fields: Any) -> Stage:
    """The stage with some fields replaced; its segments and policies follow."""
    return dataclasses.replace(of, **{"segments": (), "remat": (), **fields})


def test_a_good_plan_passes():
    check(make_plan(FAST, SLOW), CHAIN, CLUSTER)
    owned = make_plan(
        FAST, SLOW, chain=CHAIN.fingerprint(), cluster=CLUSTER.fingerprint()
    )
    check(owned, CHAIN, CLUSTER)
    assert adopt(make_plan(FAST, SLOW), CHAIN, CLUSTER) == owned


BAD = {
    "a gap": (
        make_plan(FAST, stage(SLOW, layers=(7, 8))),
        "Stage r0.s1 starts at layer 7, but the layers before it end at 5: layers 6-6 "
        "are in no stage of replica 0. Start it at 6.",
    ),
    "an overlap": (
        make_plan(FAST, stage(SLOW, layers=(4, 8))),
        "layers 4-5 are in two stages of replica 0. Start it at 6.",
    ),
    "a lost layer": (
        make_plan(FAST, stage(SLOW, layers=(6, 7))),
        "The stages of replica 0 hold 7 layers and toy has 8. Every layer sits in "
        "exactly one stage: end the last stage at layer 7.",
    ),
    "an empty stage": (
        make_plan(FAST, stage(SLOW, layers=(6, 6))),
        "Stage r0.s1 is empty: its layers start at 6 and end before 6.",
    ),
    "more stages than layers": (
        make_plan(*(stage(SLOW, layers=(i, i + 1)) for i in range(9))),
        "Replica 0 has 9 stages for 8 layers: some would be empty. Use at most 8 "
        "stages.",
    ),
    "no replica": (
        make_plan(replicas=()),
        "The plan has no replicas; it needs at least one.",
    ),
    "segments": (
        make_plan(stage(segments=(2, 3)), SLOW),
        "The segments of stage r0.s0 are 2+3 = 5 layers, and the stage has 6.",
    ),
    "remat": (
        make_plan(stage(remat=(Remat.FULL,)), SLOW),
        "Stage r0.s0 names a remat policy for 1 layers and has 6.",
    ),
    "an unknown device": (
        make_plan(FAST, stage(SLOW, devices=("n1/9",))),
        "Stage r0.s1: cluster toy",
    ),
    "mixed kinds": (
        make_plan(stage(devices=("n0/0", "n0/1", "n0/2", "n1/3")), SLOW),
        "Stage r0.s0 mixes kinds: n0/0 is a fast and n1/3 a slow.",
    ),
    "a wrong count": (
        make_plan(stage(tensor=3), SLOW),
        "Stage r0.s0 has 4 devices for 2 lanes x tensor degree 3 = 6.",
    ),
    "a device twice": (
        make_plan(stage(devices=("n0/0", "n0/1", "n0/1", "n0/3")), SLOW),
        "Stage r0.s0 names device n0/1 2 times; once each, please.",
    ),
    "half shared": (
        make_plan(FAST, stage(SLOW, devices=("n0/3",))),
        "Stages r0.s0 and r0.s1 share n0/3 but not all of their devices.",
    ),
    "repeats": (
        make_plan(FAST, stage(layers=(6, 8))),
        "Replica 0 has 2 stages on 1 device sets, and the schedule is 1f1b.",
    ),
    "interleaved without repeats": (
        make_plan(FAST, SLOW, schedule=Schedule.INTERLEAVED),
        "The schedule is interleaved, and replica 0 has 2 stages on as many device "
        "sets.",
    ),
    "interleaved out of turn": (
        make_plan(
            stage(layers=(0, 2)),
            stage(SLOW, layers=(2, 4)),
            stage(SLOW, layers=(4, 6)),
            stage(layers=(6, 8)),
            schedule=Schedule.INTERLEAVED,
        ),
        "The 4 stages of replica 0 do not go round their 2 device sets in one order",
    ),
    "a dtype it lacks": (
        make_plan(stage(dtype="bfloat16"), SLOW),
        "Stage r0.s0 computes in bfloat16, and a fast has float32.",
    ),
    "lanes": (
        make_plan(FAST, SLOW, size=5),
        "Stage r0.s0 has 2 lanes for microbatches of 5 samples: 5 is not divisible by "
        "2. Write size 6: the samples beyond 12 are padding of weight zero",
    ),
    "the batch": (
        make_plan(FAST, SLOW, batch_size=13),
        "The replicas take 12 = 12 samples and the global batch has 13. They must be "
        "equal: change the last replica's samples to 13, or the batch.",
    ),
    "too many samples": (
        make_plan(FAST, SLOW, size=2),
        "Replica 0 takes 12 samples in 3 microbatches of 2, which hold 6. Write "
        "microbatches 6.",
    ),
    "only padding": (
        make_plan(FAST, SLOW, size=6),
        "Replica 0 takes 12 samples in 3 microbatches of 6: 2 hold them, and the rest "
        "would be padding. Write microbatches 2.",
    ),
    "an unknown group": (
        make_plan(FAST, SLOW, state=(StateShare(groups=("blocks/00",), shares={}),)),
        "'blocks/00' is shared out, and toy has no such parameter group. Did you mean "
        "'blocks/0'?",
    ),
    "a group twice": (
        make_plan(FAST, SLOW, state=(StateShare(groups=("*", "*"), shares={}),)),
        "The state of group '*' is shared out twice. Name it in one 'state' line only.",
    ),
    "an unknown place": (
        make_plan(
            FAST, SLOW, state=(StateShare(groups=("*",), shares={Place("n1/7"): 1.0}),)
        ),
        "shared to 'n1/7', which is no stage of this plan and no device of toy. Did "
        "you",
    ),
    "no share": (
        make_plan(
            FAST, SLOW, state=(StateShare(groups=("*",), shares={Place("n1/1"): 0.0}),)
        ),
        "All state shares of * are 0, so its state would lie nowhere.",
    ),
    "a negative share": (
        make_plan(
            FAST, SLOW, state=(StateShare(groups=("*",), shares={Place("n1/1"): -1.0}),)
        ),
        "The state share of n1/1 in * is -1.0. A share is a number from 0.",
    ),
    "another model": (
        make_plan(FAST, SLOW, chain="0123456789ab"),
        f"This plan belongs to another model: it was made for 0123456789ab, and toy is "
        f"{CHAIN.fingerprint()}.",
    ),
    "another cluster": (
        make_plan(FAST, SLOW, cluster="0123456789ab"),
        "This plan belongs to another cluster: it was made for 0123456789ab, and toy "
        f"is {CLUSTER.fingerprint()}.",
    ),
    "memory": (
        make_plan(
            FAST,
            SLOW,
            prediction=Prediction(step_s=1.0, memory_bytes={"n0/0": 5 * GIB}),
        ),
        "The plan promises a peak of 5,368,709,120 bytes on n0/0, which has "
        "4,294,967,296 usable.",
    ),
    "memory of nobody": (
        make_plan(
            FAST, SLOW, prediction=Prediction(step_s=1.0, memory_bytes={"n0/7": 1})
        ),
        "The plan predicts the memory of 'n0/7'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_says_why(name: str):
    plan, message = BAD[name]
    with pytest.raises(PlanError) as caught:
        check(plan, CHAIN, CLUSTER)
    assert message in str(caught.value)


def test_a_device_works_for_one_replica():
    whole = stage(SLOW, layers=(0, 8))
    replica = Replica(stages=(whole,), microbatches=2, microbatch_size=3, samples=6)
    with pytest.raises(PlanError, match=r"Device n1/0 is in replica 0 and in stage r1"):
        check(make_plan(replicas=(replica, replica)), CHAIN, CLUSTER)


def test_a_split_weight_divides():
    chain = make_chain(6, width=48, rows=50)
    cluster = make_cluster([[("fast", 6)]], [make_kind()])
    devices = tuple(f"n0/{i}" for i in range(6))
    plan = make_plan(Stage(devices=devices, layers=(0, 8), tensor=6))
    with pytest.raises(PlanError) as caught:
        check(plan, chain, cluster)
    assert str(caught.value) == (
        "Stage r0.s0 splits its weights over axis `model` of size 6: dim 0 of "
        "embed/table has 50 rows, not divisible by tensor degree 6. Use a tensor "
        "degree that divides 50, such as 5."
    )


def test_a_stage_stays_in_its_island():
    def node(name: str, island: str) -> Any:
        return dataclasses.replace(CLUSTER.nodes[0], name=name, island=island)

    cluster: Cluster = dataclasses.replace(
        CLUSTER, nodes=(node("a", "one"), node("b", "two"))
    )
    plan = make_plan(Stage(devices=("a/0", "b/0"), layers=(0, 8), lanes=2))
    with pytest.raises(PlanError, match="spans islands: a/0 is in one and b/0 in two"):
        check(plan, CHAIN, cluster)
