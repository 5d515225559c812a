"""Chains of round figures: what a layer weighs, keeps and hands on is given."""

from collections.abc import Sequence

from hexijax.cluster import Cluster, DeviceProfile
from hexijax.layers.chain import Chain, Group, Leaf
from hexijax.plan import Plan
from tests.plan.examples import make_cluster
from tests.planner.small_cases import weighted_chain

MIB, GIB = 2**20, 2**30


def chain_of(
    weights: Sequence[float],
    *,
    params: int = 64 * 512,
    flops: float = 1e11,
    kept_bytes: int = MIB,
    border_bytes: int = 2**14,
) -> Chain:
    """Layers of these weights.

    Args:
      weights: of FLOPs and of what is kept; equal layers cost the same.
      params: of each layer, in rows of 512.
      flops: forward, of a layer of weight 1, for a sample.
      kept_bytes: what a layer of weight 1 keeps of a sample.
      border_bytes: what it hands on.
    """
    groups = tuple(
        Group(
            name=f"layer/{i}",
            leaves=(
                Leaf(
                    name=f"layer/{i}/kernel",
                    shape=(params // 512, 512),
                    tensor_dim=1,
                ),
            ),
            layers=(i,),
        )
        for i in range(len(weights))
    )
    return weighted_chain(
        "trial",
        groups,
        weights,
        flops=flops,
        kept_bytes=kept_bytes,
        border_bytes=border_bytes,
    )


def kind(
    name: str, *, tflops: float = 10.0, memory_bytes: int = 16 * GIB
) -> DeviceProfile:
    """A card whose memory is as fast as its cores, all of it usable."""
    return DeviceProfile(
        kind=name,
        vendor="cpu",
        nominal_memory_bytes=memory_bytes,
        dense_flops_per_s={"float32": tflops * 1e12},
        memory_bytes_per_s=tflops * 1e11,
        host_link_bytes_per_s=1e10,
    )


def machines(
    *nodes: Sequence[tuple[DeviceProfile, int]], gb_per_s: float = 25.0
) -> Cluster:
    """A cluster of nodes, each of (kind, count)."""
    kinds = {profile.kind: profile for node in nodes for profile, _ in node}
    return make_cluster(
        [[(profile.kind, count) for profile, count in node] for node in nodes],
        tuple(kinds.values()),
        gb_per_s=gb_per_s,
    )


def layers_by_kind(plan: Plan, cluster: Cluster) -> dict[str, int]:
    """Layers that each kind holds, over all replicas."""
    found: dict[str, int] = {}
    for _, stage in plan.stages():
        its = cluster.device(stage.devices[0]).kind
        found[its] = found.get(its, 0) + stage.num_layers
    return found
