"""How many instructions a second are lowered, prepared and played.

python -m tests.simulator.benchmark
"""

import time

from hexijax.collector import collector_paused
from hexijax.costs import PlanCosts
from hexijax.program.lower import StepRules, lower
from hexijax.simulator import simulate
from hexijax.simulator.steps import Steps
from hexijax.simulator.tasks import tasks
from tests.program.examples import make_chain, make_plan, make_stages
from tests.simulator.test_simulator import cluster

CASES = ((8, 64, 1), (8, 256, 1), (8, 64, 8), (100, 200, 1))
"""Stages, microbatches, replicas."""


def main() -> None:
    """Pipelines; CPU time."""
    for stages, microbatches, replicas in CASES:
        nodes = "abcdefgh"[:replicas]
        chain = make_chain(max(32, stages))
        layers = [len(chain.layers) // stages] * stages
        pipelines = [(make_stages(layers, prefix=n), microbatches) for n in nodes]
        plan = make_plan(*pipelines)
        machines = cluster(*((n, stages) for n in nodes))
        costs = PlanCosts(plan, chain, machines)
        began_s = time.process_time()
        program = lower(plan, chain, rules=StepRules(), costs=costs, checked=False)
        start_s = time.process_time()
        count = len(program.body)
        with collector_paused():
            steps = Steps(tasks(program, costs, machines))
        made_s = time.process_time()
        for _ in range(10):
            steps.play()
        played_s = time.process_time()
        simulate(program, plan, chain, machines, costs=costs)
        all_s = time.process_time()
        print(
            f"{replicas} x {stages} stages x {microbatches} microbatches, {count} "
            f"instructions: {count / (start_s - began_s):,.0f} a second lowered, "
            f"{count / (made_s - start_s):,.0f} prepared, "
            f"{10 * count / (played_s - made_s):,.0f} played, "
            f"{count / (made_s - start_s + (played_s - made_s) / 10):,.0f} prepared "
            f"and played, {count / (all_s - played_s):,.0f} simulated, "
            f"{count / (start_s - began_s + all_s - played_s):,.0f} in all"
        )


if __name__ == "__main__":
    main()
