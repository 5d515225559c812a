"""How many instructions a second the simulator prepares and plays.

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


def main() -> None:
    """Pipelines of 8 stages; CPU time."""
    chain = make_chain(32)
    for microbatches, replicas in ((64, 1), (256, 1), (64, 8)):
        nodes = "abcdefgh"[:replicas]
        pipelines = [(make_stages([4] * 8, prefix=n), microbatches) for n in nodes]
        plan = make_plan(*pipelines)
        machines = cluster(*((n, 8) for n in nodes))
        costs = PlanCosts(plan, chain, machines)
        program = lower(plan, chain, rules=StepRules(), costs=costs, checked=False)
        count = len(program.body)
        start_s = time.process_time()
        with collector_paused():
            steps = Steps(tasks(program, costs, machines))
        made_s = time.process_time()
        for _ in range(10):
            steps.play()
        played_s = time.process_time()
        simulate(program, plan, chain, machines, costs=costs)
        all_s = time.process_time()
        print(
            f"{replicas} x 8 stages x {microbatches} microbatches, {count} "
            f"instructions: {count / (made_s - start_s):,.0f} a second prepared, "
            f"{10 * count / (played_s - made_s):,.0f} played, "
            f"{count / (all_s - played_s):,.0f} in all"
        )


if __name__ == "__main__":
    main()
