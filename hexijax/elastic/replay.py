"""A run over machines that come and go, on a simulated clock.

    trace, costs -> replay (the run's own Members and Replans decide) -> Replayed

How much of the training that the same machines could have done is done. What a step,
a plan, a move take is given; when to plan again, what a loss takes along and which step
is still whole are decided as in a run. Whoever restarted for free would train at the
members' speed of every moment: that is the measure.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence

from hexijax.cluster import Cluster
from hexijax.elastic.members import Event, Members, What, lost
from hexijax.elastic.replans import Replans


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A node that goes or comes."""

    at_s: float
    """When."""

    node: str
    """Which."""

    here: bool
    """It comes; else it is lost, without a word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What everything takes."""

    step_s: Callable[[int], float]
    """A step on so many nodes."""

    state_bytes: float
    """Masters and moments of the model."""

    least_nodes: int = 1
    """The state fits in so many."""

    detect_s: float = 10.0
    """From a loss to its being known: the silence that counts as one."""

    plan_s: float = 10.0
    """For a plan that was not made ahead."""

    compile_s: float = 10.0
    """For its programs, from a cache."""

    start_s: float = 60.0
    """From nothing: processes, devices, the first compile."""

    copy_every: int = 1
    """Steps between two copies of a node's slices on its neighbour."""

    far_every: int = 100
    """Steps between two saves that no loss takes along."""

    local_bytes_per_s: float = 1e9
    """From a node to another."""

    far_bytes_per_s: float = 0.5e9
    """From the far tier, to all together."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What came of it."""

    steps: int
    """Done, and not lost again."""

    free_steps: float
    """What restarts for free would have done."""

    replans: int
    """Plans after the first."""

    again: int
    """Steps that were done again."""

    stopped: int
    """Times that too few nodes were left."""

    @property
    def kept(self) -> float:
        """Of the training that free restarts would have given."""
        return self.steps / self.free_steps if self.free_steps else 1.0


def replay(
    cluster: Cluster,
    trace: Iterable[Turn],
    costs: Costs,
    *,
    until_s: float,
    steps: int = 10**9,
    replans: Replans | None = None,
) -> Replayed:
    """Runs until the clock says so.

    Args:
      cluster: all nodes that the trace names; none is there at first.
      trace: in order of time.
      costs: what everything takes.
      until_s: when it ends.
      steps: of the run, for what pays.
      replans: how often it may plan again.
    """
    return _Replay(cluster, tuple(trace), costs, until_s, steps, replans).run()


class _Replay:
    def __init__(
        self,
        cluster: Cluster,
        trace: Sequence[Turn],
        costs: Costs,
        until_s: float,
        steps: int,
        replans: Replans | None,
    ):
        self._now_s = 0.0
        self._members = Members(cluster, (), clock=lambda: self._now_s)
        self._trace, self._at, self._costs = trace, 0, costs
        self._until_s, self._asked = until_s, steps
        self._replans = replans or Replans(most=10**9, most_in_vain=10**9)
        self._plan: tuple[str, ...] = ()
        self._broken = False
        """A node of the plan was lost."""
        self._done = self._again = self._stops = self._changes = 0
        self._copied, self._holders = 0, dict[str, str]()
        """The step that was copied last, and whose slices have a copy where."""
        self._gone: set[str] = set()
        """Nodes lost since."""
        self._free_steps = 0.0

    def run(self) -> Replayed:
        self._to(0.0)
        while self._now_s < self._until_s:
            events = self._members.take()
            if len(self._members.staying) < self._costs.least_nodes:
                self._wait()
            elif self._broken or not self._plan or self._pays(events):
                self._change(events)
            else:
                self._step()
        return Replayed(
            steps=self._done,
            free_steps=self._free_steps,
            replans=self._changes,
            again=self._again,
            stopped=self._stops,
        )

    # Time.

    def _to(self, until_s: float) -> None:
        """Lets time pass; what the trace has until then happens."""
        until_s = min(until_s, self._until_s)
        while True:
            ends = self._at == len(self._trace)
            next_s = until_s if ends else min(self._trace[self._at].at_s, until_s)
            here = len(self._members.staying)
            if here >= self._costs.least_nodes:
                passed_s = max(0.0, next_s - self._now_s)
                self._free_steps += passed_s / self._costs.step_s(here)
            self._now_s = max(self._now_s, next_s)
            if ends or self._trace[self._at].at_s > until_s:
                return
            turn = self._trace[self._at]
            self._at += 1
            (self._members.join if turn.here else self._members.lose)(turn.node)
            if not turn.here:
                self._gone.add(turn.node)
                self._broken |= turn.node in self._plan

    # What a run does.

    def _step(self) -> None:
        self._to(self._now_s + self._costs.step_s(len(self._plan)))
        if self._broken or self._now_s >= self._until_s:
            return  # it never ended
        self._done += 1
        if self._done % self._costs.copy_every == 0:
            ring = self._plan
            self._copied, self._gone = self._done, set()
            self._holders = dict(zip(ring, (*ring[1:], ring[0]), strict=True))

    def _whole(self) -> bool:
        """Whether each node's copied slices are still with it, or with another."""
        return bool(self._holders) and not any(
            {node, copy} <= self._gone for node, copy in self._holders.items()
        )

    def _pays(self, events: Sequence[Event]) -> bool:
        if not any(event.what is What.JOINED for event in events):
            return False
        costs, here = self._costs, self._members.staying
        cost_s = costs.compile_s + costs.state_bytes / len(here) / (
            costs.local_bytes_per_s
        )
        return self._replans.pays(
            now_s=costs.step_s(len(self._plan)),
            then_s=costs.step_s(len(here)),
            cost_s=cost_s,
            steps_left=self._asked - self._done,
        )

    def _change(self, events: Sequence[Event]) -> None:
        costs, here = self._costs, self._members.staying
        first = not self._plan
        self._replans.begin(self._done)
        self._changes += not first
        spent_s = costs.start_s if first else costs.compile_s
        if first or len(lost(events)) > 1:  # what is likely is planned for ahead
            spent_s += costs.plan_s
        local_bytes = costs.state_bytes
        if self._broken or first:
            spent_s += costs.detect_s * (not first)
            if first or not self._whole():
                spent_s += costs.state_bytes / costs.far_bytes_per_s
                local_bytes = 0.0
                self._go_back(self._done - self._done % costs.far_every)
            else:
                self._go_back(self._copied)
        spent_s += local_bytes / len(here) / costs.local_bytes_per_s
        self._plan, self._broken = here, False
        self._to(self._now_s + spent_s)

    def _go_back(self, step: int) -> None:
        self._again += self._done - step
        self._done = step

    def _wait(self) -> None:
        """Too few are left: until the next comes; then from the far tier."""
        self._stops += bool(self._plan)
        self._plan, self._broken = (), False
        self._holders.clear()
        ends = self._at == len(self._trace)
        self._to(self._until_s if ends else self._trace[self._at].at_s)


def from_counts(
    counts: Sequence[int], gap_s: float, nodes: Sequence[str]
) -> list[Turn]:
    """The turns of a trace that counts machines at regular times: the last to come is
    the first to go."""
    turns: list[Turn] = []
    here = 0
    for tick, count in enumerate(counts):
        at_s = tick * gap_s
        count = min(count, len(nodes))
        turns += [Turn(at_s=at_s, node=n, here=True) for n in nodes[here:count]]
        turns += [Turn(at_s=at_s, node=n, here=False) for n in nodes[count:here]]
        here = count
    return turns


def drawn(
    nodes: Sequence[str],
    *,
    lost_per_hour: float,
    back_s: float,
    until_s: float,
    together: float = 0.3,
    seed: int = 0,
) -> list[Turn]:
    """A trace in which each node is lost at a rate, and replaced after a while.

    Args:
      nodes: all there at first.
      lost_per_hour: expected losses of a node that is there, as a part of one.
      back_s: mean time until its replacement, exponential.
      until_s: how long.
      together: chance that a loss takes another node along, and so on: clouds reclaim
        in bulk. The rate counts all of them.
      seed: of the draws.
    """
    rng = random.Random(seed)
    turns = [Turn(at_s=0.0, node=node, here=True) for node in nodes]
    back: list[tuple[float, str]] = []
    here, now_s = list(nodes), 0.0
    per_s = lost_per_hour * (1 - together) / 3600.0
    while True:
        next_s = now_s + rng.expovariate(per_s * len(here)) if here else until_s
        back.sort()
        if back and back[0][0] <= next_s:
            now_s, node = back.pop(0)
            here.append(node)
            turns.append(Turn(at_s=now_s, node=node, here=True))
            continue
        now_s = next_s
        if now_s >= until_s:
            return turns
        while here:
            node = here.pop(rng.randrange(len(here)))
            turns.append(Turn(at_s=now_s, node=node, here=False))
            back.append((now_s + rng.expovariate(1 / back_s), node))
            if rng.random() >= together:
                break
