"""Borders that wait in host memory: away when not needed, back one turn ahead."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.plan import Memory, Plan, Schedule
from hexijax.program.check import check
from hexijax.program.linearise import CHUNKS
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Kind,
    Prefetch,
    Program,
    Recv,
    WriteBack,
)
from hexijax.program.waiting import LEAVING, NEAR, held_back
from hexijax.simulator import predict
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_plan
from tests.simulator.test_simulator import cluster

RULES = StepRules()
CHAIN = make_chain(4)
CROSSING = (Kind.ACT, Kind.COT, Kind.WIRE)


def layered(microbatches: int) -> Program:
    """One stage of four segments whose borders wait."""
    return lower(plan(microbatches), CHAIN, rules=RULES)


def plan(microbatches: int, *, waits: bool = True) -> Plan:
    """The same as a plan."""
    stages = make_stages([4], segments=[[1, 1, 1, 1]], waits=waits)
    return make_plan((stages, microbatches), schedule=Schedule.LAYERED)


@pytest.mark.parametrize("microbatches", [4, 32])
def test_few_borders_are_on_the_device_however_many_microbatches(microbatches: int):
    live: set[Buffer] = set()
    most = 0
    for instr in layered(microbatches).body:
        live -= {r.buffer for r in instr.reads if r.dies}
        live |= {b for b in instr.writes if b.kind in (Kind.ACT, Kind.COT)}
        most = max(most, sum(b.memory is Memory.DEVICE for b in live))
    assert most <= 5
    report = check(layered(microbatches), plan(microbatches), CHAIN)
    assert report.live_slots == {"r0.s0 Act": 2, "r0.s0 Cot": 2}


@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("microbatches", [4, 32])
def test_so_are_few_of_those_that_other_stages_send(sets: int, microbatches: int):
    stages = make_stages([1, 1, 1, 1], num_sets=sets, waits=True)
    sent = make_plan((stages, microbatches), schedule=Schedule.LAYERED)
    program = lower(sent, CHAIN, rules=RULES)
    away = {i.buffer for i in program.body if isinstance(i, WriteBack)}
    assert away & received(program)
    live: set[Buffer] = set()
    for instr in program.body:
        live -= {r.buffer for r in instr.reads if r.dies}
        live |= {b for b in instr.writes if b.kind in CROSSING}
        assert sum(b.memory is Memory.DEVICE for b in live) <= 6


def received(program: Program) -> set[Buffer]:
    """What stages get from others."""
    return {i.writes[0] for i in program.body if isinstance(i, Recv)}


@given(seed=st.integers(0, 2**32))
def test_what_comes_back_is_used_by_the_next_instruction_but_one(seed: int):
    drawn, chain, rules = random_plan(seed, max_layers=12, max_microbatches=5)
    program = lower(drawn, chain, rules=rules)
    slots = check(program, drawn, chain).live_slots
    assert slots == {pool: n for pool, n in program.pools if n}
    most = {"Act": 2, "Cot": 2, "Res": 2, "State": CHUNKS, "Param": math.inf}
    assert all(1 <= n <= most[pool.split(" ")[1]] for pool, n in slots.items())
    devices = {place: stage.devices for place, stage in drawn.stages()}
    away: set[Buffer] = set()
    back: dict[Buffer, int] = {}
    for instr in program.body:
        copy = isinstance(instr, WriteBack | Prefetch)
        if copy and instr.buffer.kind in (Kind.PARAM, Kind.STATE):
            continue  # by passes, and for updates
        if isinstance(instr, WriteBack):
            assert instr.buffer not in away  # once is enough
            away.add(instr.buffer)
        elif isinstance(instr, Prefetch):
            back[instr.buffer] = 0
        elif isinstance(instr, Forward | Backward):
            for read in instr.reads:
                # Two where the one before is a backward that runs with its forward.
                assert back.pop(read.buffer, 1) in (1, 2)
            for buffer in back:
                if devices[buffer.place] == devices[instr.place]:
                    back[buffer] += 1


def test_a_forward_waits_until_all_but_one_s_residuals_have_left():
    stages = make_stages([1, 1, 1, 1])
    away = tuple(dataclasses.replace(s, residuals=(Memory.HOST,)) for s in stages)
    order = lower(make_plan((away, 8)), CHAIN, rules=RULES).body
    held = held_back(order, {})
    assert held
    for position, copy in held.items():
        forward = order[position]
        assert isinstance(forward, Forward)
        left = [
            i.writes[0]
            for i in order[:position]
            if isinstance(i, WriteBack) and i.buffer.place == forward.place
        ]
        assert left[-1 - LEAVING[Kind.RES]] == copy
    assert not held_back(lower(make_plan((stages, 8)), CHAIN, rules=RULES).body, {})


def test_a_border_used_again_soon_stays():
    assert NEAR == 2
    two = make_plan(
        (make_stages([2], segments=[[1, 1]], waits=True), 1), schedule=Schedule.LAYERED
    )
    assert lower(two, make_chain(2), rules=RULES).pools == ()


def test_the_simulator_counts_what_goes_to_the_host_and_back():
    machines = cluster(("a", 1))
    waiting = predict(plan(8), CHAIN, machines)
    there = waiting.link_bytes["a/0 host out"]
    # Activations go once and come back twice, for both directions; cotangents once.
    assert there > 0
    back = waiting.link_bytes["a/0 host in"]
    assert there < back <= 1.5 * there
    staying = predict(plan(8, waits=False), CHAIN, machines)
    assert "a/0 host out" not in staying.link_bytes
    assert waiting.step_s >= staying.step_s
