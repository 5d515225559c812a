"""The experiment's parameters: their shapes, and their first values."""

from typing import Any

import jax

from hexijax.experiment import Experiment


def initial_params(experiment: Experiment, device: jax.Device) -> Any:
    """Parameters from the seed, on one device.

    Not under ``jit``: equal layers then share their compiled initialisers, where one
    program of all of them takes a minute to compile for 24 layers on a GPU.
    """
    make = experiment.init or experiment.loss.init
    with jax.default_device(device):
        return make(jax.random.key(experiment.seed))


def abstract_params(experiment: Experiment) -> Any:
    """The parameter tree as shapes and dtypes."""
    if experiment.init is None:
        return experiment.loss.abstract_params()
    return jax.eval_shape(experiment.init, jax.random.key(experiment.seed))
