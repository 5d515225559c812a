"""What was done when members changed, and what each part of it took."""

import dataclasses

from hexijax.elastic.members import Event
from hexijax.elastic.recovery import Recovered


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A re-plan, as it was done."""

    events: tuple[Event, ...]
    """What made it necessary, or worth it."""

    done: int
    """Steps that were done then."""

    recovered: Recovered
    """Where it goes on, and what was moved."""

    detect_s: float
    """From the first event being told to this beginning."""

    plan_s: float
    """For the plan, or for waiting until it was there."""

    ahead: bool
    """The plan had been asked for before it was needed."""

    compile_s: float
    """For the new engine."""

    move_s: float
    """For the state."""

    @property
    def total_s(self) -> float:
        """From the event to the first new step's dispatch."""
        return self.detect_s + self.plan_s + self.compile_s + self.move_s

    def lines(self) -> list[str]:
        """For people."""
        again = self.done - self.recovered.step
        back = f", {again} of them again" * bool(again)
        return [
            *self.recovered.passed_over,
            f"after step {self.done}: {', '.join(map(str, self.events))}; the run goes "
            f"on from step {self.recovered.step}{back}",
            f"  noticed in {self.detect_s:.2f} s, planned in {self.plan_s:.2f} s"
            f"{' (ahead)' * self.ahead}, compiled in {self.compile_s:.2f} s, moved in "
            f"{self.move_s:.2f} s: {self.recovered.moved}",
        ]
