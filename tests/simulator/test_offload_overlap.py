"""What rests in host memory travels beside compute, both ways, and across steps."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from hexijax.cluster import Cluster
from hexijax.costs import PlanCosts
from hexijax.layers.chain import Remat
from hexijax.layers.known import gpt
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
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Backward, Forward, Prefetch, Update, WriteBack
from hexijax.simulator import Timeline, simulate
from hexijax.simulator.uses import What

H100S = Cluster.from_toml("experiments/clusters/h100_x4.toml")
CHAIN = gpt(depth=12, width=4096, num_heads=32, length=1024)
LAYERS = len(CHAIN.layers)
CARD = "h100/0"
FRONT = 3
"""Layers whose state stays: the next step needs their parameters first."""

COMPUTE = (What.FORWARD, What.BACKWARD, What.BOTH)

Spans = Sequence[tuple[float, float]]


@pytest.fixture(autouse=True)
def quick_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is always ahead."""
    monkeypatch.setattr("hexijax.simulator.steps.HOST_CALL_S", 0.0)


def played(
    *,
    update: Memory = Memory.DEVICE,
    order: UpdateOrder = UpdateOrder.PRIORITY,
    params: Params = Params.KEPT,
    samples: int = 8,
    microbatches: int = 4,
    front: int = FRONT,
) -> Timeline:
    """One card, a layer at a time; state rests on the host, but for the ``front``."""
    stage = Stage(
        devices=(CARD,),
        layers=(0, LAYERS),
        segments=(1,) * LAYERS,
        dtype="bfloat16",
        remat=(Remat.FULL,) * LAYERS,
        params=(params,) * LAYERS,
    )
    replica = Replica(
        stages=(stage,),
        microbatches=microbatches,
        microbatch_size=samples,
        samples=microbatches * samples,
    )
    share = StateShare(groups=("*",), shares={}, memory=Memory.HOST, update=update)
    early = [name for layer in CHAIN.layers[:front] for name in layer.groups]
    first = StateShare(groups=tuple(early), shares={})
    plan = Plan(
        replicas=(replica,),
        batch_size=microbatches * samples,
        schedule=Schedule.LAYERED,
        state=(share, first) if early else (share,),
        order=order,
    )
    costs = PlanCosts(plan, CHAIN, H100S)
    program = lower(plan, CHAIN, rules=StepRules(), costs=costs)
    return simulate(program, plan, CHAIN, H100S, costs=costs)


def computing(timeline: Timeline) -> Spans:
    """When the card computes a pass."""
    return [(e.start_s, e.end_s) for e in timeline.events if e.what in COMPUTE]


def on_way(timeline: Timeline, way: str) -> Spans:
    """When a way carries something."""
    return [(e.start_s, e.end_s) for e in timeline.events if way in e.load.ways]


def at_once_s(*kinds: Spans) -> float:
    """Seconds in which something of each kind is at work."""
    marks = sorted({time for spans in kinds for span in spans for time in span})
    return sum(
        stop - start
        for start, stop in pairwise(marks)
        if all(any(a <= start and stop <= b for a, b in spans) for spans in kinds)
    )


def ends(timeline: Timeline, kind: type, group: str) -> float:
    """When the last of a bucket's instructions ends, from the step's begin."""
    return max(
        e.end_s
        for e in timeline.events
        if isinstance(e.instruction, kind) and e.instruction.group == group
    )


@pytest.mark.parametrize("update", list(Memory))
def test_the_first_block_starts_before_the_last_is_updated(update: Memory):
    timeline = played(update=update, front=0)
    first = min(
        e.start_s
        for e in timeline.events
        if isinstance(e.instruction, Forward) and e.instruction.segment == 1
    )
    updates = [e for e in timeline.events if isinstance(e.instruction, Update)]
    last = max(e.start_s for e in updates if e.instruction.group == "blocks/11")
    backward = min(
        e.start_s for e in timeline.events if isinstance(e.instruction, Backward)
    )
    assert first < last
    assert last < backward + timeline.step_s


def test_compute_copies_in_and_copies_out_are_busy_at_once():
    timeline = played()
    work = computing(timeline)
    into, out = (on_way(timeline, f"{CARD} host {end}") for end in ("in", "out"))
    assert at_once_s(work, into, out) > 0.3 * sum(b - a for a, b in out)


def test_so_are_compute_copies_and_the_host_s_cores():
    timeline = played(update=Memory.HOST)
    cores = on_way(timeline, "h100 cpu")
    assert at_once_s(computing(timeline), cores) > 0.2 * timeline.step_s


def test_needed_first_is_faster_than_in_the_order_of_gradients():
    fifo, priority = (
        played(order=order, microbatches=2).step_s for order in UpdateOrder
    )
    assert priority < 0.96 * fifo


def test_where_compute_takes_longest_nothing_waits_for_the_host():
    timeline = played()
    busy_s = sum(timeline.busy_s[CARD].values())
    assert timeline.step_s < 1.01 * busy_s
    assert timeline.link_bytes[f"{CARD} host in"] > 20 * 10**9


def test_passes_over_freed_parameters_bring_their_masters():
    timeline = played(params=Params.FREED, front=0)
    size = sum(group.size for group in CHAIN.groups)
    last = len(CHAIN.layers) - 1  # its forward and its backward are one pass
    passes = sum(
        CHAIN.group(name).size * (1 if i == last else 2)
        for i, layer in enumerate(CHAIN.layers)
        for name in layer.groups
    )
    state = sum(
        e.load.num_bytes[0]
        for e in timeline.events
        if isinstance(e.instruction, Prefetch)
    )
    came = timeline.link_bytes[f"{CARD} host in"]
    assert state == 12 * size
    assert came - state == pytest.approx(4 * passes, rel=0.01)
    left = sum(
        e.load.num_bytes[0]
        for e in timeline.events
        if isinstance(e.instruction, WriteBack)
    )
    assert left == timeline.link_bytes[f"{CARD} host out"] == 12 * size
