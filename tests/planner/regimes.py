"""Every plan of few devices whose replicas are one stage each, under every regime.

    Cluster, Chain -> one_stage_plans -> (Plan, ...)

Over grouping, lanes, samples, microbatch size and count of each replica, schedule,
parameters kept or freed and borders on the device or on the host; every layer a segment
of its own and computed again, state even. It shares the simulator and the costs with
the planner and none of its decisions.
"""

import itertools
from collections.abc import Iterator, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.hosts import full_host
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Memory, Params, Plan, Replica, Schedule, Stage
from hexijax.simulator import predict
from tests.planner.bounds import Mesh
from tests.planner.enumeration import counts, distinct_layouts

REGIMES = (
    (Schedule.ONE_F_ONE_B, Params.KEPT, Memory.DEVICE),
    *itertools.product((Schedule.LAYERED,), Params, Memory),
)
REGIMES = tuple(r for r in REGIMES if r[1] is not Params.STREAMED)


def one_stage_plans(chain: Chain, cluster: Cluster, batch_size: int) -> Iterator[Plan]:
    """All of them; whether they fit is not asked."""
    for layout in distinct_layouts(cluster, chain):
        meshes = [replica[0] for replica in layout]
        if any(len(r) > 1 or r[0].tensor > 1 for r in layout):
            continue
        for samples in _sums(batch_size, len(meshes)):
            sizes = [counts(n, m.lanes) for n, m in zip(samples, meshes, strict=True)]
            for chosen in itertools.product(*sizes):
                for regime in REGIMES:
                    replicas = tuple(
                        _replica(chain, mesh, n, each, regime)
                        for mesh, n, each in zip(meshes, samples, chosen, strict=True)
                    )
                    yield Plan(
                        replicas=replicas, batch_size=batch_size, schedule=regime[0]
                    )


def best_s(chain: Chain, cluster: Cluster, batch_size: int, below_s: float) -> float:
    """The least step of all that fit, if it is below a step."""
    best = below_s
    for plan in one_stage_plans(chain, cluster, batch_size):
        memory = plan_memory(plan, chain, cluster)
        if full_host(memory, cluster) or any(
            parts.total_bytes > cluster.device(name).usable_memory_bytes
            for name, parts in memory.items()
        ):
            continue
        best = min(best, predict(plan, chain, cluster, events=False).step_s)
    return best


def _replica(
    chain: Chain,
    mesh: Mesh,
    samples: int,
    chosen: tuple[int, int],
    regime: tuple[Schedule, Params, Memory],
) -> Replica:
    number, (microbatches, size) = len(chain.layers), chosen
    stage = Stage(
        devices=mesh.devices,
        layers=(0, number),
        lanes=mesh.lanes,
        segments=(1,) * number,
        remat=(Remat.FULL,) * number,
        params=(regime[1],) * number,
        waits=(regime[2],) * number,
    )
    return Replica(
        stages=(stage,),
        microbatches=microbatches,
        microbatch_size=size,
        samples=samples,
    )


def _sums(total: int, parts: int) -> Iterator[Sequence[int]]:
    """Whole numbers above 0 that sum to a total."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _sums(total - first, parts - 1):
            yield (first, *rest)
