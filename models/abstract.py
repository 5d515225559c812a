"""Models without memory: their parameters as shapes and dtypes, for planning."""

import math
from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

Model = TypeVar("Model", bound=nnx.Module)


def abstract(model_class: Callable[..., Model], config: object) -> Model:
    """The NNX module whose every array is a ``jax.ShapeDtypeStruct``.

    A Linen module has its own: ``jax.eval_shape(model.init, key, tokens)``.
    """
    return nnx.eval_shape(lambda: model_class(config, rngs=nnx.Rngs(0)))


def count_params(model: nnx.Module) -> int:
    """Numbers held in the parameters of a module, abstract or not."""
    params = nnx.state(model, nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
