"""A plan with every figure that people compare plans by.

    Plan, Problem -> judge -> Judged -> figures() for --json

One judgement for all: our plans, the baselines' and a person's own are simulated on the
same cluster under the same costs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hexijax.costs.hosts import full_host, host_bytes
from hexijax.costs.memory import plan_memory
from hexijax.costs.parts import MemoryParts
from hexijax.plan.plan import Plan, Prediction
from hexijax.plan.serial import report_replicas
from hexijax.planner import Objective
from hexijax.planner.mesh import compute_dtype
from hexijax.planner.objective import Goal
from hexijax.report.problem import Problem
from hexijax.report.summary import product_flops_per_s
from hexijax.simulator import Timeline, predict

MOST_PLAYED = 8192
"""Forwards up to which every one is drawn: a second of simulation."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A plan, simulated, with its figures."""

    name: str
    """What the plan is called: ``hexijax``, or a baseline's name."""

    problem: Problem
    """What it solves."""

    plan: Plan
    """It, with this judgement as its prediction."""

    timeline: Timeline
    """A step of it."""

    memory: Mapping[str, MemoryParts]
    """What each device holds at its peak."""

    bound_s: float
    """What no plan's step can beat on the cluster."""

    search_s: float
    """Wall time of the search for it; 0 for a plan that was given."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.timeline.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on, a second."""
        tokens = self.plan.batch_size * self.problem.chain.tokens_per_sample
        return tokens / self.step_s

    @property
    def mfu(self) -> float | None:
        """Part of the whole cluster's dense peak that the model's own FLOPs make.

        Devices left out count; recomputation does not. None: a kind has no peak for
        the dtype it computes in.
        """
        peak = _peak_flops_per_s(self.plan, self.problem)
        if peak is None:
            return None
        flops = sum(
            x.forward_flops + x.backward_flops for x in self.problem.chain.layers
        )
        return flops * self.plan.batch_size / self.step_s / peak

    @property
    def cost(self) -> float:
        """What plans are chosen by, of a step: its seconds, as a rule."""
        if self.problem.objective is Objective.STEP:
            return self.step_s
        return self.problem.goal.cost(self.step_s, self._busy_s)

    @property
    def least_cost(self) -> float:
        """What no plan's step can cost less than."""
        if self.problem.objective is Objective.STEP:
            return self.bound_s
        return self.problem.least_cost

    @property
    def fraction_of_bound(self) -> float:
        """How near the cost is to its bound; at most 1, and 1 of what is free."""
        if not self.least_cost and self.usd_per_token == 0:
            return 1.0
        return self.least_cost / self.cost

    @property
    def tokens_per_cost(self) -> float:
        """Tokens for a unit of cost: a second, a dollar or a joule."""
        return 1 / self.problem.tokens(self.cost)

    @property
    def usd_per_token(self) -> float | None:
        """Dollars of a token on the devices in use; None: some kind has no price."""
        usd = self._plain.usd(self.step_s, self._busy_s)
        return None if usd is None else self.problem.tokens(usd)

    @property
    def joules_per_token(self) -> float | None:
        """Joules of a token; None: some kind in use has no board power."""
        joules = self._plain.joules(self.step_s, self._busy_s)
        return None if joules is None else self.problem.tokens(joules)

    @property
    def _plain(self) -> Goal:
        """A goal that refuses no kind."""
        return Goal(self.problem.cluster, usd_per_hour=self.problem.usd_per_hour)

    @property
    def _busy_s(self) -> dict[str, float]:
        busy_s = self.timeline.busy_s
        return {name: sum(busy_s[name].values()) for name in self.used}

    @property
    def used(self) -> tuple[str, ...]:
        """Devices that compute, in the cluster's order."""
        busy = {name for _, stage in self.plan.stages() for name in stage.devices}
        return tuple(d.name for d in self.problem.cluster.devices if d.name in busy)

    @property
    def unused(self) -> tuple[str, ...]:
        """Devices that compute nothing, in the cluster's order."""
        busy = set(self.used)
        devices = self.problem.cluster.devices
        return tuple(d.name for d in devices if d.name not in busy)

    @property
    def fits(self) -> bool:
        """Whether no device is promised more than it can use, and no host."""
        cluster = self.problem.cluster
        return not full_host(self.memory, cluster) and all(
            parts.total_bytes <= cluster.device(name).usable_memory_bytes
            for name, parts in self.memory.items()
        )

    def figures(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "name": self.name,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "bound_s": self.bound_s,
            "fraction_of_bound": self.fraction_of_bound,
            "objective": self.problem.objective.name.lower(),
            "usd_per_token": self.usd_per_token,
            "joules_per_token": self.joules_per_token,
            "search_s": self.search_s,
            "batch_size": self.plan.batch_size,
            "schedule": self.plan.schedule.value,
            "memory_bytes_by_device": {
                name: parts.total_bytes for name, parts in self.memory.items()
            },
            "host_memory_bytes_by_node": host_bytes(self.memory, self.problem.cluster),
            "unused": list(self.unused),
            "replicas": report_replicas(self.plan),
        }


def judge(name: str, plan: Plan, problem: Problem, *, search_s: float = 0.0) -> Judged:
    """Simulates a plan of the problem; ``with_events`` adds what pictures need.

    Args:
        name: what the plan is called.
        plan: it.
        problem: what it solves.
        search_s: wall time of the search for it.
    """
    training = problem.training
    timeline = _play(plan, problem, events=False)
    memory = plan_memory(
        plan,
        problem.chain,
        problem.cluster,
        moments=training.moments,
        whole_leaves=training.whole_leaves,
        temps=problem.temps,
    )
    promised = {device: parts.total_bytes for device, parts in memory.items()}
    prediction = Prediction(step_s=timeline.step_s, memory_bytes=promised)
    return Judged(
        name=name,
        problem=problem,
        plan=dataclasses.replace(plan, prediction=prediction),
        timeline=timeline,
        memory=memory,
        bound_s=problem.bound_s,
        search_s=search_s,
    )


def with_events(judged: Judged, *, memory: bool = False) -> Judged:
    """The same with events, for pictures; of a large plan one of equal replicas'.

    Args:
        judged: a plan.
        memory: add what each device holds over the step.
    """
    plan = judged.plan
    calls = sum(len(s.segments) for _, s in plan.stages()) * max(
        replica.microbatches for replica in plan.replicas
    )
    folded = calls > MOST_PLAYED
    timeline = _play(plan, judged.problem, events=True, memory=memory, folded=folded)
    both = dataclasses.replace(
        judged.timeline, events=timeline.events, memory=timeline.memory
    )
    return dataclasses.replace(judged, timeline=both)


def _play(
    plan: Plan,
    problem: Problem,
    *,
    events: bool,
    memory: bool = False,
    folded: bool = True,
) -> Timeline:
    return predict(
        plan,
        problem.chain,
        problem.cluster,
        moments=problem.training.moments,
        whole_leaves=problem.training.whole_leaves,
        rules=problem.rules(plan),
        events=events,
        memory=memory,
        folded=folded,
    )


def _peak_flops_per_s(plan: Plan, problem: Problem) -> float | None:
    """Dense peaks of all devices, each in the dtype it computes in here."""
    dtypes = {d: stage.dtype for _, stage in plan.stages() for d in stage.devices}
    total = 0.0
    for device in problem.cluster.devices:
        dtype = dtypes.get(device.name) or compute_dtype(problem.training.dtype, device)
        peak = product_flops_per_s(device.profile, dtype)
        if peak is None:
            return None
        total += peak
    return total
