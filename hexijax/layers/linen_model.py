"""Losses of Linen modules: ``per_sample`` runs as a method of the bound module."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen
from flax.core import DenyList

from hexijax.layers import jaxprs, names
from hexijax.layers.model_loss import ModelLoss, Written, accepted_by


def linen_loss(
    module: Any,
    per_sample: Callable[..., tuple[Any, ...]],
    *,
    example: Mapping[str, Any],
    random: bool | None = None,
    streams: Sequence[str] = ("dropout",),
    scratch: Sequence[str] = (),
    dtype: str | None = None,
    attention: str | None = None,
) -> "LinenLoss":
    """The loss of a Linen module.

    Args:
        module: the module, what holds it as ``.module`` (transformers' models), or a
            function that returns it and may accept ``dtype=`` and ``attention=``.
        per_sample: ``per_sample(model, batch[, key])``; ``model`` is the bound module.
        example: batch arrays or their shapes: Linen makes parameters by a call.
        random: whether the module draws random numbers; None: try without a key.
        streams: names of its random streams.
        scratch: collections that the forward pass writes for the loss alone to read,
            as ``model.variables["intermediates"]``: what the module sows.
        dtype: compute dtype asked of ``module``.
        attention: attention implementation asked of ``module``.
    """
    if isinstance(getattr(module, "module", None), linen.Module):
        module = module.module
    build = (lambda: module) if isinstance(module, linen.Module) else module
    return LinenLoss(
        build=build,
        per_sample=per_sample,
        example=example,
        random=random,
        streams=tuple(streams),
        scratch=tuple(scratch),
        dtype=dtype,
        attention=attention,
    )


# By identity: its example may be a dict, and `jax.jit` asks for a hash.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
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
        rngs = {"params": key, **self._rngs(key)}
        arguments = self._arguments(batch, key)
        return self._module().init(rngs, *arguments, method=self.per_sample)

    def _rngs(self, key: Any) -> dict[str, jax.Array]:
        """A key for each stream; none without a key."""
        if key is None:
            return {}
        return {s: jax.random.fold_in(key, i) for i, s in enumerate(self.streams)}

    @functools.cached_property
    def _shapes(self) -> Any:
        shapes = jax.eval_shape(self._variables, jax.random.key(0))
        return {k: v for k, v in shapes.items() if k not in self.scratch}

    @functools.cached_property
    def _mutable(self) -> list[str]:
        """Collections that the forward pass writes; what is lost by it is refused."""

        def run(variables: Any, batch: Any) -> Any:
            key = jax.random.key(0)
            _, new = self._module().apply(
                variables,
                *self._arguments(batch, key),
                rngs=self._rngs(key),
                mutable=_ALL_BUT_PARAMS,
                method=self.per_sample,
            )
            given, made = names.flatten(variables), names.flatten(new)
            found.extend(made)
            return [(given.get(name, 0.0), x) for name, x in made.items()]

        found: list[str] = []
        variables = {k: v for k, v in self._shapes.items() if k not in _SOWN}
        jaxpr = jax.make_jaxpr(run)(variables, self._sample).jaxpr
        origins = jaxprs.forwarded(jaxpr)
        pairs = zip(origins[::2], origins[1::2], strict=True)
        written: list[Written] = []
        for name, (old, new) in zip(found, pairs, strict=True):
            collection = name.partition("/")[0]
            kept = new is not None and new == old
            if not kept and collection not in (*self.scratch, *_SOWN):
                found_one = Written(
                    name=name,
                    kind=repr(collection),
                    is_statistic=collection == _STATISTICS,
                )
                written.append(found_one)
        self._judge(written)
        statistics = [_STATISTICS] if written else []
        return [*statistics, *self.scratch]

    @property
    def _sample(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of one."""
        return {
            k: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
            for k, x in self.example.items()
        }

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
        run = functools.partial(
            self._module().apply, mutable=_ALL_BUT_PARAMS, method=self.per_sample
        )
        try:
            jax.eval_shape(run, self._shapes, self._sample)
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
        mutable = self._mutable
        returned = self._module().apply(
            {"params": params, **self._fixed},
            *arguments,
            rngs=self._rngs(key),
            mutable=mutable or False,
            method=self.per_sample,
        )
        return returned[0] if mutable else returned

    def statistics(
        self, params: Any, batches: Iterable[Mapping[str, Any]], *, seed: int = 0
    ) -> Any:
        """The collection ``batch_stats`` after some batches."""

        @jax.jit
        def after(statistics: Any, params: Any, batch: Any, key: Any) -> Any:
            _, new = self._module().apply(
                {"params": params, **self._fixed, _STATISTICS: statistics},
                *self._arguments(batch, key),
                rngs=self._rngs(key),
                mutable=[_STATISTICS, *self.scratch],
                method=self.per_sample,
            )
            return new[_STATISTICS]

        statistics = self._fixed.get(_STATISTICS, {})
        for i, batch in enumerate(batches):
            key = jax.random.fold_in(jax.random.key(seed), i)
            statistics = after(statistics, params, dict(batch), key)
        return statistics


_ALL_BUT_PARAMS = DenyList("params")

_STATISTICS = "batch_stats"

_SOWN = ("intermediates",)
"""What Linen drops unless it is asked for."""
