"""The loss and metrics of many batches, as one device would give for all their samples.

    batches -> engine.sums -> added by name -> means

Sums and weights are added and divided once: a mean of batches' means would count the
samples of a short last batch, or of one with little weight, too much.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from hexijax.errors import UserError
from hexijax.experiment import Batch, Data
from hexijax.runtime.results import Sums, means

NO_BATCH = (
    "There is no batch to evaluate: the evaluation's data ended before its first. An "
    "iterator can be read once only; give a list of batches, or a Data, whose "
    "batches() starts anew each time."
)


@runtime_checkable
class Evaluator(Protocol):
    """What evaluates a batch: an engine."""

    def sums(self, batch: Batch, number: int) -> Sums:
        """Of a batch of at most the plan's samples, without a gradient."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    means: Mapping[str, float]
    """``loss`` and each metric, over all samples."""

    batches: int
    """Batches it took."""

    samples: int
    """Samples in them."""


def evaluate(
    evaluator: Evaluator, batches: Iterable[Batch], at_most: int | None = None
) -> Evaluation:
    """Evaluates the first ``at_most`` batches, or as many as there are.

    Random keys, where a loss still draws in evaluation, follow from a batch's number
    here: every evaluation of the same batches gives the same.

    Raises:
      UserError: there is no batch, or nothing in them has weight.
    """
    totals: dict[str, tuple[float, float]] = {}
    count = samples = 0
    for batch in itertools.islice(batches, at_most):
        for name, (value, weight) in evaluator.sums(batch, count).items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value, before[1] + weight)
        count += 1
        samples += len(next(iter(batch.values())))
    if not count:
        raise UserError(NO_BATCH)
    if not totals["loss"][1]:
        raise UserError(
            f"The {samples} samples evaluated have weight 0 together: there is nothing "
            "to average over. Look at the weights that the loss returns."
        )
    return Evaluation(
        means=means(totals),
        batches=count,
        samples=samples,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """Batches that can be read again, as a ``Data``."""

    held: Iterable[Batch]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """From the first, each time."""
        del batch_size  # each is evaluated as it is
        return iter(self.held)


def repeatable(given: Data | Iterable[Batch]) -> "Data | _Held":
    """What ``Experiment.eval_data`` takes, from batches that can be read again.

    Raises:
      UserError: they can be read once only.
    """
    if isinstance(given, Data):
        return given
    if iter(given) is given:
        raise UserError(
            f"eval_data is a {type(given).__name__}, which can be read once, and every "
            "evaluation reads it from the beginning. Give a list of batches, or a Data."
        )
    return _Held(given)
