"""What a person hands a Trainer, in the forms that a job takes.

loss(params, batch) -> of_three        iterator, where a run was saved -> placed
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from hexijax.checkpoint import Stand
from hexijax.cluster import Cluster
from hexijax.elastic import Members
from hexijax.errors import UserError, did_you_mean
from hexijax.experiment import Batch, BatchIterator, Experiment
from hexijax.job.loop import Result, Trainee
from hexijax.runtime.results import Sums


class Counted:
    """An engine whose steps are counted as they are dispatched."""

    def __init__(self, engine: Trainee, count: Callable[[int], None]):
        self._engine, self._count = engine, count

    def step(self, batch: Batch, step: int) -> Result:
        """See ``Trainee``."""
        result = self._engine.step(batch, step)
        self._count(step + 1)
        return result

    def sums(self, batch: Batch, number: int) -> Sums:
        """See ``Evaluator``."""
        return self._engine.sums(batch, number)


def placed(
    batches: Iterator[Batch], saved: Stand | None, fingerprint: str | None
) -> Iterator[Batch]:
    """An iterator, put where a resumed run's stood if it can be.

    Args:
        batches: that begins at its beginning.
        saved: the run; None: nothing was resumed.
        fingerprint: of the data behind it, where that is known.

    Raises:
      UserError: the run was trained on other data.
    """
    if saved is None or saved.data_state is None:
        return batches
    was = saved.facts.get("data")
    if fingerprint is not None and was not in (None, fingerprint):
        raise UserError(
            f"The run that was resumed was trained on data {was}, and fit was given "
            f"{fingerprint}: a position in one means nothing in the other. Give the "
            "same data, or an iterator of the new one: data.batches(size)."
        )
    if isinstance(batches, BatchIterator):
        batches.set_state(saved.data_state)
    return batches


def elastic_members(
    cluster: Cluster, names: Sequence[str] | None, plan: object
) -> Members:
    """Those who take part from the start; None: all nodes.

    Raises:
      UserError: nobody can go or come.
    """
    if len(cluster.nodes) < 2 or plan == "single":
        why = "the plain program has one device"
        if len(cluster.nodes) < 2:
            why = f"cluster {cluster.name!r} has one node"
        raise UserError(
            f"The Trainer was given elastic={names or True}, and {why}: if that goes, "
            "nobody is left. Give it a cluster of more nodes and let it plan, or leave "
            "elastic out: what is saved can be resumed anywhere."
        )
    return Members(cluster, names)


def position(iterator: Iterator[Batch]) -> Callable[[], Any]:
    """Gives where an iterator stands, if it knows."""
    if isinstance(iterator, BatchIterator):
        return iterator.get_state
    return lambda: None


def of_three(loss: Any) -> Any:
    """``loss(params, batch)`` as ``loss(params, batch, keys)``; others as they are."""
    if not callable(loss):
        raise UserError(
            f"The Trainer's loss is a {type(loss).__name__}; it must be a function, "
            "loss(params, batch, keys) -> (sum, weight)."
        )
    try:
        parameters = inspect.signature(loss).parameters.values()
    except ValueError:  # it does not tell
        return loss
    kinds = [p.kind for p in parameters if p.default is p.empty]
    takes = [inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if len(kinds) != 2 or not all(kind in takes for kind in kinds):
        return loss

    @functools.wraps(loss)
    def with_keys(params: Any, batch: Batch, keys: Any) -> Any:
        del keys
        return loss(params, batch)

    return with_keys


def zeros_like(shapes: Any, key: Any) -> Any:
    """A tree like ``shapes``; traced on shapes alone."""
    del key
    return jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), shapes)


def checked_rules(rules: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rules``, all of which are fields of an Experiment.

    Raises:
      UserError: one is not, or is fit's.
    """
    not_rules = {"loss", "init", "data", "steps", "eval_every", "eval_data"}
    not_rules |= {"eval_batches", "eval_ends"}
    known = {f.name for f in dataclasses.fields(Experiment)} - not_rules
    for name in rules:
        if name not in known:
            where = " It is for fit to know." if name in not_rules else ""
            raise UserError(
                f"The Trainer has no argument {name!r}."
                f"{where or did_you_mean(name, known)} It takes the fields of an "
                f"Experiment: {', '.join(sorted(known))}."
            )
    return rules
