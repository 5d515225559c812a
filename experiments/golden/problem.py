"""One thing to plan, our plan of it and the baselines', and their figures.

Problem -> ours, baseline -> Plan -> step_s, mfu
"""

import dataclasses
import functools
import sys

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.planner import InfeasiblePlanError, PlanOptions
from hexijax.planner.baselines import all_baselines
from hexijax.planner.mesh import compute_dtype
from hexijax.planner.search import Found, search

DTYPE = "bfloat16"
"""What every published case computes in, as far as a kind has it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A model, machines, a batch, and what plans may do."""

    chain: Chain
    """The model."""

    cluster: Cluster
    """The machines."""

    batch_size: int
    """Sequences of a step."""

    options: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    """What the search may do."""

    def change(self, **options: object) -> "Problem":
        """The same under other options."""
        changed = functools.partial(dataclasses.replace, self.options)
        return dataclasses.replace(self, options=changed(**options))


def found(problem: Problem) -> Found | None:
    """What our search finds; None where nothing fits. Tells stderr."""
    try:
        made = search(
            problem.chain,
            problem.cluster,
            batch_size=problem.batch_size,
            dtype=DTYPE,
            options=problem.options,
        )
    except InfeasiblePlanError:
        made = None
    seconds = step_s(made.plan) if made else None
    said = "does not fit" if seconds is None else f"{seconds:.3f} s"
    name = f"{problem.chain.name} on {problem.cluster.name}"
    print(f"  {name}: {said}", file=sys.stderr, flush=True)
    return made


def ours(problem: Problem) -> Plan | None:
    """Our plan; None where nothing fits."""
    made = found(problem)
    return made.plan if made else None


def baseline(name: str, problem: Problem) -> Plan | None:
    """The plan of a baseline; None where nothing of its form fits."""
    return all_baselines()[name](
        problem.chain,
        problem.cluster,
        batch_size=problem.batch_size,
        dtype=DTYPE,
        options=problem.options,
    )


def step_s(plan: Plan | None) -> float | None:
    """Seconds of a step."""
    return plan.prediction.step_s if plan and plan.prediction else None


def devices(plan: Plan) -> set[str]:
    """Who computes."""
    return {name for _, stage in plan.stages() for name in stage.devices}


def mfu(problem: Problem, plan: Plan) -> float:
    """The model's own FLOPs over the peaks of all devices, the idle included."""
    flops = sum(x.forward_flops + x.backward_flops for x in problem.chain.layers)
    peak = sum(
        device.profile.dense_flops_per_s[compute_dtype(DTYPE, device)]
        for device in problem.cluster.devices
    )
    seconds = step_s(plan)
    assert seconds is not None
    return flops * problem.batch_size / seconds / peak
