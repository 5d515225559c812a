"""Losses: the one form hexijax trains, and helpers that make it of Flax modules.

    loss(params, batch, keys) -> (sum, weight) or (sum, weight, metrics)

``batch`` is a dict of arrays whose dim 0 is the sample (B of them), ``keys`` one typed
key a sample. ``sum`` and ``weight`` are numbers by sample, (B,), or already summed, ().
The loss people see is all sums over all weights. A metric is such a sum, divided by the
same weight, or a pair (sum, weight) of its own.

    loss = nnx_loss(lambda dtype: GPT(config, dtype=dtype, rngs=nnx.Rngs(0)), by_sample)

``by_sample(model, batch)`` gets the callable module and returns the form above. Where a
model draws random numbers (dropout), it is called on one sample at a time under `vmap`,
with that sample's key: the draw then does not depend on the microbatch around it.
"""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen, nnx

from hexijax.errors import UserError
from hexijax.layers import names

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


def nnx_loss(
    build: Callable[..., Any],
    per_sample: Callable[..., tuple[Any, ...]],
    *,
    random: bool | None = None,
    dtype: str | None = None,
    attention: str | None = None,
) -> "NnxLoss":
    """The loss of an NNX module.

    Args:
        build: returns the module. It is called with those of ``dtype=``,
            ``attention=`` and ``rngs=`` that it accepts; without ``rngs`` its own seed
            stands, whatever the experiment's.
        per_sample: ``per_sample(model, batch[, key])``, see above.
        random: whether the module draws random numbers; None: look for its streams.
        dtype: compute dtype asked of ``build``.
        attention: attention implementation asked of ``build``.
    """
    return NnxLoss(
        build=build,
        per_sample=per_sample,
        random=random,
        dtype=dtype,
        attention=attention,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NnxLoss(ModelLoss):
    """See ``nnx_loss``."""

    build: Callable[..., Any]
    """Returns the module."""

    def _module(self, rngs: Any = None) -> Any:
        offered = {"dtype": self.dtype, "attention": self.attention, "rngs": rngs}
        accepted = inspect.signature(self.build).parameters
        given = {k: v for k, v in offered.items() if k in accepted and v is not None}
        if "rngs" in accepted and rngs is None:
            given["rngs"] = nnx.Rngs(0)
        return self.build(**given)

    @functools.cached_property
    def _abstract(self) -> Any:
        """The module with shapes for arrays."""
        module = nnx.eval_shape(self._module)
        if not any(map(_holds_tracer, _modules(module))):
            return module
        # Arrays that are plain attributes do not survive an abstract build.
        with jax.ensure_compile_time_eval():
            return self._module()

    @functools.cached_property
    def _split(self) -> tuple[Any, Any, Any, Any]:
        """Graph, shapes of the parameters and of the random states, other variables
        with their values."""
        graph, params, seeds, fixed = nnx.split(
            self._abstract, nnx.Param, nnx.RngState, ...
        )
        for path, variable in _flat_state(fixed):
            if isinstance(variable, nnx.BatchStat):
                raise ModelError(
                    f"Variable {'/'.join(map(str, path))!r} is a running statistic "
                    "(nnx.BatchStat): it mixes the samples of a batch, so that the "
                    "loss is no sum over samples. Use a norm over features (LayerNorm, "
                    "RMSNorm, GroupNorm)."
                )
        abstract = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(fixed)]
        if any(abstract):
            # Compiled, so that the parameters beside them are never made.
            make = jax.jit(lambda: nnx.state(self._module(), _is_fixed))
            with jax.ensure_compile_time_eval():
                fixed = make()
        params, seeds = jax.tree.map(_struct, (params, seeds))
        return graph, params, seeds, fixed

    @property
    def _draws(self) -> bool:
        return any(map(_draws, _modules(self._abstract)))

    def init(self, key: Any) -> Any:
        """Fresh parameters: nested plain dicts of arrays."""
        module = self._module(nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def abstract_params(self) -> Any:
        """The same tree, as shapes; nothing is computed."""
        return nnx.to_pure_dict(self._split[1])

    def merge(self, params: Any) -> Any:
        """The module holding ``params``."""
        return self._merge(params, jax.random.key(0))

    def _merge(self, params: Any, key: Any) -> Any:
        graph, abstract, seeds, fixed = self._split
        state = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, _seeded(seeds, key), fixed)

    def _apply(self, params: Any, arguments: tuple[Any, ...], key: Any) -> Any:
        key = jax.random.key(0) if key is None else key
        return self.per_sample(self._merge(params, key), *arguments)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _holds_tracer(module: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in vars(module).values())


def _flat_state(state: Any) -> Sequence[tuple[tuple[Any, ...], Any]]:
    return list(nnx.to_flat_state(state))


def _is_fixed(path: Any, variable: Any) -> bool:
    """Neither a parameter nor a random state: a table, a mask."""
    kind = getattr(variable, "type", type(variable))
    return not issubclass(kind, (nnx.Param, nnx.RngState))


def _modules(module: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]


def _draws(module: Any) -> bool:
    """Whether a module holds a random stream and may use it."""
    held = vars(module).values()
    if not any(isinstance(x, nnx.Rngs | nnx.RngStream) for x in held):
        return False
    rate = getattr(module, "rate", getattr(module, "dropout_rate", None))
    return rate != 0 and not getattr(module, "deterministic", False)


def _seeded(state: Any, key: Any) -> Any:
    """Random states that follow from one key: streams by place, counts at zero."""
    flat = []
    for i, (path, variable) in enumerate(
        sorted(_flat_state(state), key=lambda x: str(x[0]))
    ):
        value = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            fresh = jax.random.fold_in(key, i)
            shape = value.shape
            fresh = jax.random.split(fresh, shape) if shape else fresh
        else:
            fresh = jnp.zeros(value.shape, value.dtype)
        flat.append((path, variable.replace(fresh)))
    return nnx.from_flat_state(flat)


def linen_loss(
    module: Any,
    per_sample: Callable[..., tuple[Any, ...]],
    *,
    example: Mapping[str, Any],
    random: bool | None = None,
    streams: Sequence[str] = ("dropout",),
    dtype: str | None = None,
    attention: str | None = None,
) -> "LinenLoss":
    """The loss of a Linen module.

    Args:
        module: the module, or a function that returns it and may accept ``dtype=``
            and ``attention=``.
        per_sample: ``per_sample(model, batch[, key])``; ``model`` is the bound module.
        example: batch arrays or their shapes: Linen makes parameters by a call.
        random: whether the module draws random numbers; None: try without a key.
        streams: names of its random streams.
        dtype: compute dtype asked of ``module``.
        attention: attention implementation asked of ``module``.
    """
    build = (lambda: module) if isinstance(module, linen.Module) else module
    return LinenLoss(
        build=build,
        per_sample=per_sample,
        example=example,
        random=random,
        streams=tuple(streams),
        dtype=dtype,
        attention=attention,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinenLoss(ModelLoss):
    """See ``linen_loss``."""

    build: Callable[..., Any]
    """Returns the module."""

    example: Mapping[str, Any]
    """Batch arrays or their shapes."""

    streams: tuple[str, ...]
    """Names of the random streams."""

    def _module(self) -> Any:
        offered = {"dtype": self.dtype, "attention": self.attention}
        accepted = inspect.signature(self.build).parameters
        given = {k: v for k, v in offered.items() if k in accepted and v is not None}
        return self.build(**given)

    def _variables(self, key: Any) -> Any:
        """All collections, made by calling ``per_sample`` on one sample."""
        batch = {
            k: jnp.zeros((1, *x.shape[1:]), x.dtype) for k, x in self.example.items()
        }
        wants_key = len(inspect.signature(self.per_sample).parameters) > 2
        arguments = (batch, key) if wants_key else (batch,)
        rngs = {"params": key} | {
            s: jax.random.fold_in(key, i) for i, s in enumerate(self.streams)
        }
        return self._module().init(rngs, *arguments, method=self.per_sample)

    @functools.cached_property
    def _shapes(self) -> Any:
        shapes = jax.eval_shape(self._variables, jax.random.key(0))
        if "batch_stats" in shapes:
            path = next(iter(names.flatten(shapes["batch_stats"])))
            raise ModelError(
                f"Variable 'batch_stats/{path}' is a running statistic: it mixes the "
                "samples of a batch, so that the loss is no sum over samples. Use a "
                "norm over features (LayerNorm, RMSNorm, GroupNorm)."
            )
        return shapes

    @functools.cached_property
    def _fixed(self) -> Mapping[str, Any]:
        """Collections beside the parameters, with their values."""
        others = [k for k in self._shapes if k != "params"]
        if not others:
            return {}

        def make(key: Any) -> Any:
            made = self._variables(key)
            return {k: made[k] for k in others}

        # Compiled, so that the parameters beside them are never made.
        with jax.ensure_compile_time_eval():
            return jax.jit(make)(jax.random.key(0))

    @functools.cached_property
    def _draws(self) -> bool:
        batch = {
            k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
            for k, x in self.example.items()
        }
        run = functools.partial(self._module().apply, method=self.per_sample)
        try:
            jax.eval_shape(run, self._shapes, batch)
        except errors.InvalidRngError:
            return True
        return False

    def init(self, key: Any) -> Any:
        """Fresh parameters: nested plain dicts of arrays."""
        assert self._shapes
        return jax.jit(lambda key: self._variables(key)["params"])(key)

    def abstract_params(self) -> Any:
        """The same tree, as shapes; nothing is computed."""
        return self._shapes["params"]

    def _apply(self, params: Any, arguments: tuple[Any, ...], key: Any) -> Any:
        rngs: dict[str, jax.Array] = {}
        if key is not None:
            rngs = {s: jax.random.fold_in(key, i) for i, s in enumerate(self.streams)}
        return self._module().apply(
            {"params": params, **self._fixed},
            *arguments,
            rngs=rngs,
            method=self.per_sample,
        )
