"""Pinned host memory: as much as was promised, and hardly less."""

import dataclasses
from typing import Any

import pytest

from hexijax.costs.hosts import host_bytes
from hexijax.costs.memory import plan_memory
from hexijax.plan.plan import (
    Memory,
    Params,
    Plan,
    Replica,
    Schedule,
    Stage,
    StateShare,
    UpdateOrder,
)
from hexijax.runtime import tracing
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from hexijax.runtime.layout import PINNED_HOST
from hexijax.runtime.ledger import Ledger
from tests.laws.cases import _shared_trace, chain, cluster, experiment
from tests.laws.law_models import Shape, tokens

SHAPE = Shape(api="linen", tied=False)
MOMENTS = 3
"""Of the cases' optimizer: Adam's two, and the gradients that it remembers."""

BATCH = 8


def plan(
    *,
    params: Params = Params.KEPT,
    waits: Memory = Memory.DEVICE,
    residuals: Memory = Memory.DEVICE,
    state: Memory = Memory.DEVICE,
    update: Memory = Memory.DEVICE,
    order: UpdateOrder = UpdateOrder.FIFO,
    schedule: Schedule = Schedule.LAYERED,
    lanes: int = 1,
) -> Plan:
    """One stage, a layer a segment."""
    count = len(chain(SHAPE).layers)
    stage = Stage(
        devices=tuple(f"fast/{i}" for i in range(lanes)),
        layers=(0, count),
        lanes=lanes,
        segments=(1,) * count,
        params=(params,) * count,
        waits=(waits,) * count,
        residuals=(residuals,) * count,
    )
    replica = Replica(stages=(stage,), microbatches=4, microbatch_size=2, samples=BATCH)
    share = StateShare(groups=("*",), shares={}, memory=state, update=update)
    return Plan(
        replicas=(replica,),
        batch_size=BATCH,
        schedule=schedule,
        state=(share,),
        order=order,
    )


PLANS: dict[str, dict[str, Any]] = {
    "state and parameters": {"params": Params.STREAMED, "state": Memory.HOST},
    "state by need": {"state": Memory.HOST, "order": UpdateOrder.PRIORITY},
    "state on lanes": {"state": Memory.HOST, "lanes": 2},
    "updated there": {"state": Memory.HOST, "update": Memory.HOST},
    "updated there by need": {
        "state": Memory.HOST,
        "update": Memory.HOST,
        "order": UpdateOrder.PRIORITY,
    },
    "parameters": {"params": Params.STREAMED},
    "borders": {"waits": Memory.HOST},
    "residuals": {"residuals": Memory.HOST, "schedule": Schedule.GPIPE},
    "all": {
        "params": Params.STREAMED,
        "state": Memory.HOST,
        "waits": Memory.HOST,
        "residuals": Memory.HOST,
    },
}
FIRST = "state and parameters"


@pytest.mark.parametrize(
    "name",
    [FIRST, *(pytest.param(x, marks=pytest.mark.laws) for x in PLANS if x != FIRST)],
)
def test_pinned_memory_is_what_was_promised(name: str, monkeypatch: Any):
    monkeypatch.setattr(tracing, "trace_model", _shared_trace)
    made = dataclasses.replace(plan(**PLANS[name]), chunk=1500)
    job = dataclasses.replace(experiment(SHAPE, False), batch_size=BATCH)
    engine = Engine(job, made, chain(SHAPE), cluster(), assign(cluster()))
    engine.init()
    ledger = Ledger(engine._executor)
    for step in range(2):
        engine.step(tokens(BATCH, step), step).fetch()
    engine.wait()
    held: Any = ledger.peak_bytes
    peak = sum(size for (_, kind), size in held.items() if kind == PINNED_HOST)
    memory = plan_memory(made, chain(SHAPE), cluster(), moments=MOMENTS)
    promised = host_bytes(memory, cluster())["fast"]
    least = 0.94
    if made.state[0].update is Memory.HOST:  # a slower host had more gradients wait
        least = 0.65
    assert least * promised <= peak <= promised
