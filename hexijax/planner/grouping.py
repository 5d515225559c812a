"""Which devices make a mesh, and which meshes make a replica: by simple rules.

    Cluster -> layouts -> a few dozen (name, replicas of meshes), no layers yet

Each rule is tried whole: cut every node's devices of one kind into meshes of one shape,
then join the meshes into replicas by node, by kind, all in one, or none; on all
devices, on each kind alone, and on each node alone. The search starts from these.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from hexijax.cluster import Cluster, Device
from hexijax.planner.mesh import Layout, Mesh, MeshMaker
from hexijax.planner.options import Grouping, PlanOptions

MAX_NODES_ALONE = 8
"""Nodes that are also tried alone; more are equals as a rule."""

MAX_MIXED = 3
"""Kinds that are also tried together without the others."""


def layouts(
    cluster: Cluster, maker: MeshMaker, options: PlanOptions
) -> Iterator[tuple[str, Layout]]:
    """Layouts to judge, each once, with a name for people."""
    seen: set[Layout] = set()
    for name, devices in _subsets(cluster, options):
        blocks = _blocks(devices)
        for tensor, joined, order in itertools.product(
            options.tensor_degrees, (True, False), _ORDERS
        ):
            meshes = [
                mesh
                for block in sorted(blocks, key=order)
                for mesh in _cut(maker, block, tensor, joined=joined)
            ]
            for grouping in _groupings(options.grouping):
                layout = _join(meshes, grouping)
                if layout not in seen:
                    seen.add(layout)
                    yield f"{name}, a replica per {grouping}", layout


def _subsets(
    cluster: Cluster, options: PlanOptions
) -> Iterator[tuple[str, Sequence[Device]]]:
    yield "all devices", cluster.devices
    if options.use_all_devices:
        return
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        yield f"{kind} alone", [d for d in cluster.devices if d.kind == kind]
        first = next(d for d in cluster.devices if d.kind == kind)
        yield f"{first.name} alone", [first]
    if options.grouping is Grouping.MESH:
        yield from _mixtures(cluster)
    if len(cluster.nodes) <= MAX_NODES_ALONE:
        for node in cluster.nodes:
            yield (
                f"{node.name} alone",
                [d for d in cluster.devices if d.node == node.name],
            )


def _mixtures(cluster: Cluster) -> Iterator[tuple[str, Sequence[Device]]]:
    """Several kinds, not all: under other groupings the search itself finds them."""
    kinds = [*dict.fromkeys(device.kind for device in cluster.devices)]
    for count in range(2, min(len(kinds), MAX_MIXED + 1)):
        for some in itertools.combinations(kinds, count):
            devices = [d for d in cluster.devices if d.kind in some]
            yield f"{' and '.join(some)} alone", devices


def _blocks(devices: Sequence[Device]) -> list[list[Device]]:
    """Devices of one kind in one node: what a mesh is cut from."""
    blocks: dict[tuple[str, str, int], list[Device]] = {}
    for device in devices:
        key = (device.node, device.kind, device.usable_memory_bytes)
        blocks.setdefault(key, []).append(device)
    return list(blocks.values())


def _as_given(block: Sequence[Device]) -> float:
    del block
    return 0.0


def _roomy_first(block: Sequence[Device]) -> float:
    """Early stages hold the most microbatches, so room counts there."""
    return -float(block[0].usable_memory_bytes)


_ORDERS: tuple[Callable[[Sequence[Device]], float], ...] = (_as_given, _roomy_first)


def _cut(
    maker: MeshMaker, block: Sequence[Device], tensor: int, *, joined: bool
) -> Iterator[Mesh]:
    """Meshes of one shape; a degree that does not divide the block's devices is 1."""
    degree = tensor if len(block) % tensor == 0 else 1
    width = len(block) if joined else degree
    for start in range(0, len(block), width):
        names = tuple(device.name for device in block[start : start + width])
        yield maker.mesh(names, degree)


def _groupings(asked: Grouping) -> Sequence[Grouping]:
    if asked is Grouping.AUTO:
        return [grouping for grouping in Grouping if grouping is not Grouping.AUTO]
    return [asked]


def _join(meshes: Sequence[Mesh], grouping: Grouping) -> Layout:
    """Replicas of the meshes, in the order of their first mesh."""
    replicas: dict[object, list[Mesh]] = {}
    for mesh in meshes:
        key: dict[Grouping, object] = {
            Grouping.ONE: 0,
            Grouping.NODE: mesh.node,
            Grouping.KIND: (mesh.node, mesh.shape.profile.kind),
            Grouping.MESH: mesh.devices,
        }
        replicas.setdefault(key[grouping], []).append(mesh)
    return tuple(map(tuple, replicas.values()))
