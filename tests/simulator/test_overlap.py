"""Gathers and sums run beside compute, said by the simulator and seen in its trace."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hexijax.cluster import Cluster
from hexijax.costs import PlanCosts
from hexijax.layers.chain import Remat
from hexijax.layers.known import gpt
from hexijax.plan.plan import Params, Plan, Replica, Schedule, Stage
from hexijax.program import names
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Gather, Program, Reduce
from hexijax.simulator import Cause, Timeline, simulate
from hexijax.simulator.trace import write_trace
from hexijax.simulator.uses import What

H100S = Cluster.from_toml("experiments/clusters/h100_x4.toml")
CHAIN = gpt(depth=12, width=2048, num_heads=16, length=1024)
LAYERS = len(CHAIN.layers)
COMPUTE = (What.FORWARD, What.BACKWARD, What.BOTH)


@pytest.fixture(autouse=True)
def quick_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is always ahead."""
    monkeypatch.setattr("hexijax.simulator.steps.HOST_CALL_S", 0.0)


def stage(devices: tuple[str, ...], layers: tuple[int, int], *, freed: bool) -> Stage:
    """Two layers a segment."""
    count = layers[1] - layers[0]
    segments = (2,) * (count // 2) + (1,) * (count % 2)
    return Stage(
        devices=devices,
        layers=layers,
        segments=segments,
        dtype="bfloat16",
        remat=(Remat.FULL,) * count,
        params=(Params.FREED,) * len(segments) if freed else (),
    )


def made(*replicas: tuple[Stage, ...], schedule: Schedule) -> tuple[Program, Timeline]:
    """Four microbatches of 32 sequences a replica, played."""
    plan = Plan(
        replicas=tuple(
            Replica(stages=stages, microbatches=4, microbatch_size=32, samples=128)
            for stages in replicas
        ),
        batch_size=128 * len(replicas),
        schedule=schedule,
    )
    costs = PlanCosts(plan, CHAIN, H100S)
    program = lower(plan, CHAIN, rules=StepRules(), costs=costs)
    return program, simulate(program, plan, CHAIN, H100S, costs=costs)


def cards(*, freed: bool, schedule: Schedule) -> tuple[Program, Timeline]:
    """A replica of one stage on each card."""
    whole = (0, LAYERS)
    each = [(stage((f"h100/{i}",), whole, freed=freed),) for i in range(4)]
    return made(*each, schedule=schedule)


def computing(timeline: Timeline, device: str) -> list[tuple[float, float]]:
    """When a device computes."""
    return sorted(
        (e.start_s, e.end_s)
        for e in timeline.events
        if device in e.devices and e.what in COMPUTE
    )


def copies(
    timeline: Timeline, device: str, kind: type
) -> Iterator[tuple[float, float]]:
    """When what some instructions send comes to a device, or leaves it."""
    for event in timeline.events:
        ways = {way.rsplit(" ", 1)[0] for way in event.load.ways}
        if isinstance(event.instruction, kind) and not event.devices and device in ways:
            yield event.start_s, event.end_s


def hidden(timeline: Timeline, device: str, kind: type) -> float:
    """Part of the seconds of such copies in which the device computes."""
    work = computing(timeline, device)
    found = list(copies(timeline, device, kind))
    beside_s = sum(
        max(0.0, min(end_s, stop_s) - max(start_s, begin_s))
        for start_s, end_s in found
        for begin_s, stop_s in work
    )
    return beside_s / sum(end_s - start_s for start_s, end_s in found)


def stands_still_s(timeline: Timeline, device: str) -> float:
    """From its first computation to its last, with no program on the device."""
    work = computing(timeline, device)
    busy = sorted(
        (e.start_s, e.end_s)
        for e in timeline.events
        if device in e.devices and work[0][0] <= e.start_s <= work[-1][0]
    )
    idle_s, now_s = 0.0, work[0][0]
    for start_s, end_s in busy:
        idle_s += max(0.0, start_s - now_s)
        now_s = max(now_s, end_s)
    return idle_s


@pytest.mark.parametrize("schedule", [Schedule.LAYERED, Schedule.ONE_F_ONE_B])
def test_the_next_pass_s_parameters_travel_beside_this_one(schedule: Schedule):
    _, timeline = cards(freed=True, schedule=schedule)
    for i in range(4):
        assert hidden(timeline, f"h100/{i}", Gather) > 0.4
        assert stands_still_s(timeline, f"h100/{i}") < 0.01 * timeline.step_s


@pytest.mark.parametrize("schedule", [Schedule.LAYERED, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("freed", [False, True])
def test_sums_leave_before_the_last_backward_and_hardly_anybody_waits(
    schedule: Schedule, freed: bool
):
    _, timeline = cards(freed=freed, schedule=schedule)
    for i in range(4):
        device = f"h100/{i}"
        ends_s = [end_s for _, end_s in computing(timeline, device)]
        found = sorted(copies(timeline, device, Reduce))
        early = [start_s for start_s, _ in found if start_s < max(ends_s)]
        assert len(early) > len(found) / 2  # all but the last segment's
        assert stands_still_s(timeline, device) < 0.01 * timeline.step_s


def test_a_pipeline_waits_for_its_bubble_and_hardly_for_parameters():
    middle = LAYERS // 2
    each = [
        (
            stage((f"h100/{2 * r}",), (0, middle), freed=True),
            stage((f"h100/{2 * r + 1}",), (middle, LAYERS), freed=True),
        )
        for r in range(2)
    ]
    _, timeline = made(*each, schedule=Schedule.ONE_F_ONE_B)
    for device in ("h100/0", "h100/1", "h100/2", "h100/3"):
        idle = timeline.idle_s[device]
        assert idle.get(Cause.SYNC, 0.0) < 0.02 * timeline.step_s
        assert hidden(timeline, device, Gather) > 0.3


def test_a_trace_has_rows_for_what_is_gathered_and_summed(tmp_path: Path):
    program, timeline = cards(freed=True, schedule=Schedule.LAYERED)
    write_trace(tmp_path / "trace.json", timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [(rows[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
    for kind in (Gather, Reduce):
        wanted = {
            f"{kind.__name__} {i.group}" for i in program.body if isinstance(i, kind)
        }
        for way in ("h100/0 in", "h100/3 out"):
            assert {name for row, name in spans if row == way} >= wanted
    gathers = [i for i in program.body if isinstance(i, Gather)]
    assert all(names.is_freed(i.writes[0]) for i in gathers)
