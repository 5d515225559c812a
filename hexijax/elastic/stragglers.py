"""Nodes that have become slow, from the times of their stages.

    measured and expected seconds by node, step by step -> Stragglers -> Members.slow

Expectations may be off for all alike (the model of costs is, the emulated device is),
so a node is judged beside the others: its measured over its expected time, over that of
the typical node. One slow step is no slow node: all of a window of steps must agree,
and a small change is not worth telling.
"""

import collections
import statistics
from collections.abc import Mapping

from hexijax.elastic.members import Members

WINDOW = 5
"""Measured steps that must agree."""

TELLING = 0.2
"""Change of a node's speed, as a part of it, that is told."""


class Stragglers:
    """Compares nodes; tells the members whose speed has changed."""

    def __init__(
        self, members: Members, *, window: int = WINDOW, telling: float = TELLING
    ):
        self._members, self._window, self._telling = members, window, telling
        self._seen: dict[str, collections.deque[float]] = {}

    def step(
        self, measured_s: Mapping[str, float], expected_s: Mapping[str, float]
    ) -> tuple[str, ...]:
        """A measured step; returns the nodes whose speed was told.

        Args:
          measured_s: compute time of each node's stages in it.
          expected_s: of the same, at the speeds of their kinds.
        """
        ratios = {
            node: measured_s[node] / expected_s[node]
            for node in measured_s
            if expected_s.get(node, 0.0) > 0 and measured_s[node] > 0
        }
        for node in self._seen.keys() - ratios.keys():
            del self._seen[node]
        if len(ratios) < 2:
            return ()
        typical = statistics.median_low(ratios.values())
        told = []
        for node, ratio in ratios.items():
            seen = self._seen.setdefault(node, collections.deque(maxlen=self._window))
            seen.append(typical / ratio)
            if len(seen) == self._window and self._tells(node, seen):
                told.append(node)
                seen.clear()
        return tuple(told)

    def _tells(self, node: str, seen: "collections.deque[float]") -> bool:
        known = self._members.speed(node)
        changes = [speed / known - 1 for speed in seen]
        if min(map(abs, changes)) < self._telling or min(changes) < 0 < max(changes):
            return False
        speed = min(1.0, statistics.median(seen))
        if abs(speed / known - 1) < self._telling:
            return False  # faster than its kind: nothing to correct
        self._members.slow(node, 1.0 if speed > 1 - self._telling / 2 else speed)
        return True

    def forget(self) -> None:
        """The plan has changed: what was seen is of another one."""
        self._seen.clear()
