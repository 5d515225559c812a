"""What travels packed arrives as what travels leaf by leaf: same bits, fewer copies.

Packs are for places of one device; the same group is moved with them and without.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hexijax.layers.chain import Group, Leaf
from hexijax.plan.plan import Memory, Place, StateShare
from hexijax.program.boxes import users
from hexijax.program.program import Site
from hexijax.runtime.group_shapes import GroupShapes
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.layout import DEVICE, Layout
from hexijax.runtime.optimizer import GroupUpdate
from hexijax.runtime.programs import Programs
from tests.laws.test_travel import DEVICES
from tests.program.examples import make_chain, make_plan, make_stages

LEAVES = (
    Leaf(name="l0/kernel", shape=(256, 96)),
    Leaf(name="l0/scale", shape=(96,)),
    Leaf(name="l0/table", shape=(64, 512)),
)
DTYPES = ["bfloat16", "float32", "bfloat16"]
"""Of each leaf, where it is computed with: a scale is used as it is."""

SHARES: dict[str, Mapping[str, float]] = {
    "even": {},
    "uneven": {"r0.s0": 5, "r1.s0": 1, "r2.s0": 2},
    "a user stores nothing": {"r0.s0": 1, "r2.s0": 1},
    "one stores all": {"r1.s0": 1},
    "a device beside stores": {"r0.s0": 1, "slow/3": 3},
}

OFTEN = ("uneven", "one stores all")
FEW = [
    pytest.param(
        SHARES[name], id=name, marks=[] if name in OFTEN else [pytest.mark.laws]
    )
    for name in SHARES
]


def make_runtime(
    shares: Mapping[str, float],
    memory: Memory = Memory.DEVICE,
    update: Memory = Memory.DEVICE,
) -> GroupRuntime:
    """Three replicas of one device each; where state rests, and who updates it."""
    names = ("fast/0", "fast/1", "slow/0")
    chain = dataclasses.replace(
        make_chain(1, sizes=[4096]),
        groups=(Group(name="l0", leaves=LEAVES, layers=(0,)),),
    )
    stages = []
    for name in names:
        (stage,) = make_stages([1])
        stages.append(((dataclasses.replace(stage, devices=(name,)),), 1))
    state = StateShare(
        groups=("*",),
        shares={Place(k): float(v) for k, v in shares.items()},
        memory=memory,
        update=update,
    )
    plan = make_plan(*stages, state=(state,))
    (group,) = chain.groups
    tree = {x.name: jax.ShapeDtypeStruct(x.shape, "float32") for x in group.leaves}
    members = users(plan, group)
    return GroupRuntime(
        layout=Layout(plan, chain, DEVICES),
        programs=Programs(),
        update=GroupUpdate.of(optax.adam(0.1), tree),
        group=group,
        members=members,
        param_dtypes=dict.fromkeys(members, DTYPES),
        unscale=1.0,
        guarded=False,
    )


def step(runtime: GroupRuntime) -> dict[str, Any]:
    """Norms, and every user's parameters: gathered from state, and from the update."""
    rng = np.random.default_rng(0)
    whole = [rng.standard_normal(x.shape, dtype="float32") for x in LEAVES]
    grads = {
        member: tuple(
            jax.device_put(
                rng.standard_normal(x.shape, dtype="float32"),
                runtime.layout.grad(member, x),
            )
            for x in LEAVES
        )
        for member in runtime.members
    }
    index = {x.id: i for i, x in enumerate(LEAVES)}
    sums = runtime.send_grads(grads)
    before, after, norms, states, arrays = {}, {}, {}, {}, {}
    for home in runtime.homes:
        masters = runtime.place_masters(
            home,
            [
                jax.device_put(
                    whole[index[leaf.id]][tuple(slice(*rows) for rows in box)],
                    runtime.layout.replicated(home),
                )
                for leaf, box in runtime.held[home]
            ],
        )
        state = runtime.closed(home, runtime.init_state(home, masters))
        arrays[home] = len(jax.tree.leaves(state))
        before[home] = runtime.slices(home, state)
        jax.block_until_ready(before[home])
        before[home] = tuple(x.copy() for x in before[home])  # the update donates them
        summed, norms[home] = runtime.sum(home, sums[home])
        if runtime._site is Site.HOST:
            new, made = runtime.update_on_host(home, state, summed, None, travels=True)
            after[home] = runtime.on_devices(home, made)
        else:
            there = jax.tree.map(lambda x: x.sharding.with_memory_kind(DEVICE), state)
            given = jax.device_put(state, there)
            new, after[home] = runtime.update(home, given, summed, None)
        states[home] = runtime.opened(home, new)
    return {
        "norms": norms,
        "arrays": arrays,
        "states": states,
        **{
            f"{name} {place}": runtime.join(
                place, runtime.send_params([place], slices)[0]
            )
            for name, slices in (("before", before), ("after", after))
            for place in runtime.members
        },
    }


@pytest.mark.parametrize("shares", FEW)
def test_packs_change_no_bit(
    shares: Mapping[str, float], monkeypatch: pytest.MonkeyPatch
):
    packed_runtime = make_runtime(shares)
    packed = step(packed_runtime)
    alone = len(packed_runtime.homes) == 1
    assert packed_runtime._packed is not (alone and not shares.keys() - {"r1.s0"})
    monkeypatch.setattr(GroupShapes, "_packed", False)
    leaf_by_leaf = step(make_runtime(shares))
    jax.tree.map(np.testing.assert_array_equal, packed, leaf_by_leaf)
    dtypes = [x.dtype.name for x in packed["after r0.s0"]]
    assert dtypes == DTYPES


@pytest.mark.parametrize("shares", FEW)
def test_small_state_that_rests_as_one_array_changes_no_bit(
    shares: Mapping[str, float], monkeypatch: pytest.MonkeyPatch
):
    joined = step(make_runtime(shares, Memory.HOST))
    monkeypatch.setattr("hexijax.program.resting.LOOSE_SIZE", 0)
    apart = step(make_runtime(shares, Memory.HOST))
    fewer, each = joined.pop("arrays"), apart.pop("arrays")
    jax.tree.map(np.testing.assert_array_equal, joined, apart)
    # A count, and of masters those that are not cast.
    assert max(fewer.values()) <= 4 < 10 == max(each.values())
    monkeypatch.undo()
    on_devices = step(make_runtime(shares))
    for name in (x for x in joined if " " in x):
        jax.tree.map(np.testing.assert_array_equal, joined[name], on_devices[name])


def test_a_bucket_takes_one_copy_from_place_to_place(monkeypatch: pytest.MonkeyPatch):
    runtime = make_runtime(SHARES["even"])
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 1)
    sent: list[int] = []
    put = jax.device_put

    def counting(arrays: Any, devices: Any) -> Any:
        if isinstance(arrays, list):
            sent.append(len(arrays))
        return put(arrays, devices)

    rng = np.random.default_rng(0)
    grads = {
        member: tuple(
            put(
                rng.standard_normal(x.shape, dtype="float32"),
                runtime.layout.grad(member, x),
            )
            for x in LEAVES
        )
        for member in runtime.members
    }
    monkeypatch.setattr(jax, "device_put", counting)
    runtime.send_grads(grads)
    assert sent == [6]  # three to two others each; its own stays
