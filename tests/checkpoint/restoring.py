"""A process of its own, with devices of its own, that restores a step and checks it.

python -m tests.checkpoint.restoring FOLDER
"""

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hexijax.checkpoint import Inventory, Tiers, inventory, restore
from hexijax.checkpoint.slices import Key, Slice, Tensor, whole_slice
from hexijax.weights.stored.files import open_files
from tests.checkpoint.filled import check


class Even:
    """Whole arrays, divided over all devices where a dim can be."""

    def __init__(self, stored: Inventory, step: int):
        self._tensors = dict(stored.manifests(step)[0].tensors)
        self._mesh = Mesh(np.array(jax.devices()), ("all",))
        self.held: dict[Slice, list[jax.Array]] = {}

    def slices(self) -> dict[Slice, list[jax.Array]]:
        return self.held

    def targets(self) -> dict[Slice, list[jax.ShapeDtypeStruct]]:
        return {
            whole_slice(key, tensor.shape): [
                jax.ShapeDtypeStruct(
                    tensor.shape, tensor.dtype, sharding=self._sharding(tensor)
                )
            ]
            for key, tensor in self._tensors.items()
        }

    def _sharding(self, tensor: Tensor) -> NamedSharding:
        axes: list[str | None] = [None] * len(tensor.shape)
        for dim, rows in enumerate(tensor.shape):
            if rows % self._mesh.size == 0:
                axes[dim] = "all"
                break
        return NamedSharding(self._mesh, PartitionSpec(*axes))

    def tensors(self) -> dict[Key, Tensor]:
        return self._tensors

    def load(self, arrays: Any) -> None:
        self.held = dict(arrays)

    def stored_params(self) -> list[Any]:
        return []


if __name__ == "__main__":
    found = inventory(Tiers(fast=open_files(sys.argv[1])))
    engine = Even(found, found.whole()[0])
    restore(engine, found, where=sys.argv[1], facts={})
    check(engine)
    print(f"{len(jax.devices())} devices")
