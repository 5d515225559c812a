"""Small models with numbers in them: no test pays for a random initialisation."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.abstract import abstract
from models.config import TransformerConfig


def build(model_class: type[nnx.Module], config: TransformerConfig) -> nnx.Module:
    """A model whose every number, biases too, is drawn by its own path."""
    graph, state = nnx.split(abstract(model_class, config))
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(_draw, state))


@nnx.jit
def run(model: nnx.Module, *inputs: jax.Array | None) -> jax.Array:
    """Calls a model compiled, once for all tests that call it alike."""
    return model(*inputs)


def _draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    name = jax.tree_util.keystr(path)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = rng.integers(2**32, size=(*leaf.shape, 2), dtype=np.uint32)
        return jax.random.wrap_key_data(words)
    if jnp.issubdtype(leaf.dtype, jnp.integer):  # how often a key was used
        return jnp.zeros(leaf.shape, leaf.dtype)
    mean = 1.0 if "scale" in name else 0.0
    return jnp.asarray(rng.normal(mean, 0.2, leaf.shape), leaf.dtype)
