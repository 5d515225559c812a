"""What all gradients decide together: their norm, how to clip, whether to skip, and how
the loss is scaled.

    squares of every home, loss scale -> judge -> (norm, factor, finite, scale)
    verdict, loss scale -> rescale -> the next step's loss scale

Computed once, at one place, and copied to the others, so that all of them agree.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.plan.plan import Place
from hexijax.plan.precision import DYNAMIC
from hexijax.program.program import HOST
from hexijax.runtime import scaling
from hexijax.runtime.layout import Layout
from hexijax.runtime.memo import memo
from hexijax.runtime.programs import struct


class Verdicts:
    """Of the steps of one plan.

    Args:
      layout: where places are.
      host: the place at which they are made, whose copy the host reads.
      loss_scale: what multiplies the loss, or that it is searched for.
      clip_norm: largest global norm of the gradient; None: no clipping.
    """

    def __init__(
        self,
        layout: Layout,
        host: Place,
        *,
        loss_scale: float | str,
        clip_norm: float | None,
    ):
        self.layout, self.host, self.clip_norm = layout, host, clip_norm
        self.dynamic = loss_scale == DYNAMIC
        self.fixed_scale = 1.0 if self.dynamic else float(loss_scale)
        """The part of the loss scale that is known before a step."""

    @memo
    def scaled(self, place: Place) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """A dynamic scale's state there, and a seed -> the seed times the scale.

        Powers of two: the product is as exact as a seed made on the host.
        """
        return jax.jit(
            lambda state, seed: state[0] * seed,
            out_shardings=self.layout.replicated(place),
        )

    def judge(
        self, values: Sequence[Any], sources: Sequence[Place], places: Sequence[Place]
    ) -> list[Any]:
        """(norm, factor, finite, scale) on every place, from sums of squares on all
        homes and a dynamic loss scale."""
        here = self.layout.replicated(self.host)
        shapes: list[tuple[int, ...]] = [()] * len(values)
        if self.dynamic:
            shapes[-1] = scaling.SHAPE
        given = [
            self._known(x, place, shape)
            for x, place, shape in zip(values, sources, shapes, strict=True)
        ]
        came = self.layout.move(given, [here] * len(given))
        if not self.layout.here(self.host):
            return self._spread(struct((4,), "float32", here), places)
        return self._spread(self._verdict(self.layout.carrier.settle(came)), places)

    def rescale(
        self, values: Sequence[Any], sources: Sequence[Place], places: Sequence[Place]
    ) -> list[Any]:
        """The loss scale on every place; after a verdict, the next step's."""
        *verdict, state = values
        state = self._known(state, sources[-1], scaling.SHAPE)
        if verdict and self.layout.here(self.host):
            state = self._next_scale(state, *verdict)
        return self._spread(state, places)

    def _known(self, value: Any, place: Place, shape: tuple[int, ...]) -> Any:
        """A value, or a struct of it where it is made elsewhere."""
        at = self.host if place == HOST else place
        here = self.layout.replicated(at)
        return value if self.layout.here(at) else struct(shape, "float32", here)

    def _spread(self, value: Any, places: Sequence[Place]) -> list[Any]:
        """A copy on every place; the host's is on every island."""
        at = [self.host if place == HOST else place for place in places]
        targets = [self.layout.replicated(place) for place in at]
        readers = self.layout.readers if HOST in places else []
        count = len(at) + len(readers)
        given = self.layout.move([value] * count, [*targets, *readers], [0] * count)
        if readers and not self.layout.here(self.host):
            read = given[len(at) + self.layout.reader]
            given = [
                read if place == HOST else x
                for place, x in zip(places, given, strict=False)
            ]
        return given[: len(at)]

    @functools.cached_property
    def _verdict(self) -> Callable[..., Any]:
        fixed, clip, dynamic = self.fixed_scale, self.clip_norm, self.dynamic

        def f(values: list[jax.Array]) -> jax.Array:
            squares, scale = values, jnp.float32(fixed)
            if dynamic:
                *squares, state = values
                scale = state[0]
            norm = jnp.sqrt(functools.reduce(jnp.add, squares)) / scale
            factor = jnp.float32(1.0)
            if clip is not None:
                factor = jnp.minimum(factor, clip / norm)
            finite = jnp.isfinite(norm).astype(jnp.float32)
            return jnp.stack([norm, factor / scale, finite, scale])

        return jax.jit(f, out_shardings=self.layout.replicated(self.host))

    @functools.cached_property
    def _next_scale(self) -> Callable[..., Any]:
        return jax.jit(
            lambda state, verdict: scaling.next_state(state, verdict[2] > 0),
            out_shardings=self.layout.replicated(self.host),
        )
