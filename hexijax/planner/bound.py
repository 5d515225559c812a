"""What no plan can beat: every device computes all the time, at its best size.

    Chain, Cluster, batch size -> bound_s -> seconds of a step

No links, no memory, no remat, no optimizer: each device takes whole samples through all
layers alone. A plan's distance to it is what pipelines, links and memory cost.
"""

from hexijax.cluster import Cluster
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.layers.chain import Chain
from hexijax.planner.mesh import compute_dtype


def bound_s(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str,
    kind: str | None = None,
) -> float:
    """The least seconds of a step, on all devices or on those of one kind."""
    rates: dict[str, float] = {}
    total = 0.0
    for device in cluster.devices:
        if kind not in (None, device.kind):
            continue
        if device.kind not in rates:
            shape = MeshShape(
                profile=device.profile, dtype=compute_dtype(dtype, device)
            )
            rates[device.kind] = samples_per_s(chain, shape, batch_size)
        total += rates[device.kind]
    return batch_size / total


def samples_per_s(chain: Chain, shape: MeshShape, most: int) -> float:
    """The best rate of one lane through all layers, over microbatch sizes."""
    return max(
        size / sum(t.total_s() for t in layer_times(chain, shape, size))
        for size in sizes_up_to(most)
    )


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    return sorted({*(2**k for k in range(most.bit_length())), most})
