"""What a finished plan is worth: does it fit, how long is its step, what it costs.

    Plan -> Judge -> fits, estimate_s(plan), step_s(plan), cost(plan), predicted(plan)

The search, the baselines and the comparisons all ask here, so that they are held to the
same costs. ``estimate_s`` is a formula, ``step_s`` the simulator's.
"""

import dataclasses

from hexijax.cluster import Cluster
from hexijax.costs.hosts import full_host
from hexijax.costs.memory import plan_memory
from hexijax.costs.parts import MemoryParts
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan, Prediction
from hexijax.planner.estimate import estimate
from hexijax.planner.floor import Floors
from hexijax.planner.objective import Goal, Objective
from hexijax.planner.options import PlanOptions
from hexijax.simulator import Timeline, predict


class Judge:
    """Judges plans of one chain on one cluster; equal plans are played once."""

    def __init__(self, chain: Chain, cluster: Cluster, options: PlanOptions) -> None:
        self.chain = chain
        self.cluster = cluster
        self.options = options
        self._goal = Goal(cluster, options.objective, options.usd_per_hour)
        self._floors = Floors(chain, cluster, options.moments)
        self._steps_s: dict[Plan, float] = {}
        self._costs: dict[Plan, float] = {}
        self._memory: dict[Plan, dict[str, int]] = {}
        self._full: dict[Plan, str] = {}

    def memory_bytes(self, plan: Plan) -> dict[str, int]:
        """The promised peak of every device the plan names."""
        if plan not in self._memory:
            parts = self._memory_parts(plan)
            totals = {name: part.total_bytes for name, part in parts.items()}
            self._memory[plan] = totals
            self._full[plan] = full_host(parts, self.cluster)
        return self._memory[plan]

    def full_host(self, plan: Plan) -> str:
        """Which host has too little memory for what waits there; empty: none."""
        self.memory_bytes(plan)
        return self._full[plan]

    def stateless_bytes(self, plan: Plan) -> dict[str, int]:
        """The same without optimizer state."""
        return {
            name: part.total_bytes - part.state_bytes
            for name, part in self._memory_parts(plan).items()
        }

    def _memory_parts(self, plan: Plan) -> dict[str, MemoryParts]:
        return plan_memory(
            plan,
            self.chain,
            self.cluster,
            moments=self.options.moments,
            whole_leaves=self.options.whole_leaves,
            temps=self.options.temps,
        )

    def fits(self, plan: Plan) -> bool:
        """Whether no device is promised more than it can use, and no host."""
        return not self.full_host(plan) and all(
            num_bytes <= self.cluster.device(name).usable_memory_bytes
            for name, num_bytes in self.memory_bytes(plan).items()
        )

    def estimate_s(self, plan: Plan) -> float:
        """Seconds of a step, by formula."""
        options = self.options
        made = estimate(plan, self.chain, self.cluster, moments=options.moments)
        return made.step_s

    def floor(self, plan: Plan) -> float:
        """What a plan costs at least, by formula; 0 where nothing is known."""
        if self.options.objective is not Objective.STEP:
            return 0.0
        return self._floors.step_s(plan)

    def timeline(self, plan: Plan, *, events: bool = True) -> Timeline:
        """A step of the plan, simulated."""
        return predict(
            plan,
            self.chain,
            self.cluster,
            rules=self.options.rules(plan),
            moments=self.options.moments,
            whole_leaves=self.options.whole_leaves,
            events=events,
        )

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step, simulated; what was predicted before changes nothing."""
        plan = _bare(plan)
        if plan not in self._steps_s:
            timeline = self.timeline(plan, events=False)
            self._steps_s[plan] = timeline.step_s
            busy_s = {d: sum(parts.values()) for d, parts in timeline.busy_s.items()}
            self._costs[plan] = self._goal.cost(timeline.step_s, busy_s)
        return self._steps_s[plan]

    def cost(self, plan: Plan) -> float:
        """What the objective counts, simulated; the step's seconds as a rule."""
        self.step_s(plan)
        return self._costs[_bare(plan)]

    def costs_less(self, plan: Plan, limit: float) -> bool:
        """Whether it costs less than that; simulated only where it may."""
        return self.floor(plan) < limit and self.cost(plan) < limit

    def predicted(self, plan: Plan) -> Plan | None:
        """The plan with its prediction, or None where a device would overflow."""
        if not self.fits(plan):
            return None
        prediction = Prediction(
            step_s=self.step_s(plan), memory_bytes=self.memory_bytes(plan)
        )
        return dataclasses.replace(plan, prediction=prediction)


def _bare(plan: Plan) -> Plan:
    """The plan without its prediction."""
    if plan.prediction is None:
        return plan
    return dataclasses.replace(plan, prediction=None)
