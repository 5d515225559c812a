"""The simulator against sums by hand, and what holds of every plan."""

import dataclasses
import itertools
import json
import math
import random as random_module
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node
from hexijax.costs import PlanCosts
from hexijax.costs.borders import Border
from hexijax.costs.exchange import Call, Exchange
from hexijax.costs.rates import HOST_CALL_S
from hexijax.costs.ways import NO_LOAD, Load
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan, Schedule
from hexijax.program.boxes import users
from hexijax.program.lower import StepRules, lower
from hexijax.program.program import Backward, Forward, Free, Instruction, Part
from hexijax.simulator import Cause, Timeline, simulate
from hexijax.simulator.steps import MOST_GAPS, Steps, Ways
from hexijax.simulator.tasks import IN_FLIGHT, LOOKED, tasks
from hexijax.simulator.trace import write_trace
from hexijax.simulator.uses import Task, Use, What
from tests.plan.examples import make_kind
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_plan


def cluster(*nodes: tuple[str, int], gb_per_s: float = 1.0) -> Cluster:
    """Nodes of (name, devices) of one kind."""
    return Cluster(
        name="toy",
        nodes=tuple(
            Node(
                name=name,
                devices=(DeviceGroup(kind="fast", count=count),),
                host_memory_bytes=2**36,
                host_cores=8,
            )
            for name, count in nodes
        ),
        links=Links(
            in_node=LinkProfile(latency_s=0.0, bytes_per_s=100e9),
            between_nodes=LinkProfile(latency_s=0.0, bytes_per_s=gb_per_s * 1e9),
        ),
        profiles=(make_kind("fast"),),
    )


class Unit(PlanCosts):
    """A layer takes 1 s forward and 2 s backward; nothing else takes time."""

    def duration_s(self, instruction: Instruction) -> float:
        """Of segments by their layers."""
        if not isinstance(instruction, Forward | Backward):
            return 0.0
        stage = self._stages[instruction.place]
        passes = 1 if isinstance(instruction, Forward) else 2
        if isinstance(instruction, Backward) and instruction.part is not Part.BOTH:
            passes = 1
        return float(passes * stage.segments[instruction.segment])

    def message(self, instruction: object) -> Border:
        """No time."""
        return Border(load=NO_LOAD, split_s=0.0, merge_s=0.0)

    def collective(self, group: str) -> None:
        """All by pieces."""

    def _exchange(self, name: str) -> Exchange:
        """No time."""
        return FreeExchange(
            self.groups[name],
            {},
            users(self._plan, self.groups[name]),
            {p: self._site(p) for p in self._stages},
            self._ways,
        )


class FreeExchange(Exchange):
    """Sums and new parameters that take no time."""

    def partial(self, member: object) -> Call:
        """No time."""
        return Call(0.0)

    def leave(self, member: object, path: int = 0) -> Load:
        """No copies."""
        return NO_LOAD

    arrive = spread_out = spread_in = leave

    def add(self, home: object, path: int = 0) -> Call:
        """No time."""
        return Call(0.0)

    def join(self, user: object, path: int = 0) -> None:
        """No program."""


@pytest.fixture
def free_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call costs the host or the device anything."""
    monkeypatch.setattr("hexijax.simulator.steps.HOST_CALL_S", 0.0)
    monkeypatch.setattr("hexijax.simulator.tasks.CALL_S", 0.0)


def played(
    plan: Plan, chain: Chain, machines: Cluster, rules: StepRules | None = None
) -> Timeline:
    """A plan's Program under unit costs."""
    costs = Unit(plan, chain, machines)
    program = lower(plan, chain, rules=rules or StepRules(), costs=costs)
    return simulate(program, plan, chain, machines, costs=costs)


@pytest.mark.usefixtures("free_calls")
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 4), (4, 9)])
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.EAGER])
def test_equal_stages_take_the_ideal_1f1b_step(
    stages: int, microbatches: int, schedule: Schedule
):
    chain = make_chain(stages)
    plan = make_plan((make_stages([1] * stages), microbatches), schedule=schedule)
    timeline = played(plan, chain, cluster(("a", 4)))
    assert timeline.step_s == pytest.approx(3 * (microbatches + stages - 1))
    for device in timeline.busy_s:
        assert timeline.utilisation(device) == pytest.approx(
            microbatches / (microbatches + stages - 1)
        )
    if stages > 1:
        idle = timeline.idle_s["a/0"]
        assert idle[Cause.PIPELINE] == pytest.approx(3 * (stages - 1))


@pytest.mark.usefixtures("free_calls")
def test_interleaving_shortens_the_bubble():
    chain = make_chain(4)
    plain = make_plan((make_stages([2, 2]), 4))
    rounds = make_plan(
        (make_stages([1, 1, 1, 1], num_sets=2), 4), schedule=Schedule.INTERLEAVED
    )
    machines = cluster(("a", 2))
    assert played(plain, chain, machines).step_s == pytest.approx(6 * 5)
    assert played(rounds, chain, machines).step_s == pytest.approx(6 * 4 + 3)


def priced(plan: Plan, chain: Chain, machines: Cluster) -> Timeline:
    """A plan's Program under the cluster's own costs."""
    costs = PlanCosts(plan, chain, machines)
    program = lower(plan, chain, rules=StepRules(), costs=costs)
    return simulate(program, plan, chain, machines, costs=costs)


@settings(max_examples=40)
@given(st.integers(0, 10_000))
@example(5)
@example(34)
@example(391)
def test_every_device_works_or_has_a_reason(seed: int):
    plan, chain, rules = random_plan(seed, max_layers=12, max_microbatches=5)
    machines = cluster(("a", 64), ("b", 64), ("c", 64), ("store", 1))
    costs = PlanCosts(plan, chain, machines)
    program = lower(plan, chain, rules=rules, costs=costs)
    timeline = simulate(program, plan, chain, machines, costs=costs)
    by_queue: dict[str, list[tuple[float, float]]] = {}
    for event in timeline.events:
        assert event.end_s > event.start_s
        for queue, start_s, end_s, _ in event.queues:
            by_queue.setdefault(queue, []).append((start_s, end_s))
    for spans in by_queue.values():
        for (_, end_s), (start_s, _) in itertools.pairwise(sorted(spans)):
            assert start_s >= end_s - 1e-12
    for device, busy in timeline.busy_s.items():
        idle = timeline.idle_s[device]
        assert min(idle.values(), default=0.0) >= 0
        total = sum(busy.values()) + sum(idle.values())
        assert total == pytest.approx(timeline.step_s, rel=1e-6), (device, busy, idle)
    assert max(timeline.host_s.values()) <= timeline.step_s * (1 + 1e-9)


def test_all_devices_of_a_node_share_its_way_out():
    chain = make_chain(2, sizes=[2048, 2048])
    replicas = [(make_stages([2], prefix=prefix), 1) for prefix in "ab"]
    plan = make_plan(*replicas)
    machines = cluster(("a", 4), ("b", 4), gb_per_s=0.001)
    timeline = priced(plan, chain, machines)
    grads = chain.num_params * 4
    assert timeline.link_bytes["a out"] == timeline.link_bytes["b in"]
    # Half of the gradients go each way, then half of the new parameters.
    assert timeline.link_bytes["a out"] == pytest.approx(grads, rel=0.01)
    # Both ways carry at once: half of the gradients, then half of the parameters.
    assert timeline.step_s == pytest.approx(grads / 1e6, rel=0.01)
    for device in ("a/0", "b/0"):
        assert timeline.idle_s[device][Cause.SYNC] > 0.9 * timeline.step_s


def test_a_host_that_dispatches_too_slowly_is_the_reason():
    chain = make_chain(8)
    plan = make_plan((make_stages([8], segments=[[1] * 8]), 8))
    timeline = priced(plan, chain, cluster(("a", 1)))
    assert timeline.step_s == pytest.approx(timeline.host_s["a"], rel=0.01)
    assert timeline.idle_s["a/0"][Cause.DISPATCH] > 0.8 * timeline.step_s


def test_a_program_that_only_evaluates_is_refused():
    chain, plan = make_chain(2), make_plan((make_stages([2]), 1))
    program = lower(plan, chain, rules=StepRules(), evaluation=True)
    with pytest.raises(UserError, match="The Program has no Update: it evaluates"):
        simulate(program, plan, chain, cluster(("a", 1)))


@pytest.mark.usefixtures("free_calls")
def test_slower_work_never_shortens_the_step():
    chain = make_chain(6)
    plan = make_plan((make_stages([3, 3]), 4), (make_stages([6], prefix="b"), 2))
    machines = cluster(("a", 2), ("b", 1))
    step_s = played(plan, chain, machines).step_s
    longer = dataclasses.replace(
        plan,
        replicas=(
            dataclasses.replace(
                plan.replicas[0], microbatches=5, samples=plan.replicas[0].samples + 1
            ),
            plan.replicas[1],
        ),
        batch_size=plan.batch_size + 1,
    )
    assert played(longer, chain, machines).step_s > step_s


def test_a_trace_has_every_event(tmp_path: Path):
    chain = make_chain(4)
    plan = make_plan((make_stages([2, 2]), 3))
    timeline = priced(plan, chain, cluster(("a", 2)))
    write_trace(tmp_path / "trace.json", timeline)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len([*event.queues]) for event in timeline.events)
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"a/0", "a/1", "a/0 out", "a/1 in"} <= tracks
    forwards = [e for e in spans if e["cat"] == What.FORWARD]
    assert forwards[0]["dur"] > 0


WAYS_HELD = [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]]


def test_a_way_carries_what_is_ready_first():
    free_s = [0.0, 0.0]
    ways = Ways(free_s)
    assert ways.take(5.0, ((0, 2.0), (1, 2.0)))[0] == 5.0
    assert ways.take(1.0, ((1, 2.0),))[0] == 1.0  # dispatched later, ready earlier
    assert ways.take(2.0, ((1, 2.0),))[0] == 3.0  # behind the one before
    assert ways.take(2.0, ((1, 1.0),))[0] == 7.0  # no gap is long enough
    assert free_s == [7.0, 8.0]


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 9), st.sampled_from(WAYS_HELD)),
        max_size=300,
    )
)
def test_no_way_carries_two_copies_at_once(wanted: list[tuple[int, int, list[int]]]):
    """Copies start when ready or later, and a way's never overlap, however many gaps
    were forgotten."""
    ways = Ways([0.0] * 3)
    carried: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: []}
    for ready, seconds, held in wanted:
        at, late = ways.take(float(ready), tuple((way, float(seconds)) for way in held))
        assert at >= ready
        assert late in held
        for way in held:
            carried[way].append((at, at + seconds))
    for spans in carried.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_copy_takes_the_first_gap_that_holds_it():
    """As one that looks at all of them would."""
    random = random_module.Random(1)
    ways, gaps = Ways([0.0]), [(0.0, math.inf)]
    for number in range(60):
        ready, seconds = float(random.randrange(900)), float(random.randrange(1, 40))
        begin, end = next(g for g in gaps if max(g[0], ready) + seconds <= g[1])
        start = max(begin, ready)
        gaps.remove((begin, end))
        gaps = sorted([*gaps, (begin, start), (start + seconds, end)])
        gaps = [(a, b) for a, b in gaps if a < b]
        if len(gaps) > MOST_GAPS:
            break
        assert ways.take(ready, ((0, seconds),))[0] == start, number
    assert number > MOST_GAPS // 2


def test_steps_that_take_turns_count_as_their_mean():
    """Each of two tasks waits for the other's step before: 5 s and 11 s in turn."""
    steps = Steps(
        [
            Task(Use(What.SYNC, 1.0, ("a/0",)), Free(), before=[(1, 10.0)]),
            Task(Use(What.SYNC, 1.0, ("b/0",)), Free(), before=[(0, 4.0)]),
        ]
    )
    assert steps.until_they_repeat() == 8.0
    assert {steps.play(), steps.play()} == {5.0, 11.0}


def test_a_device_has_no_more_than_32_calls_before_it():
    chain, machines = make_chain(12), cluster(("a", 2))
    plan = make_plan((make_stages([6, 6], segments=[[1] * 6] * 2), 8))
    costs = PlanCosts(plan, chain, machines)
    program = lower(plan, chain, rules=StepRules(), costs=costs)
    work = tasks(program, costs, machines)
    for device in ("a/0", "a/1"):
        calls = [
            at
            for at, task in enumerate(work)
            if task.use.hosts and device in task.use.devices
        ]
        assert len(calls) > 2 * IN_FLIGHT
        waiting = {
            number: calls.index(task)
            for number, at in enumerate(calls)
            for task in work[at].held
        }
        assert waiting == {
            number: number - IN_FLIGHT
            for number in range(IN_FLIGHT, len(calls), LOOKED)
        }


def test_what_stands_behind_those_is_dispatched_while_the_device_waits(
    monkeypatch: pytest.MonkeyPatch,
):
    """Forty buckets after one long program, and one bucket."""
    chain, machines = make_chain(40), cluster(("a", 2))
    one, other = (
        tuple(dataclasses.replace(s, devices=(f"a/{i}",)) for s in make_stages([40]))
        for i in range(2)
    )
    plan = make_plan((one, 1), (other, 1))
    together = played(plan, chain, machines)
    monkeypatch.setattr("hexijax.program.buckets.SHARED_SIZE", 1)
    monkeypatch.setattr("hexijax.program.buckets.SHARED_COUNT", 10**9)
    apart = played(plan, chain, machines)
    monkeypatch.setattr("hexijax.simulator.tasks.IN_FLIGHT", 10**9)
    ahead = played(plan, chain, machines)
    # From when the first device is full: the other has as many calls, or fewer.
    calls = round(apart.host_s["a"] / HOST_CALL_S)
    least, most = calls - 2 * (IN_FLIGHT + LOOKED), calls - IN_FLIGHT
    assert 0 < least <= (apart.step_s - ahead.step_s) / HOST_CALL_S <= most
    assert ahead.step_s == pytest.approx(together.step_s, rel=1e-3)
