"""Points at which all islands meet, each with a value: who is there, who is late.

add(tag, island, value) -> every island's value, once the last is there
"""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(slots=True)
class _Meeting:
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    since_s: dict[str, float] = dataclasses.field(default_factory=dict)


class Meetings:
    """Those of one generation that are not over; the caller has a lock."""

    def __init__(self) -> None:
        self._open: dict[str, _Meeting] = {}

    def clear(self) -> None:
        """Another generation begins."""
        self._open.clear()

    def add(
        self, tag: str, island: str, value: Any, islands: Sequence[str], now_s: float
    ) -> dict[str, Any] | None:
        """Somebody has come; all values, if it is the last of ``islands``."""
        meeting = self._open.setdefault(tag, _Meeting())
        meeting.values[island] = value
        meeting.since_s.setdefault(island, now_s)
        if self.late(tag, islands):
            return None
        return self._open.pop(tag).values

    def late(self, tag: str, islands: Sequence[str]) -> list[str]:
        """Who has not come; nobody to a meeting that is over."""
        meeting = self._open.get(tag)
        return [x for x in islands if x not in meeting.values] if meeting else []

    def waits(self, island: str, islands: Sequence[str]) -> tuple[str, float] | None:
        """The first of those that an island waits for, and since when."""
        for tag, meeting in self._open.items():
            if island in meeting.values and (late := self.late(tag, islands)):
                return late[0], meeting.since_s[island]
        return None
