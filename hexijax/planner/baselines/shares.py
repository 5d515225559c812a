"""The global batch over the replicas of a draft.

classes of pipelines, fits of each -> ends -> seconds of the slowest, its calls
pipelines, fits of each class -> taken -> (fit, samples) each, or None
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hexijax.planner.baselines.devices import Pipeline
from hexijax.planner.baselines.draft import Batch, Rules
from hexijax.planner.baselines.fits import Fit
from hexijax.planner.baselines.ways import Classes, Key
from hexijax.planner.batches import end_s, split_batch

FitsByClass = Mapping[Key, Sequence[Fit]]
"""One of the shared size, or one for each of the class's own."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """How the computing part of a step ends."""

    compute_s: float
    """When the last replica is through."""

    microbatches: int
    """Most of a replica."""

    lengths: tuple[int, ...]
    """Layers of each stage of the last replica."""


def ends(
    batch_size: int, rules: Rules, classes: Classes, fits: FitsByClass
) -> Ends | None:
    """Of the best division of the batch by the rule."""
    if rules.batch is Batch.TIMES:
        keys = [key for key, (_, count) in classes.items() for _ in range(count)]
        lists = [[fit.option for fit in fits[key]] for key in keys]
        shares = split_batch(batch_size, lists)
        if shares is None:
            return None
        return Ends(
            compute_s=end_s(shares, lists),
            microbatches=max(share.microbatches for share in shares),
            lengths=_lengths(fits[keys[0]][0]),
        )
    weights = {
        key: weight(rules, pipeline, fits[key][0].option.size)
        for key, (pipeline, _) in classes.items()
    }
    total = sum(weights[key] * count for key, (_, count) in classes.items())
    worst: Ends | None = None
    for key in classes:
        fit = fits[key][0]
        microbatches = num_microbatches(
            batch_size * weights[key] / total, fit.option.size
        )
        compute_s = fit.option.end_s(microbatches)
        if worst is None or compute_s > worst.compute_s:
            worst = Ends(
                compute_s=compute_s, microbatches=microbatches, lengths=_lengths(fit)
            )
    return worst


def taken(
    batch_size: int,
    rules: Rules,
    keyed: Sequence[tuple[Key, Pipeline]],
    fits: FitsByClass,
) -> list[tuple[Fit, int]] | None:
    """The fit and the samples of every replica; None where one would get none."""
    lists = [fits[key] for key, _ in keyed]
    if rules.batch is Batch.TIMES:
        shares = split_batch(batch_size, [[fit.option for fit in x] for x in lists])
        if shares is None:
            return None
        return [
            (some[share.option], share.samples)
            for some, share in zip(lists, shares, strict=True)
        ]
    weights = [
        weight(rules, pipeline, some[0].option.size)
        for (_, pipeline), some in zip(keyed, lists, strict=True)
    ]
    samples = apportion(batch_size, weights)
    if min(samples) < 1:
        return None
    return [(some[0], count) for some, count in zip(lists, samples, strict=True)]


def weight(rules: Rules, pipeline: Pipeline, size: int) -> float:
    """A replica's part of the batch, any scale."""
    if rules.batch is Batch.FLOPS:
        return sum(mesh.peak_flops_per_s for mesh in pipeline)
    return size


def num_microbatches(samples: float, size: int) -> int:
    """As many as samples need; a sum that is a hair above a whole number is that."""
    return max(math.ceil(samples / size - 1e-9), 1)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to weights that sum to the total."""
    scale = total / sum(weights)
    counts = [math.floor(weight * scale) for weight in weights]
    by_rest = sorted(range(len(weights)), key=lambda i: counts[i] - weights[i] * scale)
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _lengths(fit: Fit) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in fit.spans)
