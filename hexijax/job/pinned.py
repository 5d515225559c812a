"""What a plan needs of host memory against what there is, before any is allocated.

    Plan, Chain, Cluster, Training -> check_host, or a UserError with both numbers

XLA pins host memory for GPUs up to a limit of its own, which is read when JAX starts.
"""

import math
import os
from collections.abc import Mapping

from hexijax.cluster import Cluster
from hexijax.costs.hosts import (
    LIMIT_BYTES,
    LIMIT_VARIABLE,
    POOLED,
    full_host,
    host_bytes,
)
from hexijax.costs.memory import plan_memory
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, PlanError
from hexijax.plan.training import Training


def check_host(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    training: Training,
    *,
    emulate: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Refuses what a host has no room for, or XLA would not pin.

    Args:
      plan: any; the planner's own were held to their hosts already.
      chain: the model it belongs to.
      cluster: what its nodes have.
      training: moments of the optimizer, and whether it cuts leaves.
      emulate: CPU devices stand for the cluster's, where nothing is limited.
      environ: where the limit is set.

    Raises:
      PlanError: a node has less host memory than rests there.
      UserError: it has it, but XLA pins less.
    """
    memory = plan_memory(
        plan,
        chain,
        cluster,
        moments=training.moments,
        whole_leaves=training.whole_leaves,
    )
    if full := full_host(memory, cluster):
        raise PlanError(full)
    if emulate or cluster.on_cpu:
        return
    limit = pinned_limit_bytes(environ)
    for node, num_bytes in host_bytes(memory, cluster).items():
        if num_bytes > limit:
            asked = math.ceil(num_bytes * POOLED / 2**30)
            raise UserError(
                f"The plan rests {num_bytes:,} bytes in pinned host memory on {node}, "
                f"and XLA pins at most {limit:,} there. Set {LIMIT_VARIABLE}={asked} "
                "before JAX starts, or plan with offload=false."
            )


def pinned_limit_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """What XLA pins for GPUs in a process."""
    given = environ.get(LIMIT_VARIABLE, "")
    return int(float(given) * 2**30) if given else LIMIT_BYTES
