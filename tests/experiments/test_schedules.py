"""Experiments train for any number of steps, also for one as a trial."""

from collections.abc import Callable

import jax.numpy as jnp
import optax
import pytest

from experiments import common, quickstart


def quickstarts(steps: int) -> optax.GradientTransformation:
    return quickstart.experiment(steps=steps).optimizer


def shared(steps: int) -> optax.GradientTransformation:
    return common.adamw(1e-3, steps)


@pytest.mark.parametrize("make", [quickstarts, shared])
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_a_run_of_any_length_moves_its_parameters(
    make: Callable[[int], optax.GradientTransformation], steps: int
):
    optimizer, params = make(steps), {"w": jnp.ones(3)}
    state = optimizer.init(params)
    moved = []
    for _ in range(steps):
        updates, state = optimizer.update({"w": jnp.ones(3)}, state, params)
        moved.append(bool(jnp.any(updates["w"] != 0)))
    assert any(moved)
    assert all(moved[1:])
