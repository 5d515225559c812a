"""Layered accumulation holds as much on the device however many microbatches.

By the executor's byte ledger: parameters, state, gradients, borders and residuals; what
lives inside one program is the same for every microbatch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
from hexijax.runtime import tracing
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from hexijax.runtime.ledger import Ledger
from tests.laws.cases import _shared_trace, chain, cluster, experiment
from tests.laws.law_models import Shape, tokens

SHAPE = Shape(api="linen", tied=False)

Peaks = Mapping[tuple[str, str], int]
"""Bytes by device and kind of memory."""


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


def pipeline(microbatches: int, devices: Sequence[str]) -> Plan:
    """Stages of one layer or two, one after another on ``devices``."""
    count = len(chain(SHAPE).layers)
    bounds = [count * k // len(devices) for k in range(len(devices) + 1)]
    stages = tuple(
        Stage(
            devices=(device,),
            layers=(start, stop),
            segments=(1,) * (stop - start),
            remat=(Remat.FULL,) * (stop - start),
            waits=(Memory.HOST,) * (stop - start),
        )
        for device, start, stop in zip(devices, bounds, bounds[1:], strict=False)
    )
    made = plan(microbatches, Schedule.LAYERED, Memory.HOST)
    replica = dataclasses.replace(made.replicas[0], stages=stages)
    return dataclasses.replace(
        made, replicas=(replica,), state=(StateShare(groups=("*",), shares={}),)
    )


def peaks(made: Plan, monkeypatch: pytest.MonkeyPatch) -> Peaks:
    """Peak bytes in a step, by device and kind of memory."""
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    monkeypatch.setattr(tracing, "trace_model", _shared_trace)
    job = dataclasses.replace(experiment(SHAPE, False), batch_size=made.batch_size)
    devices = assign(cluster())
    engine = Engine(job, made, chain(SHAPE), cluster(), devices)
    engine.init()
    ledger = Ledger(engine._executor)
    engine.step(tokens(made.batch_size), 0).fetch()
    found: dict[tuple[jax.Device, str], Any] = ledger.peak_bytes
    names = {device: name for name, device in devices.items()}
    return {(names[device], kind): n for (device, kind), n in found.items()}


@pytest.mark.laws
def test_32_microbatches_take_the_device_memory_of_4(monkeypatch: pytest.MonkeyPatch):
    few, many = (
        peaks(plan(m, Schedule.LAYERED, Memory.HOST), monkeypatch) for m in (4, 32)
    )
    assert_flat(few, many, "fast/0", 7)


def assert_flat(few: Peaks, many: Peaks, device: str, more: int) -> None:
    """The device holds as much, and its host ``more`` times as much or more."""
    here, host = (device, "device"), (device, "pinned_host")
    assert many[here] == pytest.approx(few[here], rel=0.03)
    assert many[host] >= more * few[host] > 0


PIPELINES = {
    "two stages": (4, ["fast/0", "slow/0"]),
    "ministages of one device": (4, ["fast/0"] * 3),
    # Of fewer than six, an update finds time between backwards.
    "ministages of two": (6, ["fast/0", "slow/0"] * 2),
}
"""Few microbatches, and the devices of the stages."""


@pytest.mark.laws
@pytest.mark.parametrize("name", PIPELINES)
def test_so_do_32_that_go_from_stage_to_stage(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    number, devices = PIPELINES[name]
    few, many = (peaks(pipeline(m, devices), monkeypatch) for m in (number, 32))
    for device in set(devices):
        assert_flat(few, many, device, 4)


@pytest.mark.laws
def test_borders_that_wait_on_the_device_fill_it(monkeypatch: pytest.MonkeyPatch):
    few, many = (
        peaks(plan(m, Schedule.LAYERED, Memory.DEVICE), monkeypatch) for m in (4, 32)
    )
    here = ("fast/0", "device")
    assert many[here] > 1.1 * few[here]
    assert ("fast/0", "pinned_host") not in many
