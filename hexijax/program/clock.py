"""When each instruction would start, were every device and every link as the costs say.

List scheduling: an instruction is ready when what it waits for has finished, and starts
when its devices are free; of several that could start, the lowest rank does.
O(n log n): an instruction whose device is busy waits in that device's own queue.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

WAKE = -1
"""Rank of a device that is free again: before all that may start then, but for copies,
which would else wait for what it is given next."""


def by_start(
    *,
    followers: Sequence[Sequence[int]],
    ranks: Sequence[int],
    devices: Sequence[tuple[str, ...]],
    seconds: Sequence[float],
    lags_s: Mapping[int, float] | None = None,
    behind: Mapping[int, tuple[str, ...]] | None = None,
) -> Iterator[int]:
    """Numbered jobs in the order of their starts; copies when they are handed over.

    Args:
      followers: of each job, those that wait for its end.
      ranks: of each job; where several could start, the lowest does.
      devices: of each job, those that it keeps busy.
      seconds: of each job.
      lags_s: of some jobs, how long after the last end they wait for they may start.
      behind: the copies, and on each one's device what computes.
    """
    sets = dict.fromkeys(devices)
    number = together(sets)
    queues_of = {used: tuple({number[d]: None for d in used}) for used in sets}
    behind = behind or {}
    computes = {
        used: [number[d] for d in used if d in number] for used in behind.values()
    }
    free_s = [0.0] * len(number)
    queues: list[list[tuple[int, int]]] = [[] for _ in number]
    lags_s = lags_s or {}
    ready_s = [0.0] * len(followers)
    missing = [0] * len(followers)
    for later in followers:
        for job in later:
            missing[job] += 1
    events = [(0.0, ranks[job], job) for job, count in enumerate(missing) if not count]
    heapq.heapify(events)
    push, pop = heapq.heappush, heapq.heappop

    def wake(queue: int) -> None:
        """The first that waits for a free device may try again."""
        if queues[queue]:
            push(events, (now_s, *pop(queues[queue])))

    while events:
        now_s, rank, job = pop(events)
        if rank == WAKE:
            wake(job)
            continue
        used = queues_of[devices[job]]
        for queue in used if job not in behind else ():
            if free_s[queue] > now_s:
                if not queues[queue]:
                    push(events, (free_s[queue], WAKE, queue))
                push(queues[queue], (rank, job))
                for other in used:  # the job that queues here holds up no others
                    if free_s[other] <= now_s:
                        wake(other)
                break
        else:
            yield job
            begin_s = now_s
            if job in behind:
                before = (*used, *computes[behind[job]])
                begin_s = max(begin_s, *(free_s[one] for one in before))
            end_s = begin_s + seconds[job]
            for queue in used:
                free_s[queue] = end_s
                if queues[queue]:
                    push(events, (end_s, WAKE, queue))
            for later in followers[job]:
                if end_s > ready_s[later]:
                    ready_s[later] = end_s
                missing[later] -= 1
                if not missing[later]:
                    start_s = ready_s[later] + lags_s.get(later, 0.0)
                    push(events, (start_s, ranks[later], later))


def together(sets: Iterable[tuple[str, ...]]) -> dict[str, int]:
    """Numbers for devices; those that are always used together have the same."""
    member_of: dict[str, list[int]] = {}
    for i, used in enumerate(sets):
        for device in used:
            member_of.setdefault(device, []).append(i)
    number: dict[tuple[int, ...], int] = {}
    return {
        device: number.setdefault(tuple(at), len(number))
        for device, at in member_of.items()
    }
