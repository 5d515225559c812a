"""The plan of a job: one that is given, held against what it is to run, or a new one.

plan.txt | plan.json -> read_plan -> Plan <- new_plan <- chain, cluster
"""

from pathlib import Path

from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.job.intake import plan_options
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, PlanError, checks, serial, text
from hexijax.planner import make_plan


def read_plan(
    file: Path, experiment: Experiment, chain: Chain, cluster: Cluster
) -> Plan:
    """The plan in a plan.txt or plan.json, held against what it is to run."""
    plan = serial.load(file).plan if file.suffix == ".json" else text.read(file)
    check_plan(plan, experiment, chain, cluster, what=f"The plan {file}")
    return plan


def check_plan(
    plan: Plan, experiment: Experiment, chain: Chain, cluster: Cluster, *, what: str
) -> None:
    """Raises a ``PlanError`` where ``plan``, called ``what``, is not for these."""
    checks.check(plan, chain, cluster)
    if experiment.per_microbatch:
        checks.check_whole(plan)
    wanted = experiment.batch_size
    if plan.batch_size != wanted:
        raise PlanError(
            f"{what} is for batches of {plan.batch_size} samples, and "
            f"{experiment.name} asks for {wanted}. Batches are exact under "
            f"every plan: --set batch_size={plan.batch_size}, or plan again."
        )


def new_plan(experiment: Experiment, chain: Chain, cluster: Cluster) -> Plan:
    """The plan the search finds."""
    return make_plan(
        chain,
        cluster,
        batch_size=experiment.batch_size,
        dtype=experiment.dtype,
        options=plan_options(experiment),
    )
