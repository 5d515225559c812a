"""Seconds that a step of a plan takes at least: what need not be simulated.

    Plan -> Floors.step_s -> a bound from below, under the simulator's own costs

A stage computes all microbatches of its replica. Where their backwards are whole, it
begins when the first has come through the stages before it, and what it hands back
last goes through these again: all that lies between the first forward and the last
backward of the first stage, whose next step follows. Sums and updates are left out.
"""

from hexijax.cluster import Cluster
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan, Replica, Schedule, Stage, stage_place

WHOLE = (Schedule.ONE_F_ONE_B, Schedule.EAGER, Schedule.GPIPE)
"""Schedules of whole backwards, in which each stage has devices of its own."""

EXACT = 1e-6
"""Relatively; cycles of microbatches are found to within it."""


class Floors:
    """Bounds of plans of one chain on one cluster; equal replicas are bounded once."""

    def __init__(self, chain: Chain, cluster: Cluster, moments: int) -> None:
        self._chain, self._cluster, self._moments = chain, cluster, moments
        self._known: dict[object, float] = {}

    def step_s(self, plan: Plan) -> float:
        """No simulation of the plan gives less; 0 where some layers do not train."""
        longest_s = 0.0
        if self._chain.first_trained:  # they go no way back
            return 0.0
        seen: set[object] = set()
        for replica in plan.replicas:
            form = (
                replica.microbatches,
                replica.microbatch_size,
                tuple(map(self._form, replica.stages)),
            )
            if form in seen:  # as long, or nearly: any of them bounds the step
                continue
            seen.add(form)
            key = (replica, plan.schedule)
            if key not in self._known:
                self._known[key] = self._replica_s(replica, plan.schedule)
            longest_s = max(longest_s, self._known[key])
        return longest_s * (1 - EXACT)

    def _form(self, stage: Stage) -> object:
        """Equal for stages that compute as long."""
        kind = self._cluster.device(stage.devices[0]).kind
        same = (stage.layers, stage.segments, stage.remat, stage.lanes, stage.tensor)
        return kind, stage.dtype, same

    def _replica_s(self, replica: Replica, schedule: Schedule) -> float:
        alone = Plan(replicas=(replica,), batch_size=replica.samples, schedule=schedule)
        costs = PlanCosts(alone, self._chain, self._cluster, self._moments)
        places = [stage_place(0, s) for s in range(len(replica.stages))]
        count = replica.microbatches
        busy_s = [count * costs.stage_s(place) for place in places]
        busy_s[-1] -= count * CALL_S  # the loss's segment may go both ways in one call
        sets: dict[tuple[str, ...], float] = {}
        for stage, seconds in zip(replica.stages, busy_s, strict=True):
            sets[stage.devices] = sets.get(stage.devices, 0.0) + seconds
        if schedule not in WHOLE or len(sets) < len(places):
            return max(sets.values())
        longest_s = before_s = 0.0
        for s, stage in enumerate(replica.stages):
            longest_s = max(longest_s, before_s + busy_s[s])
            before_s += busy_s[s] / count
            if s + 1 < len(places):
                here, there = places[s], places[s + 1]
                there_s = costs.border(here, there, stage.layers[1], False).load.seconds
                back_s = costs.border(there, here, stage.layers[1], True).load.seconds
                before_s += there_s + back_s
        return longest_s
