"""How many instructions a second are lowered, prepared and played; CPU time.

python -m tests.simulator.benchmark

"lowered" is with last reads marked, as it runs; "for a search" is without. "in all" is
what a search pays for a plan that is played once, its costs included.
"""

import itertools
import random
import time

from hexijax.collector import collector_paused
from hexijax.costs import PlanCosts
from hexijax.program.lower import StepRules, lower
from hexijax.simulator import predict
from hexijax.simulator.steps import Steps
from hexijax.simulator.tasks import tasks
from tests.program.examples import make_chain, make_plan, make_stages
from tests.simulator.test_fold import heavy
from tests.simulator.test_simulator import cluster

CASES = ((8, 64, 1), (8, 256, 1), (8, 64, 8), (100, 200, 1))
"""Stages, microbatches, replicas."""

TIMES = 3
"""Of which the quickest counts: other work on the machine only adds."""


def measure(stages: int, microbatches: int, replicas: int) -> dict[str, float]:
    """Seconds of each part, and how many instructions there are."""
    nodes = "abcdefgh"[:replicas]
    chain = heavy(make_chain(max(32, stages)), random.Random(0))
    layers = [len(chain.layers) // stages] * stages
    pipelines = [(make_stages(layers, prefix=n), microbatches) for n in nodes]
    plan = make_plan(*pipelines)
    machines = cluster(*((n, stages) for n in nodes))
    rules = StepRules()
    times_s = [time.process_time()]

    def lap() -> None:
        times_s.append(time.process_time())

    costs = PlanCosts(plan, chain, machines)
    program = lower(plan, chain, rules=rules, costs=costs, checked=False)
    lap()
    lower(plan, chain, rules=rules, costs=costs, marked=False, checked=False)
    lap()
    with collector_paused():
        steps = Steps(tasks(program, costs, machines))
    lap()
    steps.play()
    lap()
    predict(plan, chain, machines, events=False, folded=False)
    lap()
    predict(plan, chain, machines, events=False)
    lap()
    parts = ("lowered", "for a search", "prepared", "played", "in all", "folded")
    taken_s = [b - a for a, b in itertools.pairwise(times_s)]
    return {
        "instructions": len(program.body),
        **dict(zip(parts, taken_s, strict=True)),
    }


def main() -> None:
    """Pipelines of several lengths."""
    for case in CASES:
        runs = [measure(*case) for _ in range(TIMES)]
        best = {part: min(run[part] for run in runs) for part in runs[0]}
        folded_s, count = best.pop("folded"), best.pop("instructions")
        best["prepared and played"] = best["prepared"] + best["played"]
        rates = ", ".join(f"{count / s:,.0f} {part}" for part, s in best.items())
        stages, microbatches, replicas = case
        print(
            f"{replicas} x {stages} stages x {microbatches} microbatches, "
            f"{count:,.0f} instructions: a second {rates}; predicted in "
            f"{folded_s * 1e3:,.0f} ms"
        )


if __name__ == "__main__":
    main()
