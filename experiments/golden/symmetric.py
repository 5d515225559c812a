"""Symmetric plans: layers, tensor degree and microbatches alike everywhere.

    Problem -> symmetric -> the fastest that fits, or None
    Problem -> closest   -> of those that do not, the one that lacks least

What Megatron runs: every stage has as many layers and cards as any other, every replica
as many microbatches. The grids are those of the ``megatron-style`` baseline; here they
may also be held to use every card, as the published comparisons do.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from experiments.golden.problem import DTYPE, Problem
from hexijax.cluster import Cluster
from hexijax.layers.chain import Remat
from hexijax.plan.plan import Plan
from hexijax.planner.baselines.baseline import all_pools, from_drafts
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block
from hexijax.planner.baselines.draft import Draft
from hexijax.planner.baselines.ground import ground
from hexijax.planner.baselines.megatron import drafts, megatron_style

ROOM_BYTES = 2**41
"""Of every card where memory limits are lifted."""


def lifted(cluster: Cluster) -> Cluster:
    """The cluster with room for anything on every card, as fast as before."""
    profiles = tuple(
        dataclasses.replace(
            profile, nominal_memory_bytes=ROOM_BYTES, usable_memory_bytes=0
        )
        for profile in cluster.profiles
    )
    return dataclasses.replace(cluster, profiles=profiles)


def symmetric(problem: Problem, *, every_card: bool) -> Plan | None:
    """The fastest; ``every_card``: none is left out."""
    options = dataclasses.replace(problem.options, use_all_devices=every_card)
    plan_of = from_drafts(_every_card) if every_card else megatron_style
    return plan_of(
        problem.chain,
        problem.cluster,
        batch_size=problem.batch_size,
        dtype=DTYPE,
        options=options,
    )


def closest(problem: Problem) -> tuple[Plan, dict[str, int]]:
    """What lacks least memory on its fullest card, and what each card must hold."""
    options = dataclasses.replace(
        problem.options, remat=(Remat.FULL,), max_microbatch_size=1
    )
    common = ground(
        problem.chain,
        lifted(problem.cluster),
        batch_size=problem.batch_size,
        dtype=DTYPE,
        options=options,
    )
    composer = Composer(common)
    least: tuple[float, Plan, dict[str, int]] | None = None
    for pool in all_pools(common.yard, options):
        for draft in drafts(composer, pool):
            for sketch in composer.sketches(draft):
                plan = composer.plan(sketch)
                if plan is None:
                    continue
                held = common.judge.memory_bytes(plan)
                lack = max(_share(problem.cluster, *item) for item in held.items())
                if least is None or lack < least[0]:
                    least = lack, plan, held
    assert least, "with room for anything some grid fits"
    return least[1:]


def _share(cluster: Cluster, name: str, num_bytes: int) -> float:
    return num_bytes / cluster.device(name).usable_memory_bytes


def _every_card(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    cards = sum(len(block.devices) for block in pool)
    for draft in drafts(composer, pool):
        if sum(len(mesh.devices) for some in draft.pipelines for mesh in some) == cards:
            yield draft
