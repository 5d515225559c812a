"""What a baseline is, and what all of them share: drafts in, the best plan out.

drafts of each pool -> bounds -> sketches -> the judge -> Plan, or None: nothing fits
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Mesh, Pipeline, Yard
from hexijax.planner.baselines.draft import Draft, joined
from hexijax.planner.baselines.finals import Finals
from hexijax.planner.baselines.frontier import Frontier
from hexijax.planner.baselines.ground import ground
from hexijax.planner.options import PlanOptions

BOUND_SLACK = 0.85
"""Of a pool's ideal time: below it no plan of the pool can be, tensor degrees that
compute faster than data parallelism included."""

MOST_SINGLES = 64
"""Replicas up to which lanes are also tried as replicas of their own."""

TOGETHER = 200
"""Drafts whose bounds are compared before any of them is settled."""

MOST_DRAFTS = 2_000
"""Of one pool."""

FIRST_EFFORT = 200
"""Stages settled of each such lot, so that later drafts know what they must beat."""

EFFORT = 1_500
"""Stages settled of a pool when all its drafts are known."""


class Baseline(Protocol):
    """Plans as one published system would."""

    def __call__(
        self,
        chain: Chain,
        cluster: Cluster,
        *,
        batch_size: int,
        dtype: str,
        options: PlanOptions,
    ) -> Plan | None:
        """Its best plan under our costs; None where nothing of its form fits."""
        ...


Pools = Callable[[Yard, PlanOptions], Iterable[Sequence[Block]]]
"""The parts of the cluster a system looks at."""

Drafter = Callable[[Composer, Sequence[Block]], Iterable[Draft]]
"""Yields what a system would consider on some blocks of the cluster."""


def all_pools(yard: Yard, options: PlanOptions) -> Iterable[Sequence[Block]]:
    """Every pool, or the whole cluster where no device may be left out."""
    return yard.pools[:1] if options.use_all_devices else yard.pools


def from_drafts(drafter: Drafter, pools: Pools = all_pools) -> Baseline:
    """The baseline that tries all drafts on all pools."""

    def baseline(
        chain: Chain,
        cluster: Cluster,
        *,
        batch_size: int,
        dtype: str,
        options: PlanOptions,
    ) -> Plan | None:
        common = ground(
            chain, cluster, batch_size=batch_size, dtype=dtype, options=options
        )
        composer = Composer(common)
        frontier = Frontier(composer.sketcher)
        finals = Finals(composer, common.judge)
        for pool in pools(common.yard, options):
            if bound_s(composer, pool) * BOUND_SLACK < composer.best_s:
                drafts = itertools.islice(drafter(composer, pool), MOST_DRAFTS)
                while some := list(itertools.islice(drafts, TOGETHER)):
                    frontier.add(some)
                    finals.add(frontier.settle(FIRST_EFFORT))
                finals.add(frontier.settle(EFFORT))
        return finals.plan()

    return baseline


def bound_s(composer: Composer, pool: Sequence[Block]) -> float:
    """Seconds of a step in which all devices always compute and never wait."""
    rate = sum(
        len(block.devices) / composer.sample_s(composer.yard.meshes(block, 1)[0])
        for block in pool
    )
    return composer.batch_size / rate if rate else float("inf")


def with_lanes(
    yard: Yard, pipelines: Sequence[Pipeline]
) -> Iterator[tuple[Pipeline, ...]]:
    """The pipelines with neighbours joined as lanes; and as they are, if few."""
    together = tuple(joined(yard, pipelines))
    yield together
    if len(together) < len(pipelines) <= MOST_SINGLES:
        yield tuple(pipelines)


def stage_counts(chain: Chain, most: int) -> list[int]:
    """Numbers of stages worth trying: beyond 8, only where stages get shorter."""
    num_layers = len(chain.layers)
    shorter = {-(-num_layers // n): n for n in range(num_layers, 0, -1)}
    return sorted(
        n for n in {*range(1, 9), *shorter.values()} if n <= min(most, num_layers)
    )


def replica_counts(batch_size: int, most: int) -> list[int]:
    """All there is room for, and the most that divide the batch or are a power of 2."""
    most = min(most, batch_size)
    if most < 1:
        return []
    divisor = next(n for n in range(most, 0, -1) if batch_size % n == 0)
    return sorted({most, divisor, 2 ** (most.bit_length() - 1)}, reverse=True)


def grids(composer: Composer, order: Sequence[Block]) -> Iterator[tuple[Pipeline, ...]]:
    """Every even 3D grid on blocks in an order, ranks laid out both ways.

    Stages outermost put the replicas of a stage side by side, replicas outermost the
    stages of a replica.
    """
    made = composer.ground.grids
    if tuple(order) not in made:
        made[tuple(order)] = tuple(_grids(composer, order))
    yield from made[tuple(order)]


def _grids(
    composer: Composer, order: Sequence[Block]
) -> Iterator[tuple[Pipeline, ...]]:
    yard, seen = composer.yard, set[tuple[Pipeline, ...]]()
    for tensor in yard.degrees:
        meshes: list[Mesh] = [m for block in order for m in yard.meshes(block, tensor)]
        for stages in stage_counts(composer.chain, len(meshes)):
            for replicas in replica_counts(composer.batch_size, len(meshes) // stages):
                by_stage = tuple(
                    tuple(meshes[r + s * replicas] for s in range(stages))
                    for r in range(replicas)
                )
                by_replica = tuple(
                    tuple(meshes[r * stages : (r + 1) * stages])
                    for r in range(replicas)
                )
                for pipelines in (by_stage, by_replica):
                    if pipelines not in seen:
                        seen.add(pipelines)
                        yield from with_lanes(yard, pipelines)
