"""What losses made of Flax modules have in common."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.errors import UserError

LossFunction = Callable[[Any, Mapping[str, Any], Any], tuple[Any, ...]]
"""``loss(params, batch, keys) -> (sum, weight)`` or with a dict of metrics."""


class ModelError(UserError):
    """A module that cannot be trained as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A variable, no parameter, that a forward pass gave a new value."""

    name: str
    """Its path in the module."""

    kind: str
    """Its type or collection."""

    is_statistic: bool
    """A running average over batches."""


def per_sample(loss: LossFunction) -> LossFunction:
    """``loss`` taken on one sample at a time: every result becomes one a sample."""

    def one(params: Any, sample: Mapping[str, Any], key: Any) -> Any:
        batch_of_one = {name: x[None] for name, x in sample.items()}
        returned = loss(params, batch_of_one, key[None])
        return jax.tree.map(jnp.sum, returned)

    def by_sample(params: Any, batch: Mapping[str, Any], keys: Any) -> Any:
        return jax.vmap(one, in_axes=(None, 0, 0))(params, dict(batch), keys)

    return by_sample


def accepted_by(build: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a builder; of a module class, those of its constructor.

    A class's own signature may be its metaclass's, which takes anything.
    """
    maker = build.__init__ if inspect.isclass(build) else build
    return inspect.signature(maker).parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLoss(abc.ABC):
    """A loss that knows its module: it can make parameters and change its dtype."""

    per_sample: Callable[..., tuple[Any, ...]]
    """``per_sample(model, batch)`` or ``(model, batch, key)``."""

    dtype: str | None = None
    """Compute dtype; None: the module's own."""

    attention: str | None = None
    """Attention implementation (``xla``, ``cudnn``); None: the module's own."""

    random: bool | None = None
    """Whether the module draws random numbers; None: look."""

    scratch: tuple[Any, ...] = ()
    """Variables whose new values may end with the call: NNX types, or names of Linen
    collections."""

    per_microbatch: bool = False
    """The loss may be one of a whole microbatch (``Experiment.per_microbatch``)."""

    def __call__(self, params: Any, batch: Mapping[str, Any], keys: Any) -> Any:
        """The loss of some samples."""

        def on(batch: Mapping[str, Any], key: Any) -> Any:
            return self._apply(params, self._arguments(batch, key), key)

        if not self.uses_keys:
            return on(dict(batch), None)
        if self.per_microbatch:  # its samples are not to be taken apart
            return on(dict(batch), keys[0])
        whole = per_sample(lambda _, batch, keys: on(batch, keys[0]))
        return whole(params, batch, keys)

    @functools.cached_property
    def uses_keys(self) -> bool:
        """Whether samples are taken one at a time, each with its key."""
        return self._wants_key or (self._draws if self.random is None else self.random)

    @property
    def _wants_key(self) -> bool:
        return len(inspect.signature(self.per_sample).parameters) > 2

    def _arguments(self, batch: Mapping[str, Any], key: Any) -> tuple[Any, ...]:
        """What ``per_sample`` is given beside the module."""
        return (batch, key) if self._wants_key else (batch,)

    def variant(
        self,
        *,
        dtype: str | None = None,
        attention: str | None = None,
        per_microbatch: bool | None = None,
    ) -> "ModelLoss":
        """The same model and parameters, computing in another way; None: as before.

        What the module's builder does not offer stays as it is. Asked for again it is
        the same object, which has built its module.
        """
        fields = {
            "dtype": dtype or self.dtype,
            "attention": attention or self.attention,
            "per_microbatch": self.per_microbatch
            if per_microbatch is None
            else per_microbatch,
        }
        key = tuple(fields.values())
        if key not in self._variants:
            self._variants[key] = dataclasses.replace(self, **fields)
        return self._variants[key]

    @functools.cached_property
    def _variants(self) -> "dict[tuple[Any, ...], ModelLoss]":
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of the module once the loss was traced."""
        if not self._statistics:
            return ()
        return (
            f"The running statistics {_listed(self._statistics)} stay as they are "
            "made: training takes those of each microbatch and carries none on. The "
            "loss's statistics(params, batches) gives them for trained parameters.",
        )

    @functools.cached_property
    def _statistics(self) -> dict[str, None]:
        """Running statistics that were seen to be written, in order."""
        return {}

    def _judge(self, written: Sequence[Written]) -> None:
        """Refuses new values that would be lost without a word."""
        others = [x for x in written if not x.is_statistic]
        if others:
            raise ModelError(
                f"Variable {_listed(x.name for x in others)} ({others[0].kind}) is "
                "written in the forward pass, and no step hands its new value to the "
                "next one: samples of a step are computed apart, in no order. Switch "
                "off what writes it (decoding caches, counters); or, if the loss alone "
                f"reads it, name it: scratch=({others[0].kind},)."
            )
        if written and not self.per_microbatch:
            raise ModelError(
                f"Variable {_listed(x.name for x in written)} is a running statistic "
                f"({written[0].kind}): it mixes the samples of a batch, so that the "
                "loss is no sum over samples. Use a norm over features (LayerNorm, "
                "RMSNorm, GroupNorm), or the stored statistics "
                "(use_running_average=True); or set per_microbatch=True: each "
                "microbatch then takes its own, and the running ones stay as they are."
            )
        self._statistics.update(dict.fromkeys(x.name for x in written))

    @abc.abstractmethod
    def statistics(
        self, params: Any, batches: Iterable[Mapping[str, Any]], *, seed: int = 0
    ) -> Any:
        """The running statistics (BatchNorm's) after some batches, as a tree.

        Training carries none on (see ``per_microbatch``). Here one device takes the
        batches one after the other, whole, and the module averages as it does.

        Args:
            params: the tree of parameters.
            batches: dicts of arrays, such as the loss is given.
            seed: where the module draws random numbers, they follow from it.
        """

    @abc.abstractmethod
    def init(self, key: Any) -> Any:
        """Fresh parameters: nested plain dicts of arrays."""

    @abc.abstractmethod
    def abstract_params(self) -> Any:
        """The same tree, as shapes; nothing is computed."""

    @property
    @abc.abstractmethod
    def _draws(self) -> bool:
        """Whether the module seems to draw random numbers."""

    @abc.abstractmethod
    def _apply(self, params: Any, arguments: tuple[Any, ...], key: Any) -> Any:
        """Calls ``per_sample`` on the module holding ``params``."""


def _listed(names: Iterable[str]) -> str:
    """Some names, quoted; the first of many."""
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:3]) + (", ..." if len(quoted) > 3 else "")
