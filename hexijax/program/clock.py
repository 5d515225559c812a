"""When each instruction would start, were every device and every link as the costs say.

List scheduling: an instruction is ready when what it waits for has finished, and starts
when its devices are free; of several that could start, the lowest rank does.
O(n log n): an instruction whose device is busy waits in that device's own queue.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence


class Clock:
    """Plays numbered jobs; iterate to get them in the order of their starts."""

    def __init__(
        self,
        *,
        waits: Sequence[Sequence[int]],
        ranks: Sequence[int],
        devices: Sequence[Sequence[str]],
        duration_s: Callable[[int], float],
    ) -> None:
        self._waits = waits
        self._ranks = ranks
        self._devices = devices
        self._duration_s = duration_s
        self._free_s = {d: 0.0 for used in devices for d in used}
        self._queues: dict[str, list[tuple[int, int]]] = {d: [] for d in self._free_s}
        self._events: list[tuple[float, int, int, str]] = []

    def __iter__(self) -> Iterator[int]:
        missing = [len(waits) for waits in self._waits]
        followers: list[list[int]] = [[] for _ in self._waits]
        for job, waits in enumerate(self._waits):
            for earlier in waits:
                followers[earlier].append(job)
        ready_s = [0.0] * len(self._waits)
        for job, count in enumerate(missing):
            if not count:
                self._offer(0.0, job)
        while self._events:
            now_s, _, job, device = heapq.heappop(self._events)
            if device:
                self._wake(now_s, device)
                continue
            if self._blocked(now_s, job):
                continue
            yield job
            end_s = now_s + self._duration_s(job)
            for device in self._devices[job]:
                self._free_s[device] = end_s
                heapq.heappush(self._events, (end_s, -1, job, device))
            for later in followers[job]:
                ready_s[later] = max(ready_s[later], end_s)
                missing[later] -= 1
                if not missing[later]:
                    self._offer(ready_s[later], later)

    def _offer(self, time_s: float, job: int) -> None:
        heapq.heappush(self._events, (time_s, self._ranks[job], job, ""))

    def _wake(self, now_s: float, device: str) -> None:
        """A device is free: the first in its queue may try again."""
        if self._queues[device]:
            _, job = heapq.heappop(self._queues[device])
            self._offer(now_s, job)

    def _blocked(self, now_s: float, job: int) -> bool:
        """Whether a device of the job is busy; then the job queues there."""
        devices = self._devices[job]
        busy = next((d for d in devices if self._free_s[d] > now_s), None)
        if busy is None:
            return False
        heapq.heappush(self._queues[busy], (self._ranks[job], job))
        for device in devices:  # the job that queues here no longer holds up others
            if self._free_s[device] <= now_s:
                self._wake(now_s, device)
        return True
