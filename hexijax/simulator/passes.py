"""Backward passes of a device set under ``layered``, and what waits for their sums.

sums that leave -> Passes.begin(segment) -> tasks that a pass waits for
"""

import dataclasses

from hexijax.plan.plan import Place
from hexijax.program.window import PASSES


@dataclasses.dataclass(slots=True)
class Passes:
    """Those that make gradients, in their order."""

    number: int = -1
    at: tuple[Place, int] | None = None
    leaving: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Of sums whose copies leave, the pass that made them and the task."""
    of: dict[tuple[Place, str], int] = dataclasses.field(default_factory=dict)
    """The last pass that added to a place's gradient of a bucket."""

    def left(self, number: int, task: int) -> None:
        """A sum of a pass leaves."""
        self.leaving.append((number, task))

    def begin(self, at: tuple[Place, int]) -> list[int]:
        """What a backward of a segment waits for, the first of its pass."""
        if at == self.at:
            return []
        self.at, self.number = at, self.number + 1
        due = [task for made, task in self.leaving if made <= self.number - PASSES]
        self.leaving = [x for x in self.leaving if x[0] > self.number - PASSES]
        return due
