"""What is planned: a model, its training, the machines.

experiment, or a plan.json alone -> Problem -> options for the search, the bound
"""

import dataclasses

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.training import PLAIN, Training
from hexijax.planner import PlanOptions
from hexijax.planner.bound import bound_s
from hexijax.program.lower import StepRules


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is planned: a model, its training, and the machines."""

    name: str
    """Of the experiment."""

    chain: Chain
    """The model."""

    cluster: Cluster
    """The machines."""

    batch_size: int
    """Samples of one optimizer step."""

    training: Training = PLAIN
    """What else the step costs."""

    @property
    def bound_s(self) -> float:
        """What no plan's step can beat: every device busy at its best, no links."""
        return bound_s(
            self.chain,
            self.cluster,
            batch_size=self.batch_size,
            dtype=self.training.dtype,
        )

    @property
    def rules(self) -> StepRules:
        """What an update waits for."""
        return StepRules(
            clip=self.training.clip, skip_nonfinite=self.training.skip_nonfinite
        )

    def options(self, *, seconds: float | None = None) -> PlanOptions:
        """What the search must respect."""
        return PlanOptions(
            max_microbatch_size=self.training.max_microbatch_size,
            moments=self.training.moments,
            whole_leaves=self.training.whole_leaves,
            seconds=seconds,
        )

    def on(self, cluster: Cluster) -> "Problem":
        """The same on other machines."""
        return dataclasses.replace(self, cluster=cluster)
