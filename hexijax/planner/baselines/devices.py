"""A cluster as the baselines see it: blocks of equal devices, cut into meshes.

    Cluster -> Yard -> blocks (one kind in one node) -> meshes of a degree and lanes

Meshes of equal shape have equal keys, so what one costs is known for all. Pools are the
parts of the cluster a planner may settle for: everyone here may leave cards out.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence

from hexijax.cluster import Cluster, Device
from hexijax.costs.compute import MeshShape, missing_times
from hexijax.costs.instructions import mesh_shape
from hexijax.costs.memory import room_bytes
from hexijax.layers.chain import Chain
from hexijax.plan.plan import PlanError, Stage
from hexijax.planner.mesh import compute_dtype

ALL_SUBSETS = 3
"""Kinds up to which every mixture is a pool; beyond, the fastest 1, 2, 3, ... kinds."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mesh:
    """Devices that may compute one stage."""

    devices: tuple[str, ...]
    """Names, lane-major."""

    block: "Block"
    """Where they come from."""

    shape: MeshShape
    """What they are, for costs."""

    key: int
    """Equal for meshes that cost the same."""

    @property
    def lanes(self) -> int:
        """Data-parallel copies."""
        return self.shape.lanes

    @property
    def peak_flops_per_s(self) -> float:
        """All its devices' together, as their makers give it."""
        return self.block.peak_flops_per_s * len(self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Devices of one kind and one budget in one node."""

    devices: tuple[str, ...]
    """Names, by index."""

    node: str
    """Their node."""

    kind: str
    """Their kind."""

    dtype: str
    """What they compute in."""

    usable_memory_bytes: int
    """What each can use."""

    peak_flops_per_s: float
    """Of one device."""

    @property
    def twin(self) -> tuple[str, int, int]:
        """Equal for blocks that differ in their place only."""
        return self.kind, self.usable_memory_bytes, len(self.devices)


Pipeline = tuple[Mesh, ...]
"""One replica: its meshes in the order of its stages."""


class Yard:
    """Blocks of a cluster, and meshes cut from them."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        dtype: str,
        tensor_degrees: Iterable[int],
    ) -> None:
        self.cluster = cluster
        self._chain = chain
        self.blocks = tuple(_blocks(cluster, dtype))
        self._dims = [
            leaf.shape[leaf.tensor_dim]
            for leaf in chain.leaves()
            if leaf.tensor_dim is not None
        ]
        largest = max((len(block.devices) for block in self.blocks), default=1)
        self.degrees = tuple(
            degree
            for degree in sorted(set(tensor_degrees))
            if degree <= largest and all(size % degree == 0 for size in self._dims)
        )
        """Tensor degrees that divide every split weight."""
        self._keys: dict[MeshShape, int] = {}
        self._parts: dict[tuple[str, ...], Block] = {}
        self._one_link = not cluster.links.device_pairs
        self._places: dict[tuple[str, str, int], int] = {}
        self.meshes = functools.cache(self._meshes)
        self.joined = functools.cache(self._joined)
        self.place = functools.cache(self._place)

    def _meshes(self, block: Block, tensor: int, lanes: int = 1) -> tuple[Mesh, ...]:
        """As many as the block's devices make; the rest is left out.

        None at a degree at which the kind's measured times lack a layer.
        """
        width = tensor * lanes
        found: list[Mesh] = []
        for start in range(0, len(block.devices) - width + 1, width):
            names = block.devices[start : start + width]
            if found and self._one_link:
                shape = found[0].shape
            else:
                shape = self._shape(block, names, tensor, lanes)
                if missing_times(self._chain, shape):
                    return ()
            key = self._keys.setdefault(shape, len(self._keys))
            found.append(Mesh(devices=names, block=block, shape=shape, key=key))
        return tuple(found)

    def part(self, block: Block, names: tuple[str, ...]) -> Block:
        """Some of a block's devices as a block; the same one for the same names."""
        if names == block.devices:
            return block
        if names not in self._parts:
            self._parts[names] = dataclasses.replace(block, devices=names)
        return self._parts[names]

    def _place(self, block: Block) -> int:
        """Equal for blocks of the same node, kind and budget."""
        where = (block.node, block.kind, block.usable_memory_bytes)
        return self._places.setdefault(where, len(self._places))

    def _joined(self, meshes: tuple[Mesh, ...]) -> Mesh:
        """Meshes of one block and degree as the lanes of one."""
        if len(meshes) == 1:
            return meshes[0]
        tensor = meshes[0].shape.tensor
        names = tuple(name for mesh in meshes for name in mesh.devices)
        block = self.part(meshes[0].block, names)
        shape = self._shape(block, names, tensor, sum(mesh.lanes for mesh in meshes))
        key = self._keys.setdefault(shape, len(self._keys))
        return Mesh(devices=names, block=block, shape=shape, key=key)

    def _shape(
        self, block: Block, names: tuple[str, ...], tensor: int, lanes: int
    ) -> MeshShape:
        stage = Stage(
            devices=names, layers=(0, 1), lanes=lanes, tensor=tensor, dtype=block.dtype
        )
        return mesh_shape(self.cluster, stage)

    @functools.cached_property
    def pools(self) -> tuple[tuple[Block, ...], ...]:
        """Parts of the cluster worth planning for, the whole first."""
        kinds = list(dict.fromkeys(block.kind for block in by_speed(self.blocks)))
        if len(kinds) <= ALL_SUBSETS:
            mixtures = [
                set(some)
                for count in range(len(kinds), 0, -1)
                for some in itertools.combinations(kinds, count)
            ]
        else:
            mixtures = [set(kinds[:count]) for count in range(len(kinds), 0, -1)]
            mixtures += [{kind} for kind in kinds[1:]]
        pools = [
            tuple(block for block in self.blocks if block.kind in some)
            for some in mixtures
        ]
        return tuple(dict.fromkeys(pools + self._near_pools()))

    def _near_pools(self) -> list[tuple[Block, ...]]:
        """One site, one node, one device: each of which has its own links."""
        sites: dict[str, list[Block]] = {}
        nodes: dict[str, list[Block]] = {}
        for block in self.blocks:
            sites.setdefault(self.cluster.node(block.node).site, []).append(block)
            nodes.setdefault(block.node, []).append(block)
        twins = {
            tuple(block.twin for block in blocks): tuple(blocks)
            for blocks in reversed(nodes.values())
        }
        ones: dict[tuple[str, int], Block] = {}
        for block in self.blocks:
            one = dataclasses.replace(block, devices=block.devices[:1])
            ones.setdefault((block.kind, block.usable_memory_bytes), one)
        fewer = [tuple(blocks) for blocks in sites.values()] if len(sites) > 1 else []
        return [*fewer, *reversed(twins.values()), *((one,) for one in ones.values())]


def _blocks(cluster: Cluster, dtype: str) -> list[Block]:
    members: dict[tuple[str, str, int], list[Device]] = {}
    for device in cluster.devices:
        key = (device.node, device.kind, device.usable_memory_bytes)
        members.setdefault(key, []).append(device)
    found: list[Block] = []
    for (node, kind, _), devices in members.items():
        try:
            used = compute_dtype(dtype, devices[0])
        except PlanError:
            continue  # a kind without this dtype and every wider one
        found.append(
            Block(
                devices=tuple(device.name for device in devices),
                node=node,
                kind=kind,
                dtype=used,
                usable_memory_bytes=room_bytes(devices[0]),
                peak_flops_per_s=devices[0].profile.dense_flops_per_s[used],
            )
        )
    return found


def by_speed(blocks: Sequence[Block]) -> list[Block]:
    """The fastest devices first."""
    return sorted(blocks, key=lambda block: -block.peak_flops_per_s)


def orders(blocks: Sequence[Block]) -> list[list[Block]]:
    """As given, the fastest first and last, the roomiest first; each order once."""
    fast = by_speed(blocks)
    slow = sorted(blocks, key=lambda block: block.peak_flops_per_s)
    roomy = sorted(blocks, key=lambda block: -block.usable_memory_bytes)
    found = {tuple(order): order for order in (list(blocks), fast, slow, roomy)}
    return list(found.values())
