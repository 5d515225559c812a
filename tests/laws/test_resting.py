"""The arrays that costs count of state on its way are those that the runtime moves."""

import dataclasses
import itertools
from typing import Any

import jax
import optax
import pytest

from hexijax.costs import PlanCosts
from hexijax.layers.chain import Group, Leaf
from hexijax.plan.plan import Memory, Place, Plan, StateShare
from hexijax.program.program import Kind
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.layout import Layout
from hexijax.runtime.optimizer import GroupUpdate
from hexijax.runtime.programs import Programs
from tests.laws.test_travel import DEVICES, MACHINES
from tests.program.examples import make_chain, make_plan, make_stages

LEAVES = (
    Leaf(name="l0/kernel", shape=(256, 96)),
    Leaf(name="l0/scale", shape=(96,)),
    Leaf(name="l0/bias", shape=(96,)),
    Leaf(name="l0/half", shape=(64,), dtype="bfloat16"),
)
SCALE = 1
"""Of them, the one that a stage of bfloat16 is handed as it is."""

STAGES = {
    "one device": [(1, "bfloat16")],
    "in fp32": [(1, "float32")],
    "two lanes": [(2, "bfloat16")],
    "two users": [(1, "bfloat16"), (1, "bfloat16")],
    "two that compute in unlike dtypes": [(1, "bfloat16"), (1, "float32")],
    "a user of two lanes and one of one": [(2, "bfloat16"), (1, "bfloat16")],
}

LOOSE = {"all small": 2**20, "the kernel large": 2**10, "none small": 0}
"""Elements up to which an array is small."""

OPTIMIZERS = {"adam": (optax.adam(0.1), 2), "momentum": (optax.sgd(0.1, 0.9), 1)}
"""And moments for each parameter."""


def moved(
    plan: Plan, chain: Any, optimizer: optax.GradientTransformation
) -> dict[Place, tuple[int, int]]:
    """By home, masters and moments that come to it: all but counts of steps."""
    (group,) = chain.groups
    dtypes = {
        place: [
            stage.dtype if x.dtype == "float32" and i != SCALE else x.dtype
            for i, x in enumerate(group.leaves)
        ]
        for place, stage in plan.stages()
    }
    runtime = GroupRuntime(
        layout=Layout(plan, chain, DEVICES),
        programs=Programs(),
        update=GroupUpdate.of(
            optimizer,
            {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in group.leaves},
        ),
        group=group,
        members=tuple(dtypes),
        param_dtypes=dtypes,
        unscale=1.0,
        guarded=False,
    )
    found: dict[Place, tuple[int, int]] = {}
    for home in runtime.homes:
        rest = runtime._closed_structs(home)
        counts = sum(x.owner is None for x in runtime.moments(home))
        found[home] = (len(rest["master"]), len(rest["moments"]) - counts)
    return found


@pytest.mark.parametrize("loose", LOOSE)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("update", Memory)
def test_costs_count_the_arrays_that_come(
    stages: str,
    loose: str,
    optimizer: str,
    update: Memory,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("hexijax.program.resting.LOOSE_SIZE", LOOSE[loose])
    chain = make_chain(1)
    layer = dataclasses.replace(chain.layers[0], uncast=(LEAVES[SCALE].id,))
    group = Group(name="l0", leaves=LEAVES, layers=(0,))
    chain = dataclasses.replace(chain, layers=(layer,), groups=(group,))
    names = itertools.count()
    made = []
    for lanes, dtype in STAGES[stages]:
        (stage,) = make_stages([1], lanes=lanes)
        devices = tuple(f"fast/{next(names)}" for _ in range(lanes))
        made.append(((dataclasses.replace(stage, devices=devices, dtype=dtype),), 1))
    state = StateShare(groups=("*",), shares={}, memory=Memory.HOST, update=update)
    plan = make_plan(*made, state=(state,))
    optax_optimizer, moments = OPTIMIZERS[optimizer]
    costs = PlanCosts(plan, chain, MACHINES, moments)
    came = moved(plan, chain, optax_optimizer)
    for home, (masters, others) in came.items():
        assert costs._state_arrays(home, "l0") == (masters, others), home
        assert costs._moved_pieces(Kind.STATE, home, "l0") == masters + others
    apart = {home: len(costs.boxes("l0")[home]) * (1 + moments) for home in came}
    joined = {home for home, each in came.items() if sum(each) < apart[home]}
    alone = {home for home in came if len(costs.devices(home)) == 1}
    joins = update is Memory.DEVICE and loose != "none small"
    assert joined <= alone
    if joins and len(came) == 1:
        assert joined == alone
    if not joins:
        assert not joined
