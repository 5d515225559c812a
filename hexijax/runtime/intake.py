"""The experiment's parameters: their shapes, and their first values.

    Experiment.init: function | tree | path | Source -> a tree, or a Source that fits

Shapes come from the model, and what is given is held against them before any of it is
read; a loss that does not know its model takes the shapes that are given.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.layers.names import flatten
from hexijax.runtime.making import Made
from hexijax.weights.opening import is_weights, open_weights
from hexijax.weights.source import Arrays, Source, Tensor
from hexijax.weights.tree import nested


def initial_params(experiment: Experiment, device: jax.Device) -> Any:
    """The first parameters: a tree on one device where they are made from the seed,
    else a ``Source`` with the model's names.

    Not made under ``jit``: equal layers then share their compiled initialisers, where
    one program of all of them takes a minute to compile for 24 layers on a GPU.
    """
    source = _fitted(experiment)
    if source is not None:
        return source
    make = _first(experiment)
    with jax.default_device(device):
        return make(jax.random.key(experiment.seed))


def made_params(
    experiment: Experiment, device: jax.Device, reads: Mapping[str, int]
) -> Made | Source:
    """The same numbers, of which the device holds what is asked for and no more.

    Args:
      experiment: whose parameters.
      device: where those from the seed are made.
      reads: how often each is going to be asked for, by name.
    """
    source = _fitted(experiment)
    if source is not None:
        return source
    with jax.default_device(device):
        key = jax.random.key(experiment.seed)
    return Made(_first(experiment), key, device, reads)


def _first(experiment: Experiment) -> Callable[..., Any]:
    """What makes parameters from a key."""
    return _maker(experiment) or experiment.loss.init


def _fitted(experiment: Experiment) -> Source | None:
    source = _given(experiment)
    return source and source.fitted(_tensors(_abstract(experiment, source)))


def abstract_params(experiment: Experiment) -> Any:
    """The parameter tree as shapes and dtypes.

    Raises:
      UserError: weights are given that do not fit the model.
    """
    source = _given(experiment)
    abstract = _abstract(experiment, source)
    if source is not None:
        source.fitted(_tensors(abstract))
    return abstract


def _given(experiment: Experiment) -> Source | None:
    """Where parameters lie; None: they are made from the seed."""
    init = experiment.init
    if is_weights(init):
        return open_weights(init)
    return None if init is None or callable(init) else Arrays(flatten(init))


def _maker(experiment: Experiment) -> Callable[..., Any] | None:
    init = experiment.init
    return None if is_weights(init) or not callable(init) else init


def _abstract(experiment: Experiment, source: Source | None) -> Any:
    make, init, loss = _maker(experiment), experiment.init, experiment.loss
    if make is not None:
        return jax.eval_shape(make, jax.random.key(experiment.seed))
    if hasattr(loss, "abstract_params"):
        return loss.abstract_params()
    if source is None:
        raise UserError(
            f"The experiment {experiment.name!r} has no parameters: its loss is a "
            "plain function, which cannot make them. Give init=: a function of a key, "
            "a tree of arrays, or a path to weights."
        )
    if not is_weights(init):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), init)
    shapes = {
        name: jax.ShapeDtypeStruct(t.shape, t.dtype)
        for name, t in source.tensors.items()
    }
    return nested(shapes, source.paths)


def _tensors(abstract: Any) -> dict[str, Tensor]:
    return {
        name: Tensor(tuple(x.shape), jax.numpy.dtype(x.dtype))
        for name, x in flatten(abstract).items()
    }
