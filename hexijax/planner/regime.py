"""What a layout asks of memory: which schedule, what is freed, what waits on the host.

Each needs less than the one before it: gradients of two passes instead of all, then
parameters of two passes, then borders of two microbatches; all pay in copies.
"""

import dataclasses

from hexijax.plan.plan import Memory, Params, Schedule
from hexijax.planner.options import PlanOptions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regime:
    """Of all replicas of a layout."""

    layered: bool = False
    """Each segment, of one layer, runs all microbatches before the next."""

    freed: bool = False
    """Parameters are gathered for each pass over a segment."""

    waits: bool = False
    """Borders inside a stage wait in host memory."""

    rounds: int = 1
    """Stages a device set holds of a pipeline: ministages, each one segment."""

    @property
    def per_segment(self) -> int | None:
        """Most layers of a segment where it is layered; None: all of a stage."""
        return None if self.rounds > 1 else 1

    def options(self, options: PlanOptions) -> PlanOptions:
        """The options with its schedule."""
        if not self.layered:
            return options
        return dataclasses.replace(options, schedule=Schedule.LAYERED)

    def params(self, num_segments: int) -> tuple[Params, ...]:
        """Of a stage's segments."""
        return (Params.FREED,) * num_segments if self.freed else ()

    def memory(self, num_segments: int) -> tuple[Memory, ...]:
        """Where the borders of a stage's segments wait."""
        return (Memory.HOST,) * num_segments if self.waits else ()


PLAIN = Regime()
"""What is kept stays all step, and microbatches follow each other."""

LAYERED = Regime(layered=True)
FREED = Regime(layered=True, freed=True)
WAITING = Regime(layered=True, freed=True, waits=True)

SINGLE = (LAYERED, FREED, WAITING)
"""Where replicas are one stage each."""

ROUNDS = (2, 4)

MINISTAGES = tuple(
    Regime(layered=True, freed=freed, rounds=rounds)
    for rounds in ROUNDS
    for freed in (False, True)
)
"""Where some replica is a pipeline: its later stages begin when the first is through
all microbatches, unless each is short."""
