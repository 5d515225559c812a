"""What no plan can beat: every device computes all the time, at its best size.

    Chain, Cluster, batch size -> bound_s    -> seconds of a step
                               -> least_cost -> of a step, under another objective

No links, no memory, no remat, no optimizer: each device takes whole samples through all
layers alone. A plan's distance to it is what pipelines, links and memory cost. Money
and energy have no use for many devices: there the best kind takes the whole batch.
"""

from hexijax.cluster import Cluster
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.layers.chain import Chain
from hexijax.planner.mesh import compute_dtype
from hexijax.planner.objective import Goal, Objective


def bound_s(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str,
    kind: str | None = None,
) -> float:
    """The least seconds of a step, on all devices or on those of one kind."""
    rates = kind_rates(chain, cluster, batch_size=batch_size, dtype=dtype, kind=kind)
    total = 0.0
    for device in cluster.devices:
        total += rates.get(device.kind, 0.0)
    return batch_size / total


def least_cost(
    chain: Chain, cluster: Cluster, goal: Goal, *, batch_size: int, dtype: str
) -> float:
    """The least that a step costs on any of the devices.

    Whatever computes a sample costs at least what it does at its best rate, never
    waiting: the kind with most samples a dollar, or a joule, is the bound.
    """
    if goal.objective is Objective.STEP:
        return bound_s(chain, cluster, batch_size=batch_size, dtype=dtype)
    rates = kind_rates(chain, cluster, batch_size=batch_size, dtype=dtype)
    return batch_size * min(goal.least_of(k) / rate for k, rate in rates.items())


def kind_rates(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str,
    kind: str | None = None,
) -> dict[str, float]:
    """The best samples a second of a device alone, by kind."""
    rates: dict[str, float] = {}
    for device in cluster.devices:
        if kind in (None, device.kind) and device.kind not in rates:
            shape = MeshShape(
                profile=device.profile, dtype=compute_dtype(dtype, device)
            )
            rates[device.kind] = samples_per_s(chain, shape, batch_size)
    return rates


def samples_per_s(chain: Chain, shape: MeshShape, most: int) -> float:
    """The best rate of one lane through all layers, over microbatch sizes."""
    return max(
        size / sum(t.total_s() for t in layer_times(chain, shape, size))
        for size in sizes_up_to(most)
    )


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    return sorted({*(2**k for k in range(most.bit_length())), most})
