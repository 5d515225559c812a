"""HexiScale: asymmetric pipelines, each with its own stages, degrees and layers.

Two-level grouping. First devices into pipelines of like power: whole blocks together
(fast links inside pipelines), blocks cut across pipelines (fast links between them),
or each kind on its own. Then, in each pipeline, a tensor degree for every kind, stages
in a few orders, and layers by measured times. Microbatches are equal.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from hexijax.planner.baselines.baseline import from_drafts, grids, with_lanes
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Mesh, Pipeline, by_speed, orders
from hexijax.planner.baselines.draft import Draft, Layers, Rules

MOST_DEGREES = 64
"""Combinations of degrees over the kinds of a pool."""

RULES = Rules(layers=Layers.TIMES, common=False)
"""Each pipeline's layers on their own, equal microbatches."""

MOST_FORMS = 100
"""Groupings with their degrees that are laid out, the most promising first."""

Group = tuple[Block, ...]
"""Devices of one pipeline."""

Degrees = Mapping[tuple[str, int], int]
"""Tensor degree by kind and width of part."""


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """Groups, then the degrees of every kind and the order of stages."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield _asymmetric(pipelines)
    forms = [
        (_bound_s(composer, groups, degrees), n, groups, degrees)
        for n, (groups, degrees) in enumerate(_forms(composer, pool))
    ]
    for _, _, groups, degrees in heapq.nsmallest(MOST_FORMS, forms):
        for reverse in (False, True):
            pipelines = [
                _pipeline(composer, group, degrees, reverse=reverse) for group in groups
            ]
            if all(pipelines):
                for together in with_lanes(composer.yard, pipelines):
                    yield _asymmetric(together)


def _forms(
    composer: Composer, pool: Sequence[Block]
) -> Iterator[tuple[list[Group], Degrees]]:
    for groups in _groupings(composer, pool):
        for degrees in _degrees(composer, groups):
            yield groups, degrees


def _bound_s(composer: Composer, groups: Sequence[Group], degrees: Degrees) -> float:
    """Of a step of equal pipelines in which no device ever waits."""
    rates: list[float] = []
    for group in groups:
        cut = [
            composer.yard.meshes(block, degrees[block.kind, len(block.devices)])
            for block in group
        ]
        rates.append(
            sum(len(meshes) / composer.sample_s(meshes[0]) for meshes in cut if meshes)
        )
    slowest = min(rates)
    return composer.batch_size / len(groups) / slowest if slowest else math.inf


def _asymmetric(pipelines: tuple[Pipeline, ...]) -> Draft:
    return Draft(pipelines=pipelines, rules=RULES)


def _groupings(composer: Composer, pool: Sequence[Block]) -> Iterator[list[Group]]:
    """Partitions into pipelines, each once."""
    seen: set[object] = set()
    for cuts in (1, 2, 4, 8):
        parts = _cut(composer, pool, cuts)
        if parts is None:
            break
        for groups in _partitions(composer, parts):
            names = frozenset(
                frozenset(name for block in group for name in block.devices)
                for group in groups
            )
            if names not in seen:
                seen.add(names)
                yield groups


def _cut(composer: Composer, pool: Sequence[Block], cuts: int) -> list[Block] | None:
    """Every block in as many parts; None where no block can be cut further."""
    if cuts > max(len(block.devices) for block in pool):
        return None
    found: list[Block] = []
    for block in pool:
        width = max(len(block.devices) // cuts, 1)
        found += [
            composer.yard.part(block, block.devices[start : start + width])
            for start in range(0, width * min(cuts, len(block.devices)), width)
        ]
    return found


def _partitions(composer: Composer, parts: Sequence[Block]) -> Iterator[list[Group]]:
    """Parts dealt to 1, 2, 3, ... pipelines; then each kind in chunks of one power."""
    most = min(len(parts), composer.batch_size)
    counts = {*range(1, min(most, 8) + 1), *(most // n for n in range(1, 9))} - {0}
    for count in sorted(counts):
        yield _dealt(composer, parts, count)
    kinds: dict[tuple[str, int], list[Block]] = {}
    for part in by_speed(parts):
        kinds.setdefault((part.kind, part.usable_memory_bytes), []).append(part)
    strongest = max(_power(composer, part) for part in parts)
    for scale in (1, 2, 4):
        groups: list[Group] = []
        for some in kinds.values():
            width = round(scale * strongest / _power(composer, some[0]))
            width = min(max(width, 1), len(some))
            groups += [
                tuple(some[start : start + width])
                for start in range(0, len(some) - width + 1, width)
            ]
        yield groups


def _dealt(composer: Composer, parts: Sequence[Block], count: int) -> list[Group]:
    """The strongest part first, to the pipeline that is weakest so far."""
    groups: list[list[Block]] = [[] for _ in range(count)]
    powers = [0.0] * count
    for part in sorted(parts, key=lambda part: -_power(composer, part)):
        weakest = min(range(count), key=lambda g: powers[g])
        groups[weakest].append(part)
        powers[weakest] += _power(composer, part)
    return [tuple(group) for group in groups]


def _power(composer: Composer, block: Block) -> float:
    mesh = composer.yard.meshes(block, 1)[0]
    return len(block.devices) / composer.sample_s(mesh)


def _degrees(composer: Composer, groups: Sequence[Group]) -> Iterator[Degrees]:
    """A degree for each kind and width of part; one for all where that is too many."""
    forms = list(
        dict.fromkeys(
            (block.kind, len(block.devices)) for group in groups for block in group
        )
    )
    choices = [
        [degree for degree in composer.yard.degrees if degree <= width]
        for _, width in forms
    ]
    if math.prod(map(len, choices)) <= MOST_DEGREES:
        for degrees in itertools.product(*choices):
            yield dict(zip(forms, degrees, strict=True))
        return
    for degree in composer.yard.degrees:
        yield {
            form: max(d for d in some if d <= degree)
            for form, some in zip(forms, choices, strict=True)
        }


def _pipeline(
    composer: Composer,
    group: Group,
    degrees: Degrees,
    *,
    reverse: bool,
) -> Pipeline:
    """Stages of one tensor group each, as long as there are layers for them."""
    order = by_speed(group)
    if reverse:
        order.reverse()
    meshes: list[Mesh] = [
        mesh
        for block in order
        for mesh in composer.yard.meshes(block, degrees[block.kind, len(block.devices)])
    ]
    if len(meshes) > len(composer.chain.layers):
        return ()
    return tuple(meshes)


hexiscale_style = from_drafts(drafts)
