"""What losses made of Flax modules have in common."""

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.errors import UserError

LossFunction = Callable[[Any, Mapping[str, Any], Any], tuple[Any, ...]]
"""``loss(params, batch, keys) -> (sum, weight)`` or with a dict of metrics."""


class ModelError(UserError):
    """A module that cannot be trained as it is."""


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

    def __call__(self, params: Any, batch: Mapping[str, Any], keys: Any) -> Any:
        """The loss of some samples."""

        def on(batch: Mapping[str, Any], key: Any) -> Any:
            wants_key = len(inspect.signature(self.per_sample).parameters) > 2
            arguments = (batch, key) if wants_key else (batch,)
            return self._apply(params, arguments, key)

        if not self.uses_keys:
            return on(dict(batch), None)
        whole = per_sample(lambda _, batch, keys: on(batch, keys[0]))
        return whole(params, batch, keys)

    @property
    def uses_keys(self) -> bool:
        """Whether samples are taken one at a time, each with its key."""
        wants_key = len(inspect.signature(self.per_sample).parameters) > 2
        return wants_key or (self._draws if self.random is None else self.random)

    def variant(
        self, *, dtype: str | None = None, attention: str | None = None
    ) -> "ModelLoss":
        """The same model and parameters, computing in another way.

        What the module's builder does not offer stays as it is.
        """
        return dataclasses.replace(
            self, dtype=dtype or self.dtype, attention=attention or self.attention
        )

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
