"""Where each buffer of a plan lives: the mesh of a place and the sharding of an array.

    Plan + Chain + devices -> Layout -> shardings of parameters, state, gradients, lanes

What a lane computes carries a leading lane dim, split over ``data``: activations and
residuals are ``[lanes, ...]``, gradient accumulators too where there are several lanes.
Parameters and state have no such dim.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hexijax.layers.chain import Chain, Group, Leaf
from hexijax.plan.plan import Place, Plan
from hexijax.program.boxes import Box, state_boxes
from hexijax.program.buckets import buckets
from hexijax.runtime.carrying import ONE_PROCESS, Carrier
from hexijax.runtime.memo import memo
from hexijax.runtime.move import move

DATA, MODEL = "data", "model"

DEVICE = "device"
"""JAX's name of a device's own memory."""

PINNED_HOST = "pinned_host"
"""JAX's name of host memory beside a device."""


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Meshes by place, and the shardings that follow from plan and chain."""

    plan: Plan
    chain: Chain
    devices: Mapping[str, jax.Device]
    whole_leaves: bool = False
    """Keep each leaf's state undivided over lanes (optimizers that look inside)."""
    carrier: Carrier = ONE_PROCESS
    """What takes arrays from place to place."""

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Parameters that are reduced, updated and gathered together."""
        return buckets(self.plan, self.chain, whole_leaves=self.whole_leaves)

    @functools.cached_property
    def boxes(self) -> Mapping[str, Mapping[Place, Mapping[str, Box]]]:
        """Per group: home -> leaf id -> box; leaves without a box there are absent."""
        return {
            g.name: state_boxes(
                self.plan, self.chain, g, whole_leaves=self.whole_leaves
            )
            for g in self.groups
        }

    @functools.cached_property
    def leaf(self) -> Mapping[str, Leaf]:
        """Leaves, and parts of them, by id."""
        return {leaf.id: leaf for group in self.groups for leaf in group.leaves}

    @memo
    def mesh(self, place: Place) -> Mesh:
        """The mesh of a stage, or of the single device that a place names."""
        names, lanes, tensor = self.shape(place)
        grid = np.array([self.devices[name] for name in names], dtype=object)
        return Mesh(grid.reshape(lanes, tensor), (DATA, MODEL))

    def shape(self, place: Place) -> tuple[tuple[str, ...], int, int]:
        """Device names, lanes and tensor degree of a place."""
        if place in self.devices:
            return (place,), 1, 1
        stage = self.plan.stage(place)
        return stage.devices, stage.lanes, stage.tensor

    @memo
    def here(self, place: Place) -> bool:
        """Whether this process drives a place; else its devices are ghosts."""
        return self.carrier.here(self.devices[self.shape(place)[0][0]])

    def island(self, place: Place) -> str:
        """Whose process drives a place."""
        return self.carrier.island(self.devices[self.shape(place)[0][0]])

    @functools.cached_property
    def readers(self) -> list[NamedSharding]:
        """A place on each island to read a step's numbers from."""
        grids = [np.array([[d]], dtype=object) for d in self.carrier.readers]
        meshes = [Mesh(grid, (DATA, MODEL)) for grid in grids]
        return [NamedSharding(mesh, PartitionSpec()) for mesh in meshes]

    @functools.cached_property
    def reader(self) -> int:
        """Which of them is here."""
        return [self.carrier.here(d) for d in self.carrier.readers].index(True)

    def move(
        self,
        arrays: Sequence[Any],
        targets: Sequence[NamedSharding],
        same: Sequence[int] = (),
    ) -> Any:
        """``move.move`` by the layout's carrier."""
        return move(arrays, targets, self.carrier, same=same)

    def tell(self, arrays: Sequence[Any]) -> list[Any]:
        """Each array at this island's reader, and at all others'."""
        readers, count = self.readers, len(arrays)
        came = self.move(
            [x for x in arrays for _ in readers],
            readers * count,
            [n for n in range(count) for _ in readers],
        )
        return came[self.reader :: len(readers)]

    def lanes(self, place: Place) -> int:
        """Data degree of a place."""
        return self.shape(place)[1]

    def replicated(self, place: Place) -> NamedSharding:
        """A copy on every device of the place."""
        return self._sharding(place, ())

    def by_lane(self, place: Place) -> NamedSharding:
        """Dim 0 is the lane; a copy on every device of the lane."""
        return self._sharding(place, (DATA,))

    def param(self, place: Place, leaf: Leaf) -> NamedSharding:
        """A parameter as the stage computes with it."""
        return self._sharding(place, self._tensor_axes(place, leaf))

    def grad(self, place: Place, leaf: Leaf) -> NamedSharding:
        """A gradient accumulator; see ``grad_shape``."""
        by_lane = (DATA,) if self.lanes(place) > 1 else ()
        return self._sharding(place, (*by_lane, *self._tensor_axes(place, leaf)))

    def grad_shape(self, place: Place, leaf: Leaf) -> tuple[int, ...]:
        """``[lanes, *leaf.shape]``; a single lane's sum is the gradient itself."""
        lanes = self.lanes(place)
        return (lanes, *leaf.shape) if lanes > 1 else leaf.shape

    def slice(self, place: Place, leaf: Leaf, box: Box) -> NamedSharding:
        """A box of a leaf's state at home: as it travels, or whole on every lane."""
        if self.whole_leaves and leaf.trainable:
            return self._sharding(place, self._shard_axes(place, leaf, box))
        return self.piece(place, leaf, box)

    def piece(self, place: Place, leaf: Leaf, box: Box) -> NamedSharding:
        """A box of a leaf on its way to or from a place: by tensor shards, then lanes.

        The lanes divide the first dim with a whole number of rows for each; where no
        dim has, each lane holds the box.
        """
        lanes, shape = self.lanes(place), box_shape(box)
        axes = self._shard_axes(place, leaf, box)
        if lanes > 1:
            for dim, rows in enumerate(shape):
                if axes[dim] is None and rows and rows % lanes == 0:
                    axes[dim] = DATA
                    break
        return self._sharding(place, axes)

    def _shard_axes(self, place: Place, leaf: Leaf, box: Box) -> list[str | None]:
        """Axes of a box's dims: tensor shards divide it where they have whole rows."""
        _, _, tensor = self.shape(place)
        shape = box_shape(box)
        axes: list[str | None] = [None] * len(shape)
        cut = leaf.tensor_dim
        if tensor > 1 and cut is not None and shape[cut] % tensor == 0:
            axes[cut] = MODEL
        return axes

    def _tensor_axes(self, place: Place, leaf: Leaf) -> tuple[str | None, ...]:
        if self.shape(place)[2] == 1 or leaf.tensor_dim is None:
            return ()
        return (None,) * leaf.tensor_dim + (MODEL,)

    def _sharding(self, place: Place, axes: Sequence[str | None]) -> NamedSharding:
        while axes and axes[-1] is None:
            axes = axes[:-1]
        return NamedSharding(self.mesh(place), PartitionSpec(*axes))


def box_shape(box: Box) -> tuple[int, ...]:
    """Rows a dim of a box."""
    return tuple(stop - start for start, stop in box)
