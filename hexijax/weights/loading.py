"""A run's parameters as the plain tree that its Flax module takes.

run folder -> Run -> nested dicts of NumPy arrays

Neither the runtime nor the run's cluster, nor JAX, is needed.
"""

from pathlib import Path
from typing import Any

import numpy as np

from hexijax.weights.runs import Run
from hexijax.weights.source import whole
from hexijax.weights.tree import nested


def load(run: str | Path, step: int | None = None) -> Any:
    """The parameters of a run of ``hexijax run``: nested plain dicts of NumPy arrays.

        model.apply({"params": hexijax.load("runs/gpt-001")}, tokens)    # Linen
        nnx.replace_by_pure_dict(state, hexijax.load("runs/gpt-001"))    # NNX

    Args:
        run: the run's folder.
        step: whose checkpoint is read; None: the newest.

    Raises:
      UserError: there is no such run, or it has no such checkpoint.
    """
    source = Run(run, step)
    leaves = {
        name: np.array(source.read(name, whole(tensor.shape)))
        for name, tensor in source.tensors.items()
    }
    return nested(leaves, source.paths)
