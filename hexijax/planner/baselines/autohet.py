"""AutoHet: one tensor degree everywhere, replicas of unlike kinds but like power.

Tensor groups are dealt to replicas by an exact program that makes the weakest replica
as strong as can be (CP-SAT, with kinds as counts); where there are too many for it,
largest first to the weakest. Layers in each replica and the batch over them follow
measured times.
"""

import collections
import heapq
from collections.abc import Iterator, Mapping, Sequence

from hexijax.planner.baselines.baseline import from_drafts, grids, with_lanes
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Mesh, Pipeline, orders
from hexijax.planner.baselines.draft import Batch, Draft, Layers, Rules

MOST_COUNTED = 48
"""Replicas times kinds up to which grouping is an exact program."""

EFFORT = 0.02
"""Deterministic seconds of one such program."""

POWERS = 1000
"""Of the strongest group: power as whole numbers."""

RULES = Rules(layers=Layers.TIMES, batch=Batch.TIMES, common=False)
"""All but the tensor degree follows measured times."""


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """Every degree and number of replicas, in every order of stages."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield _balanced(pipelines)
    for tensor in composer.yard.degrees:
        ordered = [_meshes(composer, order, tensor) for order in orders(pool)]
        for replicas in _replica_counts(ordered[0], composer):
            counts = _grouped(composer, ordered[0], replicas)
            for meshes in ordered if counts else ():
                pipelines = _placed(meshes, counts or [])
                for together in with_lanes(composer.yard, pipelines):
                    yield _balanced(together)


def _meshes(
    composer: Composer, order: Sequence[Block], tensor: int
) -> dict[int, list[Mesh]]:
    """Tensor groups by what they cost."""
    found: dict[int, list[Mesh]] = {}
    for block in order:
        for mesh in composer.yard.meshes(block, tensor):
            found.setdefault(mesh.key, []).append(mesh)
    return found


def _balanced(pipelines: tuple[Pipeline, ...]) -> Draft:
    return Draft(pipelines=pipelines, rules=RULES)


def _replica_counts(
    meshes: Mapping[int, Sequence[Mesh]], composer: Composer
) -> list[int]:
    """All small ones, and those at which groups come out even."""
    total = sum(map(len, meshes.values()))
    num_layers = len(composer.chain.layers)
    found = set(range(1, min(total, 8) + 1))
    for count in (total, *map(len, meshes.values())):
        found |= {count // n for n in range(1, min(count, num_layers, 8) + 1)}
    least = -(-total // num_layers)  # a pipeline has no more stages than layers
    return sorted(n for n in found if least <= n <= composer.batch_size)


def _grouped(
    composer: Composer, meshes: Mapping[int, Sequence[Mesh]], replicas: int
) -> list[dict[int, int]] | None:
    """How many groups of each kind every replica has."""
    from ortools.sat.python import cp_model

    powers = {key: 1 / composer.sample_s(some[0]) for key, some in meshes.items()}
    strongest = max(powers.values())
    whole = {
        key: max(round(power * POWERS / strongest), 1) for key, power in powers.items()
    }
    have = {key: len(some) for key, some in meshes.items()}
    if replicas * len(meshes) > MOST_COUNTED:
        return _dealt(whole, have, replicas)
    model = cp_model.CpModel()
    counts = [
        {key: model.new_int_var(0, count, f"{r}/{key}") for key, count in have.items()}
        for r in range(replicas)
    ]
    power = [sum(whole[key] * count for key, count in some.items()) for some in counts]
    weakest = model.new_int_var(1, POWERS * sum(have.values()), "weakest")
    for key, count in have.items():
        model.add(sum(some[key] for some in counts) == count)
    for r, some in enumerate(power):
        model.add(some >= weakest)
        if r:
            model.add(some <= power[r - 1])  # equals in one order
    for some in counts:
        model.add(sum(some.values()) <= len(composer.chain.layers))
    model.maximize(weakest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would take Ctrl-C for good
    solver.parameters.max_deterministic_time = EFFORT
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [{key: solver.value(n) for key, n in some.items()} for some in counts]


def _dealt(
    powers: Mapping[int, int], have: Mapping[int, int], replicas: int
) -> list[dict[int, int]]:
    """The strongest group first, to the replica that is weakest so far."""
    counts = [collections.Counter[int]() for _ in range(replicas)]
    heap = [(0, r) for r in range(replicas)]
    for key in sorted(have, key=lambda key: -powers[key]):
        for _ in range(have[key]):
            power, r = heapq.heappop(heap)
            counts[r][key] += 1
            heapq.heappush(heap, (power + powers[key], r))
    return [dict(some) for some in counts if some]


def _placed(
    meshes: Mapping[int, Sequence[Mesh]], counts: Sequence[Mapping[int, int]]
) -> list[Pipeline]:
    """Groups in the order of the kinds; neighbours go to one replica."""
    used = collections.Counter[int]()
    found: list[Pipeline] = []
    for some in sorted(counts, key=lambda some: sorted(some.items())):
        pipeline: list[Mesh] = []
        for key, group in meshes.items():
            count = some.get(key, 0)
            pipeline += group[used[key] : used[key] + count]
            used[key] += count
        if pipeline:
            found.append(tuple(pipeline))
    return found


autohet_style = from_drafts(drafts)
