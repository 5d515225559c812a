"""Meshes: devices that will compute one stage, and what they are for costs.

    Cluster, device names, lanes, tensor degree -> MeshMaker.mesh -> Mesh

Equal devices make meshes of equal shape, so most questions are asked once a shape.
"""

import dataclasses
import functools
from collections.abc import Sequence

from hexijax.cluster import Cluster, Device
from hexijax.cluster.profile import TRAINING_DTYPES
from hexijax.costs.compute import MeshShape
from hexijax.costs.links import slowest_link
from hexijax.costs.memory import room_bytes
from hexijax.layers.chain import Chain
from hexijax.plan.plan import PlanError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """Devices that will compute one stage; its maker makes each once."""

    devices: tuple[str, ...]
    """Names, lane-major."""

    node: str
    """The node of the first."""

    shape: MeshShape
    """What they are, for costs."""

    shape_id: int
    """Equal for meshes of equal shape."""


Layout = tuple[tuple[Mesh, ...], ...]
"""Meshes of each replica, in the order of its stages."""


def compute_dtype(asked: str, device: Device) -> str:
    """The dtype asked for, or the next one the kind computes in natively.

    Raises:
      PlanError: no training dtype has that name, or the kind has none of them.
    """
    if asked not in TRAINING_DTYPES:
        raise PlanError(
            f"The compute dtype {asked!r} was asked for; models train in one of "
            f"{', '.join(TRAINING_DTYPES)}."
        )
    native = device.profile.native_dtypes
    for dtype in TRAINING_DTYPES[TRAINING_DTYPES.index(asked) :]:
        if dtype in native:
            return dtype
    raise PlanError(
        f"A {device.kind} computes in {', '.join(native)} and neither in {asked} nor "
        "in a wider dtype. Ask for one of these."
    )


def fitting_degrees(chain: Chain, degrees: Sequence[int]) -> tuple[int, ...]:
    """The tensor degrees that divide every weight the model splits."""
    sizes = {
        leaf.shape[leaf.tensor_dim]
        for leaf in chain.leaves()
        if leaf.tensor_dim is not None
    }
    return tuple(d for d in degrees if all(size % d == 0 for size in sizes))


class MeshMaker:
    """Makes each mesh once."""

    def __init__(self, cluster: Cluster, dtype: str) -> None:
        self._cluster = cluster
        self._dtype = dtype
        self._shapes: dict[MeshShape, int] = {}
        self.mesh = functools.cache(self._mesh)

    def _mesh(self, devices: tuple[str, ...], tensor: int = 1) -> Mesh:
        """Devices of one kind, lane-major, at a tensor degree that divides them."""
        assert len(devices) % tensor == 0, (devices, tensor)
        found = [self._cluster.device(name) for name in devices]
        shape = MeshShape(
            profile=found[0].profile,
            dtype=compute_dtype(self._dtype, found[0]),
            lanes=len(devices) // tensor,
            tensor=tensor,
            link=slowest_link(self._cluster, devices),
            usable_memory_bytes=min(map(room_bytes, found)),
        )
        return Mesh(
            devices=devices,
            node=found[0].node,
            shape=shape,
            shape_id=self._shapes.setdefault(shape, len(self._shapes)),
        )
