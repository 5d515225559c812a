"""Metis: uneven layers, one tensor and one data degree a stage, equal replicas.

Every kind, or each of two parts of it, cuts its devices into meshes of its own degrees
and gives each replica as many stages as there are meshes for; kinds follow each other
in the pipeline, in each of a few orders. Layers are balanced with measured times,
microbatches are equal.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from hexijax.planner.baselines.baseline import from_drafts, grids
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block, Mesh, Pipeline, orders
from hexijax.planner.baselines.draft import Draft, Layers, Rules

MOST_FORMS = 200
"""Combinations of degrees and replicas that are laid out, the most promising first."""

MOST_COMBINED = 2_000
"""Combinations of degrees that are bounded."""

MOST_KINDS_SPLIT = 2
"""Kinds up to which each may have two parts of unlike data degrees."""

RULES = Rules(layers=Layers.TIMES)
"""One split of layers for all replicas, by measured times."""


_Cut = Sequence[Mesh]
"""A kind's devices, or some, as meshes of one shape."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Form:
    """Stages of each kind in a replica, and how many replicas."""

    bound_s: float
    replicas: int
    parts: tuple[tuple[_Cut, int], ...]
    """Meshes of each kind, and how many of them a replica has."""


def drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """The even grids, and forms by their bound."""
    for order in orders(pool):
        for pipelines in grids(composer, order):
            yield Draft(pipelines=pipelines, rules=RULES)
    for order in orders(pool):
        for form in _forms(composer, order):
            if form.bound_s > composer.best_s:
                break
            for pipelines in _laid_out(form):
                yield Draft(pipelines=pipelines, rules=RULES)


def _forms(composer: Composer, order: Sequence[Block]) -> list[_Form]:
    """The most promising, whole kinds or two parts of each."""
    kinds: dict[tuple[str, int], list[Block]] = {}
    for block in order:
        kinds.setdefault((block.kind, block.usable_memory_bytes), []).append(block)
    whole = [_cuts(composer, blocks) for blocks in kinds.values()]
    found = _replicated(composer, _combined(whole))
    if len(kinds) <= MOST_KINDS_SPLIT:
        for k, blocks in enumerate(kinds.values()):
            for first in sorted({len(blocks) // n for n in (4, 3, 2)} - {0}):
                pairs = _two_cuts(composer, blocks[:first], blocks[first:])
                others = [[(cut,) for cut in cuts] for cuts in whole]
                parted = itertools.product(*others[:k], pairs, *others[k + 1 :])
                found += _replicated(
                    composer,
                    [[cut for part in parts for cut in part] for parts in parted],
                )
    return heapq.nsmallest(MOST_FORMS, found, key=lambda form: form.bound_s)


def _combined(choices: Sequence[Sequence[_Cut]]) -> list[Sequence[_Cut]]:
    """A cut for each kind; of too many, those in which all but one kind are alike."""
    if math.prod(map(len, choices)) <= MOST_COMBINED:
        return list(itertools.product(*choices))
    found: dict[tuple[int, ...], Sequence[_Cut]] = {}
    for form in {
        (cut[0].shape.tensor, cut[0].lanes) for some in choices for cut in some
    }:
        alike = [min(some, key=lambda cut: _distance(cut, form)) for some in choices]
        for k, some in enumerate(choices):
            for cut in some:
                cuts = [*alike[:k], cut, *alike[k + 1 :]]
                found[tuple(map(id, cuts))] = cuts
    return list(found.values())


def _distance(cut: _Cut, form: tuple[int, int]) -> float:
    """How far a cut is from a tensor degree and lanes."""
    pairs = zip((cut[0].shape.tensor, cut[0].lanes), form, strict=True)
    return sum(abs(math.log(a / b)) for a, b in pairs)


def _replicated(composer: Composer, combined: Sequence[Sequence[_Cut]]) -> list[_Form]:
    """As many replicas as some cut has meshes for, in 1, 2, 3, ... stages of it.

    Arrays: C combinations, R numbers of replicas, K cuts of one.
    """
    if not combined:
        return []
    num_layers, batch_size = len(composer.chain.layers), composer.batch_size
    counts_CK = np.array([[len(cut) for cut in cuts] for cuts in combined])
    rates_CK = np.array(
        [
            [cut[0].lanes / composer.sample_s(cut[0]) for cut in cuts]
            for cuts in combined
        ]
    )
    replicas_R = np.array(
        _replica_counts(np.unique(counts_CK).tolist(), num_layers, batch_size)
    )
    stages_CRK = counts_CK[:, None, :] // replicas_R[:, None]
    total_CR = stages_CRK.sum(axis=2)
    # More replicas of as many stages each are better.
    most_CR = (counts_CK[:, None, :] // np.maximum(stages_CRK, 1)).min(
        axis=2, where=stages_CRK > 0, initial=batch_size
    )
    rate_CR = (stages_CRK * rates_CK[:, None, :]).sum(axis=2) * replicas_R
    possible_CR = (total_CR > 0) & (total_CR <= num_layers) & (most_CR == replicas_R)
    # No stage is shorter than a layer.
    layer_s_CRK = np.where(stages_CRK > 0, 1 / rates_CK[:, None, :] / num_layers, 0.0)
    sample_s_CR = np.maximum(
        1 / np.where(possible_CR, rate_CR, 1.0), layer_s_CRK.max(axis=2) / replicas_R
    )
    bound_s_CR = np.where(possible_CR, batch_size * sample_s_CR, np.inf)
    found: list[_Form] = []
    for at in np.argsort(bound_s_CR, axis=None, kind="stable")[:MOST_FORMS]:
        c, r = divmod(int(at), len(replicas_R))
        if not possible_CR[c, r]:
            break
        parts = zip(combined[c], stages_CRK[c, r].tolist(), strict=True)
        found.append(
            _Form(
                bound_s=float(bound_s_CR[c, r]),
                replicas=int(replicas_R[r]),
                parts=tuple((cut, count) for cut, count in parts if count),
            )
        )
    return found


def _two_cuts(
    composer: Composer, first: Sequence[Block], rest: Sequence[Block]
) -> list[tuple[_Cut, _Cut]]:
    """Two parts of a kind in meshes of one tensor but unlike data degrees."""
    return [
        (a, b)
        for a in _cuts(composer, first)
        for b in _cuts(composer, rest)
        if a[0].shape.tensor == b[0].shape.tensor and a[0].lanes != b[0].lanes
    ]


def _cuts(composer: Composer, blocks: Sequence[Block]) -> list[_Cut]:
    """A kind's devices in meshes of every tensor and data degree."""
    yard = composer.yard
    widest = max(len(block.devices) for block in blocks)
    found: list[_Cut] = []
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
