"""What a played step says: what each device does, why it waits, what each way carries.

Steps, step_s, devices -> account -> Timeline
"""

from collections.abc import Mapping, Sequence

from hexijax.costs.rates import HOST_CALL_S
from hexijax.plan.plan import Place
from hexijax.program.program import Backward, Forward, Recv, Send
from hexijax.simulator.steps import HOST, QUEUE, STEP_BEFORE, Steps
from hexijax.simulator.timeline import Cause, Event, Timeline
from hexijax.simulator.uses import Task, What


def account(
    steps: Steps,
    step_s: float,
    devices: Sequence[str],
    *,
    times: Mapping[Place, float] | None = None,
    events: bool = True,
) -> Timeline:
    """The last step played; a device's runs from the end of its last work before.

    Args:
      steps: as played.
      step_s: from one step's end to the next.
      devices: whose time is accounted for.
      times: by stage, how many microbatches one that was played stands for.
      events: keep them.
    """
    times = times or {}
    queues = steps.queues
    alike: dict[int, list[str]] = {}
    for device in devices:
        alike.setdefault(queues.of_device[device], []).append(device)
    books = {queue: _Book(steps.free_before_s[queue]) for queue in alike}
    moved: dict[str, int] = {}
    host_s = dict(steps.host_step_s)
    for i, task in enumerate(steps.work):
        more = _more(task, times)
        for queue in queues.of_set[task.use.devices]:
            books[queue].add(steps, i, more)
        for way, num_bytes in zip(
            task.use.load.ways, task.use.load.num_bytes, strict=True
        ):
            moved[way] = moved.get(way, 0) + round(num_bytes * (1 + more))
        if more:
            for host, calls in task.use.hosts:
                host_s[host] += more * calls * HOST_CALL_S
    for book in books.values():
        book.close()
    return Timeline(
        step_s=step_s,
        events=_events(steps) if events else (),
        busy_s={d: books[queues.of_device[d]].busy_s for d in devices},
        idle_s={d: books[queues.of_device[d]].idle_s for d in devices},
        link_bytes=moved,
        host_s=host_s,
    )


def _more(task: Task, times: Mapping[Place, float]) -> float:
    """How many further tasks of the step one that was played stands for."""
    i = task.instruction
    if not times or task.use.what is What.SKIP:
        return 0.0
    if isinstance(i, Forward | Backward):
        return times.get(i.place, 1.0) - 1
    if isinstance(i, Send | Recv):
        return times.get(i.source, 1.0) - 1
    return 0.0


class _Book:
    """One queue of devices."""

    def __init__(self, free_s: float) -> None:
        self._free_s = free_s
        self.busy_s: dict[What, float] = {}
        self.idle_s: dict[Cause, float] = {}
        self._skipped_s = 0.0

    def add(self, steps: Steps, i: int, more: float) -> None:
        """The next task, which stands for ``more`` beside itself."""
        start_s, end_s = steps.starts[i], steps.ends[i]
        free_s, what = self._free_s, steps.work[i].use.what
        if start_s > free_s:
            for cause, seconds in waits(steps, i, free_s):
                self.idle_s[cause] = self.idle_s.get(cause, 0.0) + seconds
        if what is What.SKIP:
            self._skipped_s += end_s - start_s
            self._free_s = end_s
        elif end_s > free_s:
            took_s = end_s - max(start_s, free_s)
            more_s = more * steps.work[i].use.seconds
            self._skipped_s -= more_s
            self.busy_s[what] = self.busy_s.get(what, 0.0) + took_s + more_s
            self._free_s = end_s

    def close(self) -> None:
        """What was skipped and is no work is waiting, as in a cycle that was played."""
        left_s = max(self._skipped_s, 0.0)
        if left_s:
            waited = {c: self.idle_s.get(c, 0.0) for c in (Cause.MOVE, Cause.PIPELINE)}
            total_s = sum(waited.values())
            for cause, seconds in waited.items():
                part = seconds / total_s if total_s else cause is Cause.PIPELINE
                self.idle_s[cause] = seconds + part * left_s


def waits(steps: Steps, i: int, free_s: float) -> list[tuple[Cause, float]]:
    """Why a device stood still from ``free_s`` until task ``i`` began.

    A message counts from when it could have left, so that waiting for a shared way is
    the way's; what came before belongs to those who made it.
    """
    start_s, late = steps.starts[i], steps.bound[i]
    gap_s = start_s - free_s
    if late == HOST:
        return [(Cause.DISPATCH, gap_s)]
    if late == STEP_BEFORE:  # its new parameters
        return [(Cause.SYNC, gap_s)]
    if late <= QUEUE:  # devices that work together wait for the last of them
        is_way = QUEUE - late >= steps.queues.first_way
        return [(Cause.SYNC if is_way else Cause.PIPELINE, gap_s)]
    task = steps.work[late]
    if task.use.what not in (What.MOVE, What.SYNC, What.UPDATE):
        return [(Cause.PIPELINE, gap_s)]
    cause = Cause.MOVE if task.use.what is What.MOVE else Cause.SYNC
    moving_s = min(start_s - max(free_s, _ready_s(steps, late)), gap_s)
    parts = [(cause, moving_s), (Cause.PIPELINE, gap_s - moving_s)]
    return [(why, seconds) for why, seconds in parts if seconds > 0]


def _ready_s(steps: Steps, i: int) -> float:
    """When a message, or the last of those it arrives with, could have left."""
    task = steps.work[i]
    made = [steps.ends[t] for at in (i, *task.along) for t in steps.work[at].after]
    return max(made) if made else steps.starts[i]


def _events(steps: Steps) -> tuple[Event, ...]:
    """All that takes time, from the step's first start."""
    first_s = min(
        start_s
        for start_s, task in zip(steps.starts, steps.work, strict=True)
        if task.use.seconds
    )
    return tuple(
        Event(
            start_s - first_s,
            end_s - first_s,
            task.use.what,
            task.instruction,
            task.use.devices,
            task.use.load,
        )
        for start_s, end_s, task in zip(
            steps.starts, steps.ends, steps.work, strict=True
        )
        if task.use.seconds
    )
