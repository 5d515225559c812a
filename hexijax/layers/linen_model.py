"""Losses of Linen modules: ``per_sample`` runs as a method of the bound module."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen

from hexijax.layers import names
from hexijax.layers.model_loss import ModelError, ModelLoss, accepted_by


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
        accepted = accepted_by(self.build)
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
