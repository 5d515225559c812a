"""Every layout of a few devices, equals once.

    devices -> every_layout -> all ways to make meshes, and replicas of meshes

Devices may be left out; stages may stand in any order; lanes and tensor degrees divide
a mesh in every way. Devices of one kind in one node that no link tells apart count as
equal. Exponential: for about five devices.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

from hexijax.cluster import Cluster, Device
from hexijax.planner.mesh import Layout, Mesh, MeshMaker

T = TypeVar("T")


def every_layout(
    cluster: Cluster, maker: MeshMaker, degrees: Sequence[int], *, use_all: bool
) -> Iterator[Layout]:
    """All layouts, each once up to equal devices."""
    label = labels(cluster)
    seen: set[object] = set()
    names = [device.name for device in cluster.devices]
    for used in _subsets(names, use_all=use_all):
        for parts in set_partitions(used):
            if not all(_one_mesh(cluster, part) for part in parts):
                continue
            for meshes in itertools.product(
                *(_meshes(maker, part, degrees) for part in parts)
            ):
                for layout in _replicas(meshes):
                    key = tuple(
                        sorted(
                            tuple(
                                (
                                    tuple(sorted(label[d] for d in mesh.devices)),
                                    mesh.shape.tensor,
                                )
                                for mesh in replica
                            )
                            for replica in layout
                        )
                    )
                    if key not in seen:
                        seen.add(key)
                        yield layout


def labels(cluster: Cluster) -> dict[str, int]:
    """A number a device, the same for devices that nothing tells apart."""
    named = {name for pair in cluster.links.device_pairs for name in pair.between}
    found: dict[object, int] = {}
    result: dict[str, int] = {}
    for device in cluster.devices:
        key: tuple[object, ...] = (device.node, device.kind, device.usable_memory_bytes)
        if device.name in named:
            key = (*key, device.name)
        result[device.name] = found.setdefault(key, len(found))
    return result


def set_partitions(items: Sequence[T]) -> Iterator[list[tuple[T, ...]]]:
    """All ways to divide items into groups, in no order."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in set_partitions(rest):
        yield [(first,), *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], (first, *part), *parts[i + 1 :]]


def _subsets(names: Sequence[str], *, use_all: bool) -> Iterator[tuple[str, ...]]:
    for count in range(len(names), len(names) - 1 if use_all else 0, -1):
        yield from itertools.combinations(names, count)


def _one_mesh(cluster: Cluster, part: Sequence[str]) -> bool:
    devices: list[Device] = [cluster.device(name) for name in part]
    return len({(device.kind, device.island) for device in devices}) == 1


def _meshes(
    maker: MeshMaker, part: tuple[str, ...], degrees: Sequence[int]
) -> list[Mesh]:
    return [maker.mesh(part, t) for t in degrees if len(part) % t == 0]


def _replicas(meshes: Sequence[Mesh]) -> Iterator[Layout]:
    for groups in set_partitions(meshes):
        yield from itertools.product(*(itertools.permutations(g) for g in groups))
