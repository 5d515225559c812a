"""Who takes part in a run, and what has happened to them.

    heartbeats, notices, a file, stragglers -> Members -> take() -> (Event, ...)
                                                       -> cluster() to plan for

The cluster names every node that may ever come. Nodes are told of by name and may be
told of from any thread; nothing here knows of devices, processes or sockets.
"""

import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Iterable

from hexijax.cluster import Cluster
from hexijax.elastic.speeds import slowed
from hexijax.errors import UserError

Clock = Callable[[], float]
"""Seconds since some moment; it never goes back."""


class What(enum.StrEnum):
    """What can happen to a node."""

    LOST = "lost"
    """It is gone, and all that was in its memory."""
    JOINED = "joined"
    """It is there, and holds nothing."""
    NOTICE = "notice"
    """It will leave soon; until then all of it can be read."""
    SLOW = "slow"
    """It computes at another speed than its kind's."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to one node."""

    what: What
    """Which it was."""

    node: str
    """To whom."""

    at_s: float
    """When, on the clock of the members."""

    within_s: float | None = None
    """Of a notice: seconds after which it may be gone."""

    speed: float | None = None
    """Of a slow node: what it does of its kind's speed."""

    def __str__(self) -> str:
        match self.what:
            case What.NOTICE:
                return f"{self.node} leaves within {self.within_s:.0f} s"
            case What.SLOW:
                return f"{self.node} runs at {self.speed:.2f} of its speed"
            case What.LOST | What.JOINED:
                return f"{self.node} {self.what.value}"


class Members:
    """The nodes of a cluster that take part. Every change sets ``changed``."""

    def __init__(
        self,
        cluster: Cluster,
        present: Iterable[str] | None = None,
        *,
        clock: Clock = time.monotonic,
    ):
        """All of the cluster's nodes, or some.

        Args:
          cluster: every node that may come.
          present: names of those that take part from the start; None: all.
          clock: of the events.
        """
        self.whole, self.clock = cluster, clock
        names = [node.name for node in cluster.nodes]
        self._here = set(names if present is None else present)
        for name in self._here:
            cluster.node(name)
        self._leaving: set[str] = set()
        self._speed: dict[str, float] = {}
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self.changed = threading.Event()
        """Something has happened that nobody has taken yet."""

    # What happens.

    def lose(self, node: str) -> None:
        """It is gone, without a word."""
        self.whole.node(node)
        with self._lock:
            if node in self._here:
                self._here.discard(node)
                self._leaving.discard(node)
                self._speed.pop(node, None)
                self._happened(What.LOST, node)

    def join(self, node: str) -> None:
        """It takes part from now on; also if it was to leave, and stays."""
        self.whole.node(node)
        with self._lock:
            if node not in self._here or node in self._leaving:
                self._here.add(node)
                self._leaving.discard(node)
                self._happened(What.JOINED, node)

    def notice(self, node: str, within_s: float) -> None:
        """It will be gone in so many seconds."""
        self.whole.node(node)
        with self._lock:
            if node in self._here and node not in self._leaving:
                self._leaving.add(node)
                self._happened(What.NOTICE, node, within_s=within_s)

    def slow(self, node: str, speed: float) -> None:
        """It does ``speed`` of what its kind does; 1 is as it should be.

        Raises:
          UserError: that is no speed.
        """
        self.whole.node(node)
        if not 0 < speed < float("inf"):
            raise UserError(
                f"Node {node!r} was said to run at {speed} of its speed. A speed is "
                "above 0; 1 is that of its kind. A node that does nothing is lost."
            )
        with self._lock:
            if node in self._here and self._speed.get(node, 1.0) != speed:
                self._speed[node] = speed
                self._happened(What.SLOW, node, speed=speed)

    def _happened(
        self,
        what: What,
        node: str,
        *,
        within_s: float | None = None,
        speed: float | None = None,
    ) -> None:
        self._events.append(
            Event(
                what=what, node=node, at_s=self.clock(), within_s=within_s, speed=speed
            )
        )
        self.changed.set()

    # What is known.

    def take(self) -> tuple[Event, ...]:
        """What has happened since it was last asked, in order."""
        with self._lock:
            taken = tuple(self._events)
            self._events.clear()
            self.changed.clear()
        return taken

    @property
    def present(self) -> tuple[str, ...]:
        """Nodes whose memory can be read, in the cluster's order."""
        with self._lock:
            return tuple(n.name for n in self.whole.nodes if n.name in self._here)

    @property
    def intact(self) -> frozenset[str]:
        """Those that were not lost since ``take``, even if they are back: what was in
        their memory then still is."""
        with self._lock:
            return frozenset(self._here - lost(self._events))

    @property
    def staying(self) -> tuple[str, ...]:
        """Those of them to plan for: none of these is about to leave."""
        with self._lock:
            here = self._here - self._leaving
        return tuple(n.name for n in self.whole.nodes if n.name in here)

    def speed(self, node: str) -> float:
        """What it does of its kind's speed, as far as is known."""
        with self._lock:
            return self._speed.get(node, 1.0)

    def cluster(self) -> Cluster:
        """The staying nodes, at the speeds they were seen to have.

        Raises:
          UserError: none stays.
        """
        staying = self.staying
        if not staying:
            raise UserError(
                f"All {len(self.whole.nodes)} nodes of cluster {self.whole.name!r} are "
                "lost or about to leave: there is nothing left to plan for. The run "
                "can go on later from what it saved: --resume."
            )
        gone = [n.name for n in self.whole.nodes if n.name not in staying]
        left = self.whole.without(*gone) if gone else self.whole
        with self._lock:
            speeds = {n: s for n, s in self._speed.items() if n in staying}
        return slowed(left, speeds)


def lost(events: Iterable[Event]) -> frozenset[str]:
    """Nodes whose memory was lost on the way, even if they are back."""
    return frozenset(event.node for event in events if event.what is What.LOST)
