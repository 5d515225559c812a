"""Sailor: a tensor degree for each replica within a stage, near-even layers.

For a pace of the pipeline, every kind needs its smallest tensor degree that keeps it
within memory; how many replicas that makes of the devices there are is an exact program
(CP-SAT). All paces, stage counts and microbatch sizes are tried. Microbatches are
equal, and so is everything else of the replicas.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ortools.sat.python import cp_model

from hexijax.planner.baselines.baseline import from_drafts, grids, with_lanes
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Mesh, Pipeline, by_speed, orders
from hexijax.planner.baselines.draft import Draft, Rules
from hexijax.planner.layers import Span

MOST_STAGES = 8
"""Stages up to which degrees are chosen replica by replica."""

LAST_SIZE = 64
"""Largest microbatch of a lane."""

Kind = tuple[str, int, int]
"""Blocks that differ in their place only."""

Counts = list[dict[tuple[Kind, int], int]]
"""Meshes of every (kind, degree) in each stage."""

Solved = dict[object, tuple[Counts, int]]
"""Counts and replicas by what they were asked for: paces come to the same degrees."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """A kind's mesh for one stage, and its time."""

    seconds: float
    kind: Kind
    tensor: int


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """The most replicas at every pace, and the even grids."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield Draft(pipelines=pipelines)
    blocks: dict[Kind, list[Block]] = {}
    for block in by_speed(pool):
        blocks.setdefault(block.twin, []).append(block)
    num_devices = sum(len(block.devices) for block in pool)
    seen: set[object] = set()
    solved: Solved = {}
    for stages in range(1, min(MOST_STAGES, len(composer.chain.layers)) + 1):
        for spans in near_even(len(composer.chain.layers), stages):
            size = 1
            while size <= LAST_SIZE and size <= composer.batch_size:
                members = max(num_devices // stages, 1)
                for counts in _counts(composer, blocks, spans, size, members, solved):
                    key = (spans, repr(counts))
                    if key in seen:
                        continue
                    seen.add(key)
                    pipelines = _placed(composer, blocks, counts)
                    for together in with_lanes(composer.yard, pipelines):
                        yield Draft(pipelines=together, rules=Rules(spans=spans))
                size *= 2


def near_even(num_layers: int, stages: int) -> list[tuple[Span, ...]]:
    """Even splits of all layers, also with a layer more or less at the ends.

    The first and the last stage have the embedding and the head to bear besides.
    """
    found: dict[tuple[Span, ...], None] = {}
    for first, last in ((0, 0), (0, 1), (1, 0), (1, 1), (-1, 0), (0, -1)):
        inner = num_layers + first + last
        edges = [i * inner // stages - first for i in range(stages + 1)]
        edges[0], edges[-1] = 0, num_layers
        spans = tuple(itertools.pairwise(edges))
        if all(start < stop for start, stop in spans):
            found[spans] = None
    return list(found)


def _counts(
    composer: Composer,
    blocks: Mapping[Kind, Sequence[Block]],
    spans: tuple[Span, ...],
    size: int,
    members: int,
    solved: Solved,
) -> Iterator[Counts]:
    """Meshes of every (kind, degree) in each stage, at the pace that ends first."""
    choices = [
        _choices(composer, blocks, spans, k, size, members) for k in range(len(spans))
    ]
    if not all(choices):
        return
    start_s = max(min(c.seconds for c in some) for some in choices)
    paces_s = sorted({c.seconds for some in choices for c in some})
    best_s, best = composer.best_s, None
    for pace_s in paces_s:
        if pace_s < start_s:
            continue
        within = [_smallest(some, pace_s) for some in choices]
        most = _most_replicas(blocks, within)
        if _end_s(composer, most, len(spans), size, pace_s) >= best_s:
            continue
        most = min(most, composer.batch_size)
        key = (most, tuple(tuple(degrees.items()) for degrees in within))
        if key not in solved:
            solved[key] = _solve(blocks, within, most)
        counts, replicas = solved[key]
        end_s = _end_s(composer, replicas, len(spans), size, pace_s)
        if end_s < best_s:
            best_s, best = end_s, counts
    if best:
        yield best


def _choices(
    composer: Composer,
    blocks: Mapping[Kind, Sequence[Block]],
    spans: tuple[Span, ...],
    k: int,
    size: int,
    members: int,
) -> list[_Choice]:
    found: list[_Choice] = []
    for kind, some in blocks.items():
        for tensor in composer.yard.degrees:
            meshes = composer.yard.meshes(some[0], tensor)
            if not meshes:
                continue
            seconds = composer.stage_s(
                meshes[0], spans, k, size, max(members // tensor, 1)
            )
            if seconds is not None:
                found.append(_Choice(seconds=seconds, kind=kind, tensor=tensor))
    return found


def _smallest(choices: Sequence[_Choice], pace_s: float) -> dict[Kind, int]:
    """The smallest degree of each kind that keeps the pace."""
    found: dict[Kind, int] = {}
    for choice in choices:
        if choice.seconds <= pace_s:
            found[choice.kind] = min(
                choice.tensor, found.get(choice.kind, choice.tensor)
            )
    return found


def _room(blocks: Sequence[Block], tensor: int) -> int:
    """Devices of some blocks that meshes of a degree can use."""
    return sum(len(block.devices) // tensor * tensor for block in blocks)


def _most_replicas(
    blocks: Mapping[Kind, Sequence[Block]], within: Sequence[Mapping[Kind, int]]
) -> int:
    """No more than if each kind worked at its least degree of any stage."""
    least = collections.Counter[Kind]()
    for degrees in within:
        for kind, degree in degrees.items():
            least[kind] = min(degree, least.get(kind, degree))
    meshes = sum(_room(blocks[kind], degree) / degree for kind, degree in least.items())
    return int(meshes / len(within))


def _end_s(
    composer: Composer, replicas: int, stages: int, size: int, pace_s: float
) -> float:
    if not replicas:
        return math.inf
    microbatches = -(-composer.batch_size // (replicas * size))
    return (microbatches + stages - 1) * pace_s


def _solve(
    blocks: Mapping[Kind, Sequence[Block]],
    within: Sequence[Mapping[Kind, int]],
    most: int,
) -> tuple[Counts, int]:
    """How many replicas of a stage each kind computes, so that there are most."""
    if len(within) == 1:
        (degrees,) = within
        taken = {
            (kind, degree): _room(blocks[kind], degree) // degree
            for kind, degree in degrees.items()
        }
        return [taken], min(sum(taken.values()), most)
    model = cp_model.CpModel()
    replicas = model.new_int_var(0, most, "replicas")
    counts = [
        {kind: model.new_int_var(0, most, f"{k}{kind}") for kind in degrees}
        for k, degrees in enumerate(within)
    ]
    for some in counts:
        model.add(sum(some.values()) == replicas)
    for kind, some in blocks.items():
        used = [
            (counts[k][kind], degrees[kind])
            for k, degrees in enumerate(within)
            if kind in degrees
        ]
        if used:
            widest = max(degree for _, degree in used)
            model.add(
                sum(count * degree for count, degree in used) <= _room(some, widest)
            )
    model.maximize(replicas)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would take Ctrl-C for good
    solver.parameters.max_deterministic_time = 0.05
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [], 0
    return [
        {(kind, within[k][kind]): solver.value(count) for kind, count in some.items()}
        for k, some in enumerate(counts)
    ], solver.value(replicas)


def _placed(
    composer: Composer,
    blocks: Mapping[Kind, Sequence[Block]],
    counts: Sequence[Mapping[tuple[Kind, int], int]],
) -> list[Pipeline]:
    """Counts as meshes, the widest first; replica j of a stage feeds j of the next."""
    left = {id(b): list(b.devices) for some in blocks.values() for b in some}
    wanted = [
        (degree, kind, k, count)
        for k, some in enumerate(counts)
        for (kind, degree), count in some.items()
    ]
    stages: list[dict[Kind, list[Mesh]]] = [{} for _ in counts]
    for degree, kind, k, count in sorted(wanted, key=lambda w: (-w[0], w[2])):
        found = stages[k].setdefault(kind, [])
        for block in blocks[kind]:
            names = left[id(block)]
            while len(found) < count and len(names) >= degree:
                part = composer.yard.part(block, tuple(names[:degree]))
                del names[:degree]
                found.append(composer.yard.meshes(part, degree)[0])
    rows = [[mesh for kind in blocks for mesh in some.get(kind, [])] for some in stages]
    return list(zip(*rows, strict=False))


sailor_style = from_drafts(drafts)
