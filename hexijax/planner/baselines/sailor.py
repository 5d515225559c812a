"""Sailor: a tensor degree for each replica within a stage, near-even layers.

For a pace of the pipeline, every kind needs its smallest tensor degree that keeps it
within memory; how many replicas that makes of the devices there are is an exact program
(CP-SAT). All paces, stage counts and microbatch sizes are bounded, the most promising
are solved. Microbatches are equal, and so is everything else of the replicas.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

from hexijax.planner.baselines.baseline import from_drafts, grids, with_lanes
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Mesh, Pipeline, by_speed, orders
from hexijax.planner.baselines.draft import Draft, Rules
from hexijax.planner.layers import Span

MOST_STAGES = 8
"""Stages up to which degrees are chosen replica by replica."""

LAST_SIZE = 64
"""Largest microbatch of a lane."""

MOST_SOLVED = 64
"""Programs of one pool."""

EFFORT = 0.01
"""Deterministic seconds of one such program."""

Kind = tuple[str, int, int]
"""Blocks that differ in their place only."""

Counts = list[dict[tuple[Kind, int], int]]
"""Meshes of every (kind, degree) in each stage."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """A kind's mesh for one stage, and its time."""

    seconds: float
    kind: Kind
    tensor: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """A pace to keep with microbatches of one size."""

    bound_s: float
    """With the most replicas there can be."""

    pace_s: float
    spans: tuple[Span, ...]
    size: int
    within: tuple[Mapping[Kind, int], ...]
    """Degree of each kind in each stage."""

    most: int
    """Replicas, at most."""


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """The even grids, and the most replicas at the most promising paces."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield Draft(pipelines=pipelines)
    blocks: dict[Kind, list[Block]] = {}
    for block in by_speed(pool):
        blocks.setdefault(block.twin, []).append(block)
    seen: set[object] = set()
    solved: dict[object, tuple[Counts, int]] = {}
    programs = 0
    best_s: dict[object, float] = {}
    for asked in sorted(_asked(composer, blocks), key=lambda asked: asked.bound_s):
        if asked.bound_s > composer.best_s:
            return
        # Ends leave borders out, so that only those of one split compare.
        form = asked.spans, asked.size
        if asked.bound_s >= best_s.get(form, math.inf):
            continue
        key = (asked.most, repr(asked.within))  # paces come to the same degrees
        if key not in solved:
            if len(asked.spans) > 1:  # of one stage it is a sum
                if programs == MOST_SOLVED:
                    continue
                programs += 1
            solved[key] = _solve(blocks, asked.within, asked.most)
        counts, replicas = solved[key]
        stages = len(asked.spans)
        end_s = _end_s(composer, replicas, stages, asked.size, asked.pace_s)
        if end_s >= best_s.get(form, math.inf):
            continue
        best_s[form] = end_s
        if (asked.spans, key) not in seen:
            seen.add((asked.spans, key))
            pipelines = _placed(composer, blocks, counts)
            for together in with_lanes(composer.yard, pipelines):
                yield Draft(pipelines=together, rules=Rules(spans=asked.spans))


def _asked(
    composer: Composer, blocks: Mapping[Kind, Sequence[Block]]
) -> Iterator[_Asked]:
    """All paces of all stage counts, splits and microbatch sizes that may do."""
    num_layers = len(composer.chain.layers)
    num_devices = sum(len(b.devices) for some in blocks.values() for b in some)
    for stages in range(1, min(MOST_STAGES, num_layers) + 1):
        members = max(num_devices // stages, 1)
        for spans in near_even(num_layers, stages):
            size = 1
            while size <= LAST_SIZE and size <= composer.batch_size:
                choices = [
                    _choices(composer, blocks, spans, k, size, members)
                    for k in range(stages)
                ]
                if not all(choices):
                    break  # nor is there room for larger ones
                yield from _paces(composer, blocks, spans, size, choices)
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


def _paces(
    composer: Composer,
    blocks: Mapping[Kind, Sequence[Block]],
    spans: tuple[Span, ...],
    size: int,
    choices: Sequence[Sequence[_Choice]],
) -> Iterator[_Asked]:
    """Of the paces that need the same degrees the fastest, while any may do."""
    stages, least_s = len(spans), composer.best_s
    within: list[dict[Kind, int]] = [{} for _ in choices]
    least: dict[Kind, int] = {}
    ever = sum(len(b.devices) for some in blocks.values() for b in some)
    by_pace = sorted(
        (c.seconds, k, c.tensor, c.kind) for k, some in enumerate(choices) for c in some
    )
    for pace_s, some in itertools.groupby(by_pace, key=operator.itemgetter(0)):
        if _end_s(composer, ever // stages, stages, size, pace_s) > least_s:
            return
        changed = False
        for _, k, tensor, kind in some:
            if tensor < within[k].get(kind, tensor + 1):
                changed = True
                within[k][kind] = tensor
                least[kind] = min(tensor, least.get(kind, tensor))
        if not changed or not all(within):
            continue
        meshes = sum(_meshes(blocks[kind], tensor) for kind, tensor in least.items())
        most = min(meshes // stages, composer.batch_size)
        bound_s = _end_s(composer, most, stages, size, pace_s)
        if bound_s <= least_s:
            yield _Asked(
                bound_s=bound_s,
                pace_s=pace_s,
                spans=spans,
                size=size,
                within=tuple(map(dict, within)),
                most=most,
            )


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


def _meshes(blocks: Sequence[Block], tensor: int) -> int:
    """Of a degree, from some blocks."""
    return sum(len(block.devices) // tensor for block in blocks)


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
    from ortools.sat.python import cp_model

    if len(within) == 1:
        (degrees,) = within
        taken = {
            (kind, degree): _meshes(blocks[kind], degree)
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
            room = _meshes(some, widest) * widest
            model.add(sum(count * degree for count, degree in used) <= room)
    model.maximize(replicas)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would take Ctrl-C for good
    solver.parameters.max_deterministic_time = EFFORT
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
