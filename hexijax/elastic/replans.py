"""How often a run may plan again.

A loss leaves no choice. A join or a changed speed is a chance, and is taken if it pays:
moving over costs time, and who comes may go again.
"""

import dataclasses

from hexijax.errors import UserError

PAYS = 2.0
"""What is gained until the end must be so many times what moving over costs."""


@dataclasses.dataclass(kw_only=True)
class Replans:
    """Counts them, and decides."""

    most: int = 200
    """In one run, forced or not."""

    most_in_vain: int = 10
    """In a row without a step between them."""

    horizon_steps: int | None = None
    """Steps that a new plan is expected to last, at most; None: to the end."""

    count: int = dataclasses.field(default=0, init=False)
    _from: int = dataclasses.field(default=-1, init=False)
    _in_vain: int = dataclasses.field(default=0, init=False)

    def pays(
        self, *, now_s: float, then_s: float, cost_s: float, steps_left: int
    ) -> bool:
        """Whether a plan that nothing forces is worth its price.

        Args:
          now_s: of a step under the plan at hand.
          then_s: of a step under the new one.
          cost_s: of moving over.
          steps_left: of the run.
        """
        if self.count >= self.most // 2:  # the other half is for losses
            return False
        if self.horizon_steps is not None:
            steps_left = min(steps_left, self.horizon_steps)
        return (now_s - then_s) * steps_left > PAYS * cost_s

    def begin(self, done: int) -> None:
        """One begins, with ``done`` steps done.

        Raises:
          UserError: there were too many.
        """
        self.count += 1
        self._in_vain = 0 if done > self._from else self._in_vain + 1
        if self.count > self.most or self._in_vain > self.most_in_vain:
            how = (
                f"{self._in_vain} times in a row without a step"
                if self._in_vain > self.most_in_vain
                else f"{self.most} times"
            )
            raise UserError(
                f"The run has planned again {how}, and members changed once more after "
                f"step {done}. What was saved stands: --resume when the cluster has "
                "calmed down, or save more often, so that a step is not lost each time."
            )

    def ended(self, step: int) -> None:
        """It has ended; the run goes on after ``step`` steps."""
        self._from = step
