"""What is planned: a model, its training, the machines.

experiment, or a plan.json alone -> Problem -> options for the search, the bound
"""

import dataclasses
from collections.abc import Mapping

from hexijax.cluster import Cluster
from hexijax.costs.temp import Temps
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.plan.training import PLAIN, Training
from hexijax.planner import Objective, PlanOptions
from hexijax.planner.bound import bound_s, least_cost
from hexijax.planner.objective import Goal
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

    temps: Temps = dataclasses.field(default_factory=Temps, hash=False)
    """What segments of the model were seen to take when they were compiled."""

    objective: Objective = Objective.STEP
    """What plans are chosen by."""

    usd_per_hour: Mapping[str, float] = dataclasses.field(
        default_factory=dict, hash=False
    )
    """Of one device, by kind, over what the cluster says."""

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
    def goal(self) -> Goal:
        """What a step costs, by the objective, in dollars and in joules."""
        return Goal(self.cluster, self.objective, self.usd_per_hour)

    @property
    def least_cost(self) -> float:
        """What no plan's step can cost less than, under the objective."""
        return least_cost(
            self.chain,
            self.cluster,
            self.goal,
            batch_size=self.batch_size,
            dtype=self.training.dtype,
        )

    def tokens(self, of_a_step: float) -> float:
        """A step's figure for one of its tokens."""
        return of_a_step / (self.batch_size * self.chain.tokens_per_sample)

    def rules(self, plan: Plan) -> StepRules:
        """What an update waits for under a plan."""
        return PlanOptions.of(self.training).rules(plan)

    def options(self, *, seconds: float | None = None) -> PlanOptions:
        """What the search must respect."""
        return dataclasses.replace(
            PlanOptions.of(self.training),
            objective=self.objective,
            usd_per_hour=self.usd_per_hour,
            temps=self.temps,
            seconds=seconds,
        )

    def on(self, cluster: Cluster) -> "Problem":
        """The same on other machines."""
        return dataclasses.replace(self, cluster=cluster)
