"""Random plans over two to four islands that differ in their numbers of devices."""

import dataclasses
import functools
import random
from typing import Any
from unittest import mock

from hexijax.cluster import Cluster
from hexijax.cluster.node import DeviceGroup
from hexijax.layers.names import flatten
from hexijax.runtime import tracing
from hexijax.runtime.engine import Engine
from tests.laws import cases, drawing
from tests.laws.law_models import Shape, tokens

SIZES = {2: (5, 3), 3: (4, 1, 3), 4: (3, 2, 1, 2)}
"""Devices of each island, by the number of islands."""


@functools.cache
def cluster(islands: int) -> Cluster:
    """Eight devices; each node is an island of one of two kinds."""
    base = cases.cluster()
    nodes = []
    for i, count in enumerate(SIZES[islands]):
        like = base.nodes[i % 2]
        (group,) = like.devices
        groups = (DeviceGroup(kind=group.kind, count=count),)
        name = f"n{i}"
        nodes.append(
            dataclasses.replace(like, name=name, island=name, devices=groups, absent=())
        )
    return dataclasses.replace(base, nodes=tuple(nodes))


@functools.cache
def draw(islands: int, seed: int) -> cases.Case:
    """A model and a plan over so many islands; the same for the same seed."""
    rng = random.Random(1000 * islands + seed)
    shape = Shape(
        api=rng.choice(["nnx", "linen"]),
        tied=rng.random() < 0.5,
        scanned=rng.random() < 0.5,
    )
    clipped = rng.random() < 0.5
    nodes = {n.name: n for n in cluster(islands).nodes}
    names = {
        name: tuple(f"{name}/{i}" for i in range(node.num_slots))
        for name, node in nodes.items()
    }
    chain = cases.chain(shape)
    with mock.patch.object(drawing, "NODES", names):
        while True:
            plan = drawing.draw_plan(rng, chain, batch_size=cases.BATCH_SIZE)
            used = {d for _, stage in plan.stages() for d in stage.devices}
            if len({name.partition("/")[0] for name in used}) == islands:
                return cases.Case(seed, shape, clipped, plan)


def make(islands: int, seed: int, devices: Any, carrier: Any = None) -> Engine:
    """The engine of such a plan, or of an island of it."""
    case = draw(islands, seed)
    extra = {} if carrier is None else {"carrier": carrier}
    with (
        mock.patch("hexijax.program.boxes.MIN_CUT_SIZE", 64),
        mock.patch.object(tracing, "trace_model", cases._shared_trace),
    ):
        return Engine(
            cases.experiment(case.shape, case.clipped),
            case.plan,
            cases.chain(case.shape),
            cluster(islands),
            devices,
            **extra,
        )


def outcome(engine: Engine, seed: int, *, whole: bool = True) -> dict[str, Any]:
    """A step, its gradients and the parameters after it; an evaluation, another step
    and its parameters, unless less than the ``whole`` is asked for."""
    found: dict[str, Any] = {}
    batch = [tokens(cases.BATCH_SIZE, seed + n) for n in (0, 1000, 2000)]
    engine.init()
    found["first"] = engine.step(batch[0], 0).fetch()
    for name, x in flatten(engine.params()).items():
        found[f"after first {name}"] = x
    for name, x in engine.moments_like("grads").items():
        found[f"gradient {name}"] = x
    if not whole:
        return found
    with mock.patch.object(tracing, "trace_model", cases._shared_trace):
        found["seen"] = engine.evaluate(batch[1], 0)
    found["second"] = engine.step(batch[2], 1).fetch()
    for name, x in flatten(engine.params()).items():
        found[f"after second {name}"] = x
    return found
