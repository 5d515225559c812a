"""Silence means loss: nodes that do not beat for a while are lost.

    a node: beat(name, start, count) --any transport--> Heartbeats --check()--> Members

No clock of a sender is believed: a beat counts if its number has grown, and it is timed
where it arrives. Nor is a gap of our own: while the watcher itself was asleep (a
suspended machine, a process that was stopped, a clock that jumped) it heard nobody, so
that time is no silence.
"""

import dataclasses
import threading
import time
from collections.abc import Callable

from hexijax.elastic.members import Clock, Members


@dataclasses.dataclass(slots=True)
class _Heard:
    start: str
    count: int
    silent_s: float = 0.0
    gone: bool = False


class Heartbeats:
    """Watches nodes that beat; those that never did are not watched."""

    def __init__(
        self,
        members: Members,
        *,
        silence_s: float = 10.0,
        every_s: float = 1.0,
        clock: Clock = time.monotonic,
    ):
        """
        Args:
          members: told of losses.
          silence_s: without a beat a node is lost.
          every_s: how often ``check`` is called; a node should beat as often.
          clock: of the watcher.
        """
        assert silence_s >= 3 * every_s, "one late beat is no loss"
        self._members, self._clock = members, clock
        self._silence_s, self._every_s = silence_s, every_s
        self._heard: dict[str, _Heard] = {}
        self._checked_s = clock()
        self._lock = threading.Lock()

    def beat(self, node: str, start: str, count: int) -> None:
        """A node says that it lives.

        Args:
          node: which.
          start: of the process that beats, different after each restart.
          count: grows with each beat; one that has not grown is an old message.
        """
        with self._lock:
            heard = self._heard.get(node)
            restarted = heard is not None and heard.start != start
            if heard is not None and not restarted and count <= heard.count:
                return
            self._heard[node] = _Heard(start, count)
        if restarted:
            self._members.lose(node)  # it may have come back before it was missed
        if restarted or heard is None or heard.gone:
            self._members.join(node)

    def check(self) -> tuple[str, ...]:
        """Tells the members of those that were silent for too long; their names."""
        with self._lock:
            now = self._clock()
            gap_s, self._checked_s = now - self._checked_s, now
            # At most as long as a check may be late counts: a longer gap, or one
            # below zero, was ours.
            gap_s = min(max(gap_s, 0.0), 2 * self._every_s)
            gone = []
            for node, heard in self._heard.items():
                heard.silent_s += gap_s
                if heard.silent_s > self._silence_s and not heard.gone:
                    heard.gone = True
                    gone.append(node)
        for node in gone:
            self._members.lose(node)
        return tuple(gone)


class Beating:
    """A thread that calls something every so often, while it is entered."""

    def __init__(self, call: Callable[[], object], every_s: float = 1.0):
        self._call, self._every_s = call, every_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Beating":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(self._every_s):
            self._call()
