"""Plays a Program against costs until its steps repeat.

    Program, Plan, Chain, Cluster -> simulate -> Timeline

Every task starts when the host has dispatched it, what it reads is there, and its
queues are free; queues serve in the order of dispatch. Steps follow each other as the
runtime dispatches them, so that a step's update overlaps the next step's first
forwards.
"""

from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.memory import MOMENTS
from hexijax.costs.rates import HOST_CALL_S
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.program.program import Program, Update
from hexijax.simulator.tasks import Task, What, name, tasks
from hexijax.simulator.timeline import Cause, Event, Timeline

MOST_STEPS = 64
"""Played before the last is taken as the steady state."""

SAME = 1e-9
"""Queues that advance by amounts which differ by less, relatively, repeat."""

HOST, QUEUE, STEP_BEFORE = -1, -2, -3
"""What a task may have waited for last, beside another task."""


def simulate(
    program: Program,
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    moments: int = MOMENTS,
    costs: PlanCosts | None = None,
) -> Timeline:
    """The steady state of a training Program.

    Args:
      program: ``lower(plan, chain, ...)``.
      plan: what is where.
      chain: the model.
      cluster: devices and links.
      moments: fp32 arrays of the optimizer for each parameter; ``costs`` has its own.
      costs: durations; None: those of the cluster's profiles.

    Raises:
      UserError: the Program evaluates, or holds instructions of host offload.
    """
    if not any(isinstance(i, Update) for i in program.body):
        raise UserError(
            "The Program has no Update: it evaluates, and its steps do not wait for "
            "each other. Simulate a training Program."
        )
    costs = costs or PlanCosts(plan, chain, cluster, moments)
    steps = Steps(tasks(program, plan, chain, cluster, costs))
    step_s = steps.play()
    for _ in range(MOST_STEPS):
        if steps.repeats(step_s):
            break
        step_s = steps.play()
    return steps.timeline(step_s, [d for _, s in plan.stages() for d in s.devices])


class Steps:
    """Queues and what has been played so far."""

    def __init__(self, work: Sequence[Task]) -> None:
        names = dict.fromkeys(q for t in work for q in (*t.queues, *t.behind))
        at = {queue: i for i, queue in enumerate(names)}
        islands = dict.fromkeys(h for t in work for h in t.hosts)
        hosts = {island: i for i, island in enumerate(islands)}
        self._work, self._at = work, at
        self._compiled = [
            (
                tuple(at[q] for q in t.queues),
                tuple(at[q] for q in t.behind),
                t.after,
                t.before,
                t.seconds,
                tuple(hosts[h] for h in t.hosts),
            )
            for t in work
        ]
        self._free_s = [0.0] * len(at)
        self._free_before_s = list(self._free_s)
        self._host_s = [0.0] * len(hosts)
        self._host_step_s = [
            HOST_CALL_S * sum(t.hosts.count(h) for t in work) for h in hosts
        ]
        self._hosts = hosts
        self._ends: list[float] = [0.0] * len(work)
        self._starts: list[float] = []
        self._bound: list[int] = []
        self._end_s = 0.0

    def play(self) -> float:
        """One more step; returns the time from the last one's end to its own."""
        free_s, host_s, before_ends = self._free_s, self._host_s, self._ends
        self._free_before_s = list(free_s)
        starts: list[float] = []
        ends: list[float] = []
        bound: list[int] = []
        for queues, behind, after, before, seconds, hosts in self._compiled:
            start, cause = 0.0, HOST
            for host in hosts:
                host_s[host] += HOST_CALL_S
                start = max(start, host_s[host])
            for task in after:
                if ends[task] > start:
                    start, cause = ends[task], task
            for task in before:
                if before_ends[task] > start:
                    start, cause = before_ends[task], STEP_BEFORE
            for queue in behind:
                if free_s[queue] > start:
                    start, cause = free_s[queue], QUEUE
            for queue in queues:
                if free_s[queue] > start:
                    start, cause = free_s[queue], QUEUE
            end = start + seconds
            for queue in queues:
                free_s[queue] = end
            starts.append(start)
            ends.append(end)
            bound.append(cause)
        self._starts, self._ends, self._bound = starts, ends, bound
        last_s, self._end_s = self._end_s, max(ends)
        return self._end_s - last_s

    def repeats(self, step_s: float) -> bool:
        """Whether every queue advanced by the whole step, and no host needs longer."""
        return all(
            abs(now_s - before_s - step_s) <= SAME * step_s
            for now_s, before_s in zip(self._free_s, self._free_before_s, strict=True)
            if now_s > before_s
        ) and all(host_s <= step_s * (1 + SAME) for host_s in self._host_step_s)

    def timeline(self, step_s: float, devices: Sequence[str]) -> Timeline:
        """The last step played."""
        first_s = min(
            start
            for start, task in zip(self._starts, self._work, strict=True)
            if task.seconds
        )
        busy: dict[str, dict[What, float]] = {d: {} for d in devices}
        idle: dict[str, dict[Cause, float]] = {d: {} for d in devices}
        moved: dict[str, int] = {}
        # A device's step runs from the end of its last work in the step before.
        free_s = {d: self._free_before_s[self._at[d]] for d in devices}
        events = []
        for i, task in enumerate(self._work):
            start_s, end_s = self._starts[i], self._ends[i]
            for queue in task.queues:
                if queue not in busy:
                    moved[queue] = moved.get(queue, 0) + task.num_bytes
                    continue
                free = free_s[queue]
                if start_s > free:
                    for cause, seconds in self._waits(i, free, start_s):
                        idle[queue][cause] = idle[queue].get(cause, 0.0) + seconds
                if end_s > free:
                    took_s = end_s - max(start_s, free)
                    busy[queue][task.what] = busy[queue].get(task.what, 0.0) + took_s
                    free_s[queue] = end_s
            if task.seconds:
                events.append(
                    Event(
                        start_s - first_s,
                        end_s - first_s,
                        task.what,
                        name(task.instruction),
                        task.queues,
                        task.num_bytes,
                    )
                )
        return Timeline(
            step_s=step_s,
            events=tuple(events),
            busy_s=busy,
            idle_s=idle,
            link_bytes=moved,
            host_s=dict(zip(self._hosts, self._host_step_s, strict=True)),
        )

    def _waits(
        self, i: int, free_s: float, start_s: float
    ) -> list[tuple[Cause, float]]:
        """Why a device stood still from ``free_s`` until task ``i`` began.

        The part in which a message was under way is the message's, what came before
        belongs to those who made it.
        """
        gap_s = start_s - free_s
        late = self._bound[i]
        if late == HOST:
            return [(Cause.DISPATCH, gap_s)]
        if late == STEP_BEFORE:  # its new parameters
            return [(Cause.SYNC, gap_s)]
        if late == QUEUE:  # devices that work together wait for the last of them
            return [(Cause.PIPELINE, gap_s)]
        task = self._work[late]
        if task.what not in (What.MOVE, What.SYNC, What.UPDATE):
            return [(Cause.PIPELINE, gap_s)]
        cause = Cause.MOVE if task.what is What.MOVE else Cause.SYNC
        moving_s = start_s - max(free_s, self._starts[late])
        parts = [(cause, moving_s), (Cause.PIPELINE, gap_s - moving_s)]
        return [(why, seconds) for why, seconds in parts if seconds > 0]
