"""State whose every number follows from its name: what is restored can be checked."""

import functools
import zlib
from typing import Any

import jax
import numpy as np

from hexijax.checkpoint.slices import Key
from hexijax.weights.source import Tensor, index


@functools.cache
def numbers(key: Key, tensor: Tensor) -> np.ndarray:
    """All of an array: the same for all plans, another for each key. To be read."""
    rng = np.random.default_rng(zlib.crc32(str(key).encode()))
    if tensor.dtype.kind == "f":
        return rng.standard_normal(tensor.shape).astype(tensor.dtype)
    return rng.integers(0, 99, tensor.shape).astype(tensor.dtype)


def fill(engine: Any) -> None:
    """Gives an engine the numbers of its state."""
    whole = {key: numbers(key, tensor) for key, tensor in engine.tensors().items()}
    engine.load(
        {
            each: [
                jax.device_put(whole[each.key][index(each.box)], like.sharding)
                for like in copies
            ]
            for each, copies in engine.targets().items()
        }
    )


def check(engine: Any) -> None:
    """Every copy of every slice has its numbers, where the plan wants it."""
    tensors, targets = engine.tensors(), engine.targets()
    whole = {key: numbers(key, tensor) for key, tensor in tensors.items()}
    for each, copies in engine.slices().items():
        for array, like in zip(copies, targets[each], strict=True):
            assert array.sharding == like.sharding, each
            assert array.dtype == tensors[each.key].dtype, each
            want = whole[each.key][index(each.box)]
            np.testing.assert_array_equal(array, want, err_msg=str(each))
