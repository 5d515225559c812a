"""Layered accumulation holds as much on the device however many microbatches.

By the executor's byte ledger: parameters, state, gradients, borders and residuals; what
lives inside one program is the same for every microbatch.
"""

import dataclasses
from typing import Any

import jax
import pytest

from hexijax.layers.chain import Remat
from hexijax.plan.plan import (
    Memory,
    Params,
    Place,
    Plan,
    Replica,
    Schedule,
    Stage,
    StateShare,
)
from hexijax.runtime import engine as engine_module
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from hexijax.runtime.ledger import Ledger
from tests.laws.cases import _shared_trace, chain, cluster, experiment
from tests.laws.law_models import Shape, tokens

SHAPE = Shape(api="linen", tied=False)


def plan(microbatches: int, schedule: Schedule, waits: Memory) -> Plan:
    """One device that computes; half of the state lives beside it."""
    count = len(chain(SHAPE).layers)
    stage = Stage(
        devices=("fast/0",),
        layers=(0, count),
        segments=(1,) * count,
        remat=(Remat.FULL,) * count,
        params=(Params.FREED,) * count,
        waits=(waits,) * count,
    )
    replica = Replica(
        stages=(stage,),
        microbatches=microbatches,
        microbatch_size=1,
        samples=microbatches,
    )
    shares = {Place("r0.s0"): 1.0, Place("slow/0"): 1.0}
    return Plan(
        replicas=(replica,),
        batch_size=microbatches,
        schedule=schedule,
        state=(StateShare(groups=("*",), shares=shares),),
    )


def peaks(made: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Peak bytes of the computing device in a step, by kind of memory."""
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    monkeypatch.setattr(engine_module, "trace_model", _shared_trace)
    job = dataclasses.replace(experiment(SHAPE, False), batch_size=made.batch_size)
    devices = assign(cluster())
    engine = Engine(job, made, chain(SHAPE), cluster(), devices)
    engine.init()
    ledger = Ledger(engine._executor)
    engine.step(tokens(made.batch_size), 0).fetch()
    found: dict[tuple[jax.Device, str], Any] = ledger.peak_bytes
    return {k: n for (device, k), n in found.items() if device == devices["fast/0"]}


def test_32_microbatches_take_the_device_memory_of_4(monkeypatch: pytest.MonkeyPatch):
    few, many = (
        peaks(plan(m, Schedule.LAYERED, Memory.HOST), monkeypatch) for m in (4, 32)
    )
    assert many["device"] == pytest.approx(few["device"], rel=0.03)
    assert many["pinned_host"] >= 7 * few["pinned_host"] > 0


@pytest.mark.laws
def test_borders_that_wait_on_the_device_fill_it(monkeypatch: pytest.MonkeyPatch):
    few, many = (
        peaks(plan(m, Schedule.LAYERED, Memory.DEVICE), monkeypatch) for m in (4, 32)
    )
    assert many["device"] > 1.1 * few["device"]
    assert many.get("pinned_host", 0) == 0
