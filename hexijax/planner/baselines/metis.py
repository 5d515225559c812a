"""Metis: uneven layers, one tensor and one data degree a stage, equal replicas.

Every kind, or each of two parts of it, cuts its devices into meshes of its own degrees
and gives each replica as many stages as there are meshes for; kinds follow each other
in the pipeline, in each of a few orders. Layers are balanced with measured times,
microbatches are equal.
"""

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence

from hexijax.planner.baselines.baseline import from_drafts, grids
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Mesh, Pipeline, orders
from hexijax.planner.baselines.draft import Draft, Layers, Rules

MOST_FORMS = 200
"""Combinations of degrees that are looked at, the most promising first."""

MOST_KINDS_SPLIT = 2
"""Kinds up to which each may have two parts of unlike data degrees."""

RULES = Rules(layers=Layers.TIMES)
"""One split of layers for all replicas, by measured times."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Form:
    """Stages of each kind in a replica, and how many replicas."""

    bound_s: float
    replicas: int
    parts: tuple[tuple[Sequence[Mesh], int], ...]
    """Meshes of each kind, and how many of them a replica has."""


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """The even grids, and forms by their bound."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield Draft(pipelines=pipelines, rules=RULES)
    for order in orders(pool):
        forms = sorted(_forms(composer, order), key=lambda form: form.bound_s)
        for form in forms[:MOST_FORMS]:
            if form.bound_s > composer.best_s:
                break
            for pipelines in _laid_out(form):
                yield Draft(pipelines=pipelines, rules=RULES)


def _forms(composer: Composer, order: Sequence[Block]) -> Iterator[_Form]:
    kinds: dict[tuple[str, int], list[Block]] = {}
    for block in order:
        kinds.setdefault((block.kind, block.usable_memory_bytes), []).append(block)
    whole = [_cuts(composer, blocks) for blocks in kinds.values()]
    for cuts in itertools.product(*whole):
        yield from _replicated(composer, cuts)
    if len(kinds) > MOST_KINDS_SPLIT:
        return
    for k, blocks in enumerate(kinds.values()):
        for first in sorted({len(blocks) // n for n in (4, 3, 2)} - {0}):
            pairs = _two_cuts(composer, blocks[:first], blocks[first:])
            others = [[(cut,) for cut in cuts] for cuts in whole]
            for parts in itertools.product(*others[:k], pairs, *others[k + 1 :]):
                yield from _replicated(
                    composer, [cut for part in parts for cut in part]
                )


def _replicated(composer: Composer, cuts: Sequence[Sequence[Mesh]]) -> Iterator[_Form]:
    """As many replicas as some cut has meshes for, in 1, 2, 3, ... stages of it."""
    num_layers = len(composer.chain.layers)
    counts = [len(meshes) for meshes in cuts]
    rates = [meshes[0].lanes / composer.sample_s(meshes[0]) for meshes in cuts]
    for replicas in _replica_counts(counts, num_layers, composer.batch_size):
        stages = [count // replicas for count in counts]
        if 0 < sum(stages) <= num_layers:
            rate = sum(map(operator.mul, stages, rates))
            yield _Form(
                bound_s=composer.batch_size / replicas / rate,
                replicas=replicas,
                parts=tuple(
                    (meshes, count)
                    for meshes, count in zip(cuts, stages, strict=True)
                    if count
                ),
            )


def _two_cuts(
    composer: Composer, first: Sequence[Block], rest: Sequence[Block]
) -> list[tuple[list[Mesh], list[Mesh]]]:
    """Two parts of a kind in meshes of one tensor but unlike data degrees."""
    return [
        (a, b)
        for a in _cuts(composer, first)
        for b in _cuts(composer, rest)
        if a[0].shape.tensor == b[0].shape.tensor and a[0].lanes != b[0].lanes
    ]


def _cuts(composer: Composer, blocks: Sequence[Block]) -> list[list[Mesh]]:
    """A kind's devices in meshes of every tensor and data degree."""
    yard = composer.yard
    widest = max(len(block.devices) for block in blocks)
    found: list[list[Mesh]] = []
    for tensor in yard.degrees:
        for lanes in sorted({*_powers(widest // tensor), widest // tensor} - {0}):
            meshes = [m for block in blocks for m in yard.meshes(block, tensor, lanes)]
            if meshes:
                found.append(meshes)
    return found


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]


def _replica_counts(
    counts: Sequence[int], num_layers: int, batch_size: int
) -> list[int]:
    """Counts at which some kind's meshes are used up, or nearly."""
    found = {
        count // stages
        for count in counts
        for stages in range(1, min(count, num_layers) + 1)
    }
    return sorted(n for n in found if n <= batch_size)


def _laid_out(form: _Form) -> Iterator[tuple[Pipeline, ...]]:
    """A replica's stages side by side, or a stage's replicas."""
    near: list[list[Mesh]] = [[] for _ in range(form.replicas)]
    far: list[list[Mesh]] = [[] for _ in range(form.replicas)]
    for meshes, count in form.parts:
        for r in range(form.replicas):
            near[r] += meshes[r * count : (r + 1) * count]
            far[r] += meshes[r : count * form.replicas : form.replicas]
    yield tuple(map(tuple, near))
    if near != far:
        yield tuple(map(tuple, far))


metis_style = from_drafts(drafts)
