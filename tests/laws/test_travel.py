"""Gradients to their homes and parameters to their users: what crosses between nodes.

The runtime's copies are counted as they leave, beside what the costs say of them and
what is reckoned by hand: what a mesh needs crosses once, however many lanes it has.
"""

import dataclasses
import functools
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

from hexijax.costs import PlanCosts
from hexijax.costs.exchange import Exchange
from hexijax.layers.chain import Chain, Group, Leaf
from hexijax.plan.plan import Place, Plan, StateShare
from hexijax.program.boxes import users
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.layout import Layout
from hexijax.runtime.optimizer import GroupUpdate
from hexijax.runtime.programs import Programs
from tests.laws.drawing import NODES, draw_meshes
from tests.program.examples import make_chain, make_plan, make_stages
from tests.simulator.test_simulator import cluster

MACHINES = cluster(("fast", 4), ("slow", 4))
DEVICES = dict(
    zip([d for node in NODES.values() for d in node], jax.devices(), strict=True)
)
NODE_OF = {device: name.split("/")[0] for name, device in DEVICES.items()}


def make_case(seed: int) -> tuple[Plan, Chain]:
    """Replicas of one stage, each within a node, and uneven shares over some of them.

    All boxes divide by lanes and shards.
    """
    rng = random.Random(seed)
    chain = make_chain(1, sizes=[4096])
    leaves = (
        Leaf(name="l0/kernel", shape=(4096, 64), tensor_dim=1),
        Leaf(name="l0/table", shape=(64, 512), tensor_dim=0),
    )
    chain = dataclasses.replace(
        chain, groups=(Group(name="l0", leaves=leaves, layers=(0,)),)
    )
    meshes: list[Any] = []
    while len(meshes) < 2 or all(lanes == 1 for _, lanes, _ in meshes):
        meshes = draw_meshes(rng, 4)
    stages = []
    for devices, lanes, tensor in meshes:
        (stage,) = make_stages([1], lanes=lanes, tensor=tensor)
        stages.append(((dataclasses.replace(stage, devices=devices),), 1))
    places = [Place(f"r{i}.s0") for i in range(len(meshes))]
    chosen = rng.sample(places, rng.choice([n for n in (1, 2, 4) if n <= len(places)]))
    shares = dict.fromkeys(chosen, 1.0)
    if len(chosen) == 2 and rng.random() < 0.5:
        shares[chosen[0]] = 3.0
    return make_plan(*stages, state=(StateShare(groups=("*",), shares=shares),)), chain


class Copies:
    """Counts bytes between nodes, and calls, of ``jax.device_put``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out: Counter[str] = Counter()
        self.into: Counter[str] = Counter()
        self.calls = 0
        self._put = jax.device_put
        monkeypatch.setattr(jax, "device_put", self._count)

    def _count(self, arrays: Any, devices: Any) -> Any:
        self.calls += 1
        for array, target in zip(arrays, devices, strict=True):
            (source,) = array.devices()
            if NODE_OF[source] != NODE_OF[target]:
                self.out[NODE_OF[source]] += array.nbytes
                self.into[NODE_OF[target]] += array.nbytes
        return self._put(arrays, devices)

    def take(self) -> tuple[Counter[str], Counter[str], int]:
        """What was counted since the last time."""
        taken = self.out, self.into, self.calls
        self.out, self.into, self.calls = Counter(), Counter(), 0
        return taken


def make_runtime(
    plan: Plan, chain: Chain, optimizer: Any, *, whole_leaves: bool
) -> GroupRuntime:
    """Of the chain's only group."""
    layout = Layout(plan, chain, DEVICES, whole_leaves=whole_leaves)
    (group,) = chain.groups
    tree = {
        leaf.name: jax.ShapeDtypeStruct(leaf.shape, "float32") for leaf in group.leaves
    }
    members = users(plan, group)
    return GroupRuntime(
        layout=layout,
        programs=Programs(),
        update=GroupUpdate.of(optimizer, tree),
        group=group,
        members=members,
        param_dtypes={m: ["float32"] * len(group.leaves) for m in members},
        unscale=1.0,
        guarded=False,
    )


def make_exchange(plan: Plan, chain: Chain, *, whole_leaves: bool) -> Exchange:
    """The same group's costs."""
    costs = PlanCosts(plan, chain, MACHINES, whole_leaves=whole_leaves)
    return costs.exchange("l0")


def priced(loads: Iterator[Any]) -> dict[str, int]:
    """Bytes of the ways between nodes, by node."""
    found: Counter[str] = Counter()
    for load in loads:
        for way, num_bytes in zip(load.ways, load.num_bytes, strict=True):
            node, _ = way.split(" ")
            if "/" not in node and ">" not in way:
                found[node] += num_bytes
    return dict(+found)


def gradient(
    rng: np.random.Generator, shape: tuple[int, ...], leaf: tuple[int, ...]
) -> np.ndarray:
    """Of all lanes; at most two are not 0, whose sum knows no order."""
    made = rng.standard_normal(shape, dtype="float32").reshape(-1, *leaf)
    made[2:] = 0
    return made.reshape(shape)


def collectives(program: Any) -> set[str]:
    """Those of a compiled program that move more than a number."""
    found = re.findall(r"= \w+\[\d.*\} (all-\w+|reduce-scatter)\(", program.as_text())
    return set(found)


def needed(
    runtime: GroupRuntime, sources: tuple[Place, ...], targets: tuple[Place, ...]
) -> dict[str, int]:
    """Into each node: all that a home has, once for each mesh of another node."""
    found: Counter[str] = Counter()
    node = {p: runtime.layout.shape(p)[0][0].split("/")[0] for p in runtime.members}
    for source in sources:
        for target in targets:
            if node[source] != node[target]:
                home = source if sources == runtime.homes else target
                size = sum(
                    int(np.prod([stop - start for start, stop in box]))
                    for _, box in runtime.held[home]
                )
                found[node[target]] += 4 * size
    return dict(found)


@pytest.mark.parametrize("whole_leaves", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_each_byte_crosses_once_for_each_mesh(
    seed: int, whole_leaves: bool, monkeypatch: pytest.MonkeyPatch
):
    plan, chain = make_case(seed)
    runtime = make_runtime(plan, chain, optax.sgd(0.1), whole_leaves=whole_leaves)
    exchange = make_exchange(plan, chain, whole_leaves=whole_leaves)
    rng = np.random.default_rng(seed)
    whole = [
        rng.standard_normal(leaf.shape, dtype="float32")
        for leaf in runtime.group.leaves
    ]
    grads = {
        member: tuple(
            jax.device_put(gradient(rng, struct.shape, leaf.shape), struct.sharding)
            for struct, leaf in zip(
                runtime._grads(member), runtime.group.leaves, strict=True
            )
        )
        for member in runtime.members
    }
    params = {
        home: tuple(
            jax.device_put(
                whole[runtime.group.leaves.index(leaf)][
                    tuple(slice(*rows) for rows in box)
                ],
                sharding,
            )
            for (leaf, box), sharding in zip(
                runtime.held[home], runtime._slices(home), strict=True
            )
        )
        for home in runtime.homes
    }
    copies = Copies(monkeypatch)

    pieces = runtime.send_grads(grads)
    summed = {home: runtime.sum(home, pieces[home]) for home in runtime.homes}
    out, into, calls = copies.take()
    assert dict(into) == needed(runtime, runtime.members, runtime.homes)
    assert out == priced(map(exchange.leave, exchange.members))
    assert into == priced(map(exchange.arrive, exchange.homes))
    assert calls <= len(runtime.members)
    for home, (boxes, _) in summed.items():
        for (leaf, box), got in zip(runtime.held[home], boxes, strict=True):
            i = runtime.group.leaves.index(leaf)
            lanes = (
                np.reshape(grads[m][i], (-1, *leaf.shape)) for m in runtime.members
            )
            want = functools.reduce(np.add, (each.sum(0) for each in lanes))
            cut = want[tuple(slice(*rows) for rows in box)]
            np.testing.assert_array_equal(got, cut)

    moved = runtime.send_params(runtime.members, params)
    gathered = [
        runtime.join(member, each)
        for member, each in zip(runtime.members, moved, strict=True)
    ]
    out, into, calls = copies.take()
    assert dict(into) == needed(runtime, runtime.homes, runtime.members)
    assert out == priced(map(exchange.spread_out, exchange.homes))
    assert into == priced(map(exchange.spread_in, exchange.members))
    assert calls <= len(runtime.members)
    for member, arrays in zip(runtime.members, gathered, strict=True):
        for leaf, value, got in zip(runtime.group.leaves, whole, arrays, strict=True):
            assert got.sharding == runtime.layout.param(member, leaf)
            np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_lanes_only_scatter_sums_and_gather_parameters(seed: int):
    plan, chain = make_case(seed)
    runtime = make_runtime(plan, chain, optax.sgd(0.1), whole_leaves=False)
    assert len(runtime.members) > 1
    for member in runtime.members:
        if runtime.layout.lanes(member) > 1:
            assert collectives(runtime._partial(member)) == {"reduce-scatter"}
            if runtime.homes != (member,):
                assert collectives(runtime._join(member)) == {"all-gather"}
