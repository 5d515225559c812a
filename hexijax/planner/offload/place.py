"""Plans that would overflow a device, with what must go to its host's memory.

    Plan, the judge -> Placer.place -> the Plan, placed, or None

Only stages on devices that overflow are placed; the others stay as they are, so a mixed
cluster offloads on its small cards alone. The choice knows a stage by itself; memory is
judged as every plan's is, and where a promise came out too large the stage is placed
anew with so much less.
"""

import dataclasses

from hexijax.cluster import Cluster
from hexijax.costs.activations import live_microbatches
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan, Schedule, Stage, UpdateOrder
from hexijax.planner.judge import Judge
from hexijax.planner.offload.choice import (
    Choice,
    Kept,
    LayerChoice,
    Profile,
    State,
    Weights,
)
from hexijax.planner.offload.counts import Allowed, best_counts
from hexijax.planner.offload.emit import placed_plan
from hexijax.planner.offload.order import Rule
from hexijax.planner.offload.profile import stage_profile
from hexijax.planner.offload.room import Room
from hexijax.planner.offload.score import Rules
from hexijax.planner.options import PlanOptions

RUNS = Allowed()
"""What Programs do of it so far."""

ORDER = UpdateOrder.FIFO
"""Programs have priority as well; this search does not look at it yet."""

RULES = Rules(rule=Rule.FIFO, barrier=True)
"""What that order comes to: updates stand before the next step's first forward."""

TRIES = 4
"""Times that a stage is placed, less where its device was promised too much."""

SPARE = 1.05
"""More than what was promised too much."""

LOOKED_AT = 4
"""Counts of the least bounds that are looked at, beside plain ones."""


class Placer:
    """Places stages of one chain on one cluster."""

    def __init__(
        self, chain: Chain, cluster: Cluster, options: PlanOptions, judge: Judge
    ) -> None:
        self._chain, self._cluster = chain, cluster
        self._options, self._judge = options, judge
        self.reasons: list[str] = []
        """Why stages could not be placed."""
        self._found: dict[object, Choice | None] = {}

    def place(self, plan: Plan) -> Plan | None:
        """The plan with its overflowing stages placed; None where they cannot be."""
        stages = dict(plan.stages())
        budgets = {d.name: d.usable_memory_bytes for d in self._cluster.devices}
        places = self._overflowing(plan, plan)
        choices: dict[Place, Choice] = {}
        for _ in range(TRIES):
            for place in places:
                budget = min(budgets[name] for name in stages[place].devices)
                choice = self._choice(plan, place, budget)
                if choice is None:
                    return None
                choices[place] = choice
            placed = placed_plan(plan, self._chain, choices, order=ORDER)
            places = self._overflowing(placed, plan)
            if not places:
                full = self._judge.full_host(placed)
                if full:
                    self.reasons.append(full)
                return None if full else placed
            memory_bytes = self._judge.memory_bytes(placed)
            for name in {d for place in places for d in stages[place].devices}:
                usable = self._cluster.device(name).usable_memory_bytes
                over = memory_bytes[name] - usable
                budgets[name] -= int(max(0, over) * SPARE)
        return None

    def _overflowing(self, plan: Plan, skeleton: Plan) -> list[Place]:
        """Stages of devices that are promised more than they can use."""
        memory_bytes = self._judge.memory_bytes(plan)
        over = {
            name
            for name, num_bytes in memory_bytes.items()
            if num_bytes > self._cluster.device(name).usable_memory_bytes
        }
        return [p for p, stage in skeleton.stages() if over & set(stage.devices)]

    def _choice(self, plan: Plan, place: Place, budget: int) -> Choice | None:
        stage = plan.stage(place)
        r, s = map(int, place[1:].split(".s"))
        replica = plan.replicas[r]
        live = live_microbatches(plan.schedule, replica)[s]
        key = (
            dataclasses.replace(stage, devices=stage.devices[:1]),
            replica.microbatches,
            replica.microbatch_size,
            live,
            budget,
        )
        if key not in self._found:
            profile = self._profile(plan, stage, place, live, budget)
            best = None
            if profile.host.has_pinned:
                best = best_counts(profile, RUNS, RULES, most=LOOKED_AT)
            if best is None:
                self.reasons.append(refusal(profile, stage))
            self._found[key] = best.scored.choice if best else None
        return self._found[key]

    def _profile(
        self, plan: Plan, stage: Stage, place: Place, live: int, budget: int
    ) -> Profile:
        replica = plan.replicas[int(place[1:].split(".s")[0])]
        return stage_profile(
            self._chain,
            self._cluster,
            stage,
            samples=replica.microbatch_size // stage.lanes,
            microbatches=replica.microbatches,
            moments=self._options.moments,
            live=live,
            layered=plan.schedule is Schedule.LAYERED,
            grads_stay=True,
            device_bytes=budget,
            temps=self._options.temps,
        )


def refusal(profile: Profile, stage: Stage) -> str:
    """Why nothing fits, with what is needed at least and what there is."""
    where = stage.devices[0]
    if not profile.host.has_pinned:
        return (
            f"{where} has no pinned host memory that JAX can use: nothing can rest "
            "there. Use more devices, or a smaller model."
        )
    depth = len(profile.layers)
    lightest = LayerChoice(
        weights=Weights.STREAMED, state=State.STREAMED, kept=Kept.FULL
    )
    room = Room(profile, (lightest,) * depth)
    device = room.peak_bytes(room.least_limit_bytes)
    return (
        f"With parameters and state of {depth} layers in host memory, {where} needs "
        f"{device:,} bytes of its own and has {profile.device_bytes:,}; its host needs "
        f"{room.host_bytes:,} and has {profile.host.memory_bytes:,}. Use more devices, "
        "a host with more memory, or a smaller model."
    )
