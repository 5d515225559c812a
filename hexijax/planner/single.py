"""The plain program as a plan: one device, one stage, no cut.

Every other plan must give its numbers, and tokens/s are judged against it.
"""

import dataclasses
import math

from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Plan, Prediction, Replica, Stage
from hexijax.planner.estimate import estimate
from hexijax.planner.infeasible import InfeasiblePlanError
from hexijax.planner.mesh import compute_dtype
from hexijax.planner.options import PlanOptions


def single_plan(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    device: str | None = None,
    dtype: str = "float32",
    options: PlanOptions | None = None,
) -> Plan:
    """All layers on one device, in the largest microbatches that fit.

    Args:
      chain: the model.
      cluster: where the device is.
      batch_size: samples of one optimizer step.
      device: its name; None: the cluster's fastest, the first of equals.
      dtype: compute dtype; a kind that lacks it computes in the next it has.
      options: ``max_microbatch_size``, ``remat`` and ``moments`` count.
    """
    options = options or PlanOptions()
    chosen = cluster.device(device or _fastest(cluster, dtype))
    least = math.inf
    for policy in options.remat:
        size = min(batch_size, options.max_microbatch_size or batch_size)
        while size >= 1:
            plan = _plan(chain, cluster, chosen.name, batch_size, size, dtype, policy)
            parts = plan_memory(
                plan,
                chain,
                cluster,
                moments=options.moments,
                whole_leaves=options.whole_leaves,
                temps=options.temps,
            )
            promised = parts[chosen.name].total_bytes
            if promised <= chosen.usable_memory_bytes:
                step_s = estimate(plan, chain, cluster, moments=options.moments).step_s
                return dataclasses.replace(
                    plan,
                    prediction=Prediction(
                        step_s=step_s, memory_bytes={chosen.name: promised}
                    ),
                )
            least = min(least, promised)
            size //= 2
    raise InfeasiblePlanError(
        f"{chain.name} does not fit on {chosen.name} alone: at microbatch 1 and remat "
        f"{options.remat[-1]} it needs {int(least):,} bytes, and a {chosen.kind} has "
        f"{chosen.usable_memory_bytes:,} usable. Use more devices, or a smaller model."
    )


def _fastest(cluster: Cluster, dtype: str) -> str:
    def speed(name: str) -> float:
        device = cluster.device(name)
        return device.profile.dense_flops_per_s[compute_dtype(dtype, device)]

    return max((device.name for device in cluster.devices), key=speed)


def _plan(
    chain: Chain,
    cluster: Cluster,
    device: str,
    batch_size: int,
    size: int,
    dtype: str,
    policy: Remat,
) -> Plan:
    stage = Stage(
        devices=(device,),
        layers=(0, len(chain.layers)),
        dtype=compute_dtype(dtype, cluster.device(device)),
        remat=(policy,) * len(chain.layers),
    )
    replica = Replica(
        stages=(stage,),
        microbatches=-(-batch_size // size),
        microbatch_size=size,
        samples=batch_size,
    )
    return Plan(
        replicas=(replica,),
        batch_size=batch_size,
        chain=chain.fingerprint(),
        cluster=cluster.fingerprint(),
    )
