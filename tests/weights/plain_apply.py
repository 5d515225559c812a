"""The loss of an exported tree, by plain Flax: no runtime, no cluster, no plan.

python -m tests.weights.plain_apply RUN EXPORTED API TIED SCANNED BATCH.npz
"""

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

import hexijax
from models.gpt import GPT
from models.llama import Llama
from tests.laws.law_models import LinenModel, Shape, score


def main(run: str, exported: str, api: str, tied: str, scanned: str, file: str) -> None:
    """Prints the loss of the tree that was loaded, then of the one exported."""
    shape = Shape(api=api, tied=tied == "True", scanned=scanned == "True")
    batch = dict(np.load(file))
    with ocp.StandardCheckpointer() as checkpointer:
        trees = [hexijax.load(run), checkpointer.restore(exported)]
    for tree in trees:
        params = jax.tree.map(jax.numpy.asarray, tree)
        print(float(jax.jit(loss, static_argnums=0)(shape, params, batch)))
    assert "hexijax.runtime" not in sys.modules
    assert "hexijax.cluster" not in sys.modules


def loss(shape: Shape, params: dict, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean over the batch."""
    if shape.api == "linen":
        module = LinenModel(shape.tied, shape.scanned)
        model = module.bind({"params": params})
    else:
        kind = GPT if shape.tied else Llama
        model = nnx.eval_shape(lambda: kind(shape.config, rngs=nnx.Rngs(0)))
        state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(state, _whole_numbers(params))
        nnx.update(model, state)
    total, weight, _ = score(model, batch)
    return total.sum() / weight.sum()


def _whole_numbers(tree: dict) -> dict:
    """Orbax makes text of the numbers that are a list's places."""
    if not isinstance(tree, dict):
        return tree
    return {
        int(k) if isinstance(k, str) and k.isdigit() else k: _whole_numbers(v)
        for k, v in tree.items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
