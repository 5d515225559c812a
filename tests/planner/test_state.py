"""State lies where there is room for it: evenly if it can, unevenly if it must."""

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.layers.known import gpt
from hexijax.plan.checks import check
from hexijax.plan.plan import Plan, Replica, Stage, StateShare, stage_place
from hexijax.plan.text import parse, render
from hexijax.planner import InfeasiblePlanError, PlanOptions, make_plan
from hexijax.planner.refine import variants
from hexijax.planner.state import EVEN, UNIT_BYTES, state_shares, weighted_shares
from tests.plan.examples import GIB, make_chain, make_cluster, make_kind

QUICKSTART = Path(__file__).parents[2] / "experiments/clusters/quickstart.toml"
CHAIN = make_chain(4, width=512, rows=64)
STATE_BYTES = 12 * CHAIN.num_params
KINDS = (make_kind("fast", tflops=10), make_kind("slow", tflops=2.5))
CLUSTER = make_cluster([[("fast", 3)], [("slow", 2)]], kinds=KINDS)
NAMES = [device.name for device in CLUSTER.devices]


def plan_on(*replicas: list[tuple[int, int]]) -> Plan:
    """One device a stage, as they come; stages by their layers."""
    names = iter(NAMES)
    return Plan(
        replicas=tuple(
            Replica(
                stages=tuple(
                    Stage(devices=(next(names),), layers=layers) for layers in stages
                ),
                microbatches=1,
                microbatch_size=1,
                samples=1,
            )
            for stages in replicas
        ),
        batch_size=len(replicas),
    )


L = len(CHAIN.layers)
PLANS = {
    "lanes": plan_on([(0, L)], [(0, L)], [(0, L)]),
    "pipeline": plan_on([(0, 1), (1, 3), (3, L)]),
    "unlike cuts": plan_on([(0, 2), (2, L)], [(0, L - 1), (L - 1, L)]),
}


@pytest.mark.parametrize("form", PLANS)
def test_where_there_is_room_state_is_even(form: str):
    room = dict.fromkeys(NAMES, 2.0 * STATE_BYTES)
    assert state_shares(PLANS[form], CHAIN, CLUSTER, room, moments=2) == EVEN


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(PLANS)),
    parts=st.lists(st.floats(0, 1.5), min_size=len(NAMES), max_size=len(NAMES)),
)
def test_all_state_has_a_home_and_no_home_has_more_than_its_room(
    form: str, parts: list[float]
):
    plan = PLANS[form]
    room = {n: part * STATE_BYTES for n, part in zip(NAMES, parts, strict=True)}
    shares = state_shares(plan, CHAIN, CLUSTER, room, moments=2)
    if shares is None:
        assert sum(room.values()) <= STATE_BYTES + len(NAMES) * UNIT_BYTES
        return
    device_of = {place: stage.devices[0] for place, stage in plan.stages()}
    held = dict.fromkeys(NAMES, 0.0)
    named = {name for share in shares[1:] for name in share.groups}
    for share in shares[1:]:
        total = sum(share.shares.values())
        state = sum(12 * CHAIN.group(name).size for name in share.groups)
        for place, part in share.shares.items():
            held[device_of.get(place, place)] += part / total * state
    for group in CHAIN.groups:  # what is even
        if group.name not in named:
            users = [p for p, s in plan.stages() if _uses(s, group.layers)]
            for place in users:
                held[device_of[place]] += 12 * group.size / len(users)
    assert math.isclose(sum(held.values()), STATE_BYTES)
    for name in NAMES:
        assert held[name] <= room[name] + UNIT_BYTES * len(CHAIN.groups)


def _uses(stage: Stage, layers: tuple[int, ...]) -> bool:
    return any(stage.layers[0] <= layer < stage.layers[1] for layer in layers)


@settings(max_examples=60, deadline=None)
@given(form=st.sampled_from(sorted(PLANS)), data=st.data())
def test_replicas_hold_state_by_their_weights(form: str, data: st.DataObject):
    plan = PLANS[form]
    count = len(plan.replicas)
    weight = st.sampled_from((0.0, 0.25, 1.0))
    weights = data.draw(st.lists(weight, min_size=count, max_size=count))
    shares = weighted_shares(plan, CHAIN, weights)
    uneven = {name: share for share in shares[1:] for name in share.groups}
    for group in CHAIN.groups:
        users = [p for p, s in plan.stages() if _uses(s, group.layers)]
        wanted = {p: weights[int(p[1 : p.index(".")])] for p in users}
        if group.name not in uneven:
            assert len(set(wanted.values())) == 1
            continue
        parts = uneven[group.name].shares
        assert parts.keys() == {p for p, w in wanted.items() if w}
        unit, total = sum(parts.values()), sum(wanted.values())
        for place, part in parts.items():
            off = len(plan.replicas) * UNIT_BYTES / (4 * group.size)
            assert abs(part / unit - wanted[place] / total) <= off


def evenly_and_freely(chain: Chain, cluster: Cluster) -> list[Plan]:
    """Plans of 32 samples, state in even parts and wherever it is best."""
    return [
        make_plan(
            chain,
            cluster,
            batch_size=32,
            options=PlanOptions(even_state=even, offload=False),
        )
        for even in (True, False)
    ]


def test_state_lies_with_the_fast_cards_where_that_saves_time():
    """Slow cards send gradients and take parameters, and update nothing."""
    chain = gpt(depth=6, width=256, num_heads=8, length=64)
    cluster = Cluster.from_toml(QUICKSTART)
    even, leaning = evenly_and_freely(chain, cluster)
    check(leaning, chain, cluster)
    holders = {place for share in leaning.state for place in share.shares}
    kinds = {cluster.device(leaning.stage(p).devices[0]).kind for p in holders}
    assert kinds == {"cpu-fast"}
    assert even.prediction
    assert leaning.prediction
    assert leaning.prediction.step_s < 0.97 * even.prediction.step_s


def test_a_full_device_stores_nothing_and_an_idle_one_may():
    room = {**dict.fromkeys(NAMES, 0.0), NAMES[1]: 0.7 * STATE_BYTES}
    room[NAMES[4]] = 0.6 * STATE_BYTES
    shares = state_shares(PLANS["lanes"], CHAIN, CLUSTER, room, moments=2)
    assert shares is not None
    (uneven,) = shares[1:]
    assert uneven.shares.keys() == {stage_place(1, 0), NAMES[4]}
    assert uneven.shares[stage_place(1, 0)] > uneven.shares[NAMES[4]]


def tight(small_gib: float) -> Cluster:
    """A fast card with little memory beside a slow one with much."""
    kinds = (
        make_kind("fast", tflops=10, memory_bytes=int(small_gib * GIB)),
        make_kind("slow", tflops=2.5, memory_bytes=8 * GIB),
    )
    return make_cluster([[("fast", 1), ("slow", 1)]], kinds=kinds)


@pytest.mark.laws
def test_a_model_whose_even_share_overflows_a_card_is_planned_unevenly():
    """The fast card computes most of it, the slow one stores the state of both."""
    chain = make_chain(8, width=2048, rows=64, block_flops=1e11)
    cluster = tight(0.5)
    even, uneven = evenly_and_freely(chain, cluster)
    for plan in (even, uneven):
        check(plan, chain, cluster)
        assert parse(render(plan, chain)) == plan
    assert not any(share.shares for share in even.state)
    (share,) = uneven.state[1:]
    of = {replica.stages[0].devices: r for r, replica in enumerate(uneven.replicas)}
    fast, slow = of["n0/0",], of["n0/1",]
    assert uneven.replicas[fast].samples > 3 * uneven.replicas[slow].samples
    assert share.shares.keys() == {stage_place(slow, 0)}
    assert uneven.prediction is not None
    assert even.prediction is not None
    assert uneven.prediction.step_s < 0.85 * even.prediction.step_s


def test_what_fits_nowhere_is_refused_with_numbers():
    chain = make_chain(8, width=2**14, rows=64)
    with pytest.raises(InfeasiblePlanError, match="usable together"):
        make_plan(chain, tight(0.5), batch_size=8, options=PlanOptions(offload=False))


def held(plan: Plan) -> dict[str, float]:
    """What each device holds of the state, in the units of its shares."""
    stages, found = dict(plan.stages()), dict.fromkeys(NAMES, 0.0)
    for place, amount in plan.state[0].shares.items():
        devices = stages[place].devices if place in stages else (place,)
        for device in devices:
            found[device] += amount / len(devices)
    return found


def test_a_replica_that_changes_places_keeps_its_state():
    lanes = Stage(devices=tuple(NAMES[:2]), layers=(0, L), lanes=2, remat=())
    alone = plan_on([(0, L)], [(0, 2), (2, L)]).replicas[1]
    two = dataclasses.replace(alone, samples=4, microbatch_size=2, microbatches=2)
    one = Replica(stages=(lanes,), microbatches=2, microbatch_size=2, samples=4)
    shares = {stage_place(0, 0): 3.0, stage_place(0, 1): 1.0, "n1/1": 2.0}
    state = (StateShare(groups=("*",), shares=shares),)
    pairs = {
        "order": Plan(replicas=(_on(two, NAMES[2:4]), one), batch_size=8, state=state),
        "lanes": Plan(
            replicas=(one,),
            batch_size=4,
            state=(StateShare(groups=("*",), shares={stage_place(0, 0): 3.0}),),
        ),
    }
    for name, plan in pairs.items():
        others = [v for v in variants(plan, PlanOptions()) if _moved(plan, v)]
        assert others, name
        for other in others:
            check(other, CHAIN, CLUSTER)
            assert held(other) == held(plan), name


def _on(replica: Replica, names: list[str]) -> Replica:
    stages = zip(replica.stages, names, strict=True)
    return dataclasses.replace(
        replica,
        stages=tuple(dataclasses.replace(s, devices=(name,)) for s, name in stages),
    )


def _moved(plan: Plan, other: Plan) -> bool:
    """Whether replicas stand in another order, or are more."""
    devices = [
        [[s.devices for s in r.stages] for r in p.replicas] for p in (plan, other)
    ]
    return devices[0] != devices[1] and (
        len(devices[0]) != len(devices[1]) or sorted(devices[0]) == sorted(devices[1])
    )
