"""The state of a dynamic loss scale on a device, and how a step changes it.

The state is one float32 array, [scale, steps since it last changed]: both are whole
numbers that float32 holds exactly, and powers of two change no digit of a gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.plan.precision import (
    FIRST_SCALE,
    GOOD_STEPS,
    LEAST_SCALE,
    MOST_SCALE,
    STATE_KEY,
)
from hexijax.weights.slices import Key, whole_slice
from hexijax.weights.source import Tensor

SHAPE = (2,)
"""Of the state."""

SLICE = whole_slice(Key("", STATE_KEY), SHAPE)
"""What it is among a run's state."""

TENSOR = Tensor(SHAPE, np.dtype(np.float32))
"""Of the state, too."""


def first_state() -> np.ndarray:
    """Before the first step."""
    return np.asarray([FIRST_SCALE, 0.0], np.float32)


def next_state(state: jax.Array, finite: jax.Array) -> jax.Array:
    """After a step whose gradients were all finite, or not.

    Halves at an overflow, doubles after ``GOOD_STEPS`` without one, within bounds.
    """
    scale, good = state[0], state[1] + 1.0
    grows = good >= GOOD_STEPS
    larger = jnp.minimum(jnp.where(grows, scale * 2.0, scale), MOST_SCALE)
    smaller = jnp.maximum(scale * 0.5, LEAST_SCALE)
    return jnp.stack(
        [
            jnp.where(finite, larger, smaller),
            jnp.where(finite & ~grows, good, 0.0),
        ]
    )
