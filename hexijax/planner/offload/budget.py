"""How long a choice of what rests on hosts is searched: counted, never timed.

best_counts(.., budget) -> scored(.., budget) -> Budget.drawn ; is_spent -> no more
"""

import dataclasses
import math

BOUNDS = 1_300
"""Counts whose bounds take as long as a task of an order."""


@dataclasses.dataclass(slots=True)
class Budget:
    """Tasks of the orders that are drawn, each order by itself."""

    most: float = math.inf
    """After which no further choice gets an order, where one was found."""

    drawn: int = 0
    """So far."""

    @property
    def left(self) -> float:
        """Tasks that may still be drawn."""
        return self.most - self.drawn

    @property
    def is_spent(self) -> bool:
        """Whether what was found has to do."""
        return self.left <= 0
