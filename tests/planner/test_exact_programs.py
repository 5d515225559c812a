"""Larger clusters, where a dynamic program knows the best plan of one form.

Equal devices in one pipeline: the layers' longest stage is made as short as can be, for
every microbatch size. Unlike devices that each hold the model: the batch is divided so
that the last ends as early as can be. Links are fast, so that nothing else decides.
"""

import itertools
import math
import random
from collections.abc import Callable

import pytest

from hexijax.cluster import Cluster, DeviceGroup, LinkProfile, Links, Node
from hexijax.costs import MeshShape, layer_times
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.planner import Grouping, PlanOptions, make_plan
from hexijax.simulator import predict
from tests.plan.examples import make_kind
from tests.planner.enumeration import counts
from tests.planner.small_cases import small_chain

GIB = 2**30
FEW, MANY = range(2), range(30)
Record = Callable[[str, object], None]


def cluster_of(kinds: list[str], rates: dict[str, float]) -> Cluster:
    """A node a device, all a fast link apart."""
    return Cluster(
        name="drawn",
        nodes=tuple(
            Node(
                name=f"n{i}",
                devices=(DeviceGroup(kind=kind, count=1),),
                host_memory_bytes=64 * GIB,
                host_cores=8,
            )
            for i, kind in enumerate(kinds)
        ),
        links=Links(between_nodes=LinkProfile(latency_s=1e-6, bytes_per_s=1e12)),
        profiles=tuple(
            make_kind(kind, tflops=rate, memory_bytes=512 * GIB)
            for kind, rate in rates.items()
        ),
    )


def seconds(chain: Chain, cluster: Cluster, device: str, size: int) -> list[float]:
    """Forward and backward of each layer for a microbatch."""
    shape = MeshShape(profile=cluster.device(device).profile, dtype="float32")
    return [t.total_s(Remat.NONE) for t in layer_times(chain, shape, size)]


def shortest_longest(weights: list[float], parts: int) -> list[int]:
    """Edges of the split whose heaviest part is lightest: exact, by its prefixes."""
    total = [0.0, *itertools.accumulate(weights)]
    none = (math.inf, [0])
    best = {(0, 0): (0.0, [0])}
    for part in range(1, parts + 1):
        for stop in range(part, len(weights) + 1):
            best[part, stop] = min(
                (max(before, total[stop] - total[start]), [*edges, stop])
                for start in range(part - 1, stop)
                for before, edges in [best.get((part - 1, start), none)]
            )
    return best[parts, len(weights)][1]


def pipeline_ratio(seed: int) -> float:
    """The planner's step over the dynamic program's."""
    rng = random.Random(seed)
    num_devices, batch_size = rng.randint(5, 8), rng.randint(12, 24)
    chain = small_chain(rng, rng.randint(12, 20))
    cluster = cluster_of(["fast"] * num_devices, {"fast": 50.0})
    steps = []
    for microbatches, size in counts(batch_size, 1):
        weights = seconds(chain, cluster, "n0/0", size)
        edges = shortest_longest(weights, num_devices)
        stages = tuple(
            Stage(devices=(f"n{k}/0",), layers=span)
            for k, span in enumerate(itertools.pairwise(edges))
        )
        replica = Replica(
            stages=stages,
            microbatches=microbatches,
            microbatch_size=size,
            samples=batch_size,
        )
        plan = Plan(replicas=(replica,), batch_size=batch_size)
        steps.append(predict(plan, chain, cluster).step_s)
    options = PlanOptions(
        grouping=Grouping.ONE,
        remat=(Remat.NONE,),
        layers_per_segment=len(chain.layers),
        use_all_devices=True,
    )
    ours = make_plan(chain, cluster, batch_size=batch_size, options=options)
    return predict(ours, chain, cluster).step_s / min(steps)


def batch_ratio(seed: int) -> float:
    """The same for one-stage replicas."""
    rng = random.Random(seed)
    rates = {f"k{i}": rng.uniform(10, 80) for i in range(rng.randint(2, 4))}
    kinds = [rng.choice(list(rates)) for _ in range(rng.randint(5, 8))]
    batch_size = rng.randint(20, 48)
    chain = small_chain(rng, rng.randint(3, 8))
    cluster = cluster_of(kinds, rates)
    best: dict[int, tuple[float, tuple[Replica, ...]]] = {0: (0.0, ())}
    for device in cluster.devices:
        alone = _alone(chain, cluster, device.name, batch_size)
        best = {
            total: min(
                (
                    (max(before, alone[n][0]), (*replicas, alone[n][1]))
                    for n in alone
                    if total - n in best
                    for before, replicas in [best[total - n]]
                ),
                key=lambda found: found[0],
            )
            for total in range(1, batch_size + 1)
            if any(total - n in best for n in alone)
        }
    plan = Plan(replicas=best[batch_size][1], batch_size=batch_size)
    options = PlanOptions(
        grouping=Grouping.MESH,
        remat=(Remat.NONE,),
        layers_per_segment=len(chain.layers),
        use_all_devices=True,
    )
    ours = make_plan(chain, cluster, batch_size=batch_size, options=options)
    ours_s, best_s = (predict(p, chain, cluster).step_s for p in (ours, plan))
    return ours_s / best_s


def _alone(
    chain: Chain, cluster: Cluster, device: str, most: int
) -> dict[int, tuple[float, Replica]]:
    """For each number of samples, how soon a device is through, and how."""
    stage = Stage(devices=(device,), layers=(0, len(chain.layers)))
    found = {}
    for samples in range(1, most + 1):
        found[samples] = min(
            (
                (
                    microbatches * sum(seconds(chain, cluster, device, size)),
                    Replica(
                        stages=(stage,),
                        microbatches=microbatches,
                        microbatch_size=size,
                        samples=samples,
                    ),
                )
                for microbatches, size in counts(samples, 1)
            ),
            key=lambda choice: (choice[0], choice[1].microbatches),
        )
    return found


@pytest.mark.parametrize("ratio", [pipeline_ratio, batch_ratio])
@pytest.mark.parametrize(
    "seeds", [pytest.param(FEW), pytest.param(MANY, marks=pytest.mark.laws)]
)
def test_no_slower_than_the_dynamic_program(
    ratio: Callable[[int], float], seeds: range, record_property: Record
):
    ratios = {seed: ratio(seed) for seed in seeds}
    worst = max(ratios, key=lambda seed: ratios[seed])
    equal = sum(r <= 1 + 1e-9 for r in ratios.values())
    record_property(
        ratio.__name__, f"{len(ratios)} cases, no slower in {equal}, worst "
        f"{ratios[worst]:.4f} (seed {worst})"
    )  # fmt: skip
    assert ratios[worst] <= 1.02


def test_the_dynamic_program_meets_brute_force():
    rng = random.Random(0)
    for _ in range(50):
        weights = [rng.uniform(0.2, 2) for _ in range(rng.randint(2, 8))]
        parts = rng.randint(1, len(weights))
        edges = shortest_longest(weights, parts)
        assert edges[0] == 0
        assert edges[-1] == len(weights)
        longest = max(sum(weights[a:b]) for a, b in itertools.pairwise(edges))
        inner = itertools.combinations(range(1, len(weights)), parts - 1)
        least = min(
            max(
                sum(weights[a:b])
                for a, b in itertools.pairwise((0, *cut, len(weights)))
            )
            for cut in inner
        )
        assert math.isclose(longest, least)
