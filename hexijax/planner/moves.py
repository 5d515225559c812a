"""Layouts that differ from one by a single decision: what local search walks over.

    Layout -> neighbours -> (Layout, ...)

A move is made to one replica, and to all replicas of its shape at once.
"""

import functools
from collections.abc import Iterator, Sequence

from hexijax.cluster import Cluster
from hexijax.planner.mesh import Layout, Mesh, MeshMaker

Replica = tuple[Mesh, ...]


def neighbours(
    layout: Layout, cluster: Cluster, maker: MeshMaker, degrees: Sequence[int]
) -> Iterator[Layout]:
    """Each layout that one move makes; some come twice."""
    shape_of = [tuple(mesh.shape_id for mesh in meshes) for meshes in layout]
    members: dict[tuple[int, ...], list[int]] = {}
    for r, shape in enumerate(shape_of):
        members.setdefault(shape, []).append(r)
    inside = functools.partial(_inside, maker=maker, degrees=degrees)
    for group in members.values():
        first = group[0]
        for k in range(len(layout[first])):
            for way in range(NUM_WAYS):
                changed = {r: inside(layout[r], k, way) for r in group}
                if changed[first] is None:
                    continue
                for some in {len(group): group, 1: [first]}.values():
                    yield _replaced(layout, {r: changed[r] for r in some})
        yield from _pairs(layout, group)
        yield from _reordered(layout, group)
    yield from _across(layout, list(members.values()))
    yield from _additions(layout, cluster, maker)


def same_but_names(
    layout: Layout, cluster: Cluster, classes: dict[object, int]
) -> object:
    """Equal for layouts that differ in which of equal devices and nodes they name, and
    in the order of replicas; ``classes`` has the kinds of nodes seen so far."""
    numbers: dict[str, int] = {}
    replicas: list[list[tuple[int, int, str]]] = []
    for meshes in layout:
        nodes = [cluster.node(mesh.node) for mesh in meshes]
        kinds = [(node.site, node.nic, node.link) for node in nodes]
        like = [classes.setdefault(kind, len(classes)) for kind in kinds]
        replicas.append(
            [(m.shape_id, c, m.node) for m, c in zip(meshes, like, strict=True)]
        )
    replicas.sort(key=lambda row: [each[:2] for each in row])
    return tuple(
        tuple((s, c, numbers.setdefault(node, len(numbers))) for s, c, node in row)
        for row in replicas
    )


NUM_WAYS = 11
"""Of ``_inside``."""


def _inside(
    meshes: Replica, k: int, way: int, *, maker: MeshMaker, degrees: Sequence[int]
) -> list[Replica] | None:
    """What becomes of a replica; None where the move does not apply."""
    mesh = meshes[k]
    before, after = meshes[:k], meshes[k + 1 :]
    shape, count = mesh.shape, mesh.shape.num_devices
    if way < 4:  # another tensor degree on the same devices
        others = [t for t in degrees if t != shape.tensor and count % t == 0]
        if way >= len(others):
            return None
        return [(*before, maker.mesh(mesh.devices, others[way]), *after)]
    if way == 4 and count % 2 == 0:  # two stages of half the devices
        half = count // 2
        tensor = shape.tensor if half % shape.tensor == 0 else half
        if tensor in degrees:
            parts = (mesh.devices[:half], mesh.devices[half:])
            return [(*before, *(maker.mesh(part, tensor) for part in parts), *after)]
    if way in (5, 6) and after and _joinable(mesh, after[0]):
        devices = (*mesh.devices, *after[0].devices)
        tensor = shape.tensor * (way - 4)
        if tensor in degrees and len(devices) % tensor == 0:
            return [(*before, maker.mesh(devices, tensor), *after[1:])]
    if way == 7 and after:
        return [(*before, after[0], mesh, *after[1:])]
    if way == 8 and after:
        return [(*before, mesh), after]
    if way == 9 and len(meshes) > 1:
        return [(*before, *after)]
    if way == 10 and k == 0:
        return []
    return None


def _joinable(a: Mesh, b: Mesh) -> bool:
    same_kind = a.shape.profile.kind == b.shape.profile.kind
    return same_kind and a.node == b.node and a.devices != b.devices


def _replaced(layout: Layout, changed: dict[int, list[Replica] | None]) -> Layout:
    result: list[Replica] = []
    for r, meshes in enumerate(layout):
        new = changed.get(r)
        result += [meshes] if new is None else new
    return tuple(result)


def _reordered(layout: Layout, group: Sequence[int]) -> Iterator[Layout]:
    """A stage moved to another place in its replica, or all sorted by what they are."""
    first = layout[group[0]]
    count = len(first)
    if count < 3:
        return
    orders = [
        sorted(range(count), key=lambda k: (sign * keys[k], k))
        for keys in (
            [float(mesh.shape.usable_memory_bytes) for mesh in first],
            [float(mesh.shape_id) for mesh in first],
        )
        for sign in (1, -1)
    ]
    for k in range(count):
        for at in range(count):
            if abs(at - k) > 1:
                order = [i for i in range(count) if i != k]
                order.insert(at, k)
                orders.append(order)
    for order in orders:
        changed = {r: [tuple(layout[r][k] for k in order)] for r in group}
        yield _replaced(layout, {**changed})


def _pairs(layout: Layout, group: Sequence[int]) -> Iterator[Layout]:
    """Equal replicas joined two by two, or only the first two."""
    if len(group) < 2:
        return
    pairs = list(zip(group[::2], group[1::2], strict=False))
    for some in (pairs, pairs[:1]) if len(pairs) > 1 else (pairs,):
        changed: dict[int, list[Replica] | None] = {}
        for r, s in some:
            changed |= {r: [layout[r] + layout[s]], s: []}
        yield _replaced(layout, changed)


def _across(layout: Layout, groups: Sequence[Sequence[int]]) -> Iterator[Layout]:
    """Between replicas of unlike shape: joined, a stage handed over, stages swapped."""
    for i, group in enumerate(groups):
        for others in groups[i + 1 :]:
            r, s = group[0], others[0]
            a, b = layout[r], layout[s]
            for joined in (a + b, b + a):
                yield _replaced(layout, {r: [joined], s: []})
            if len(group) == len(others) > 1:
                for swap in (False, True):
                    changed: dict[int, list[Replica] | None] = {}
                    for x, y in zip(group, others, strict=True):
                        pair = (
                            (layout[y], layout[x]) if swap else (layout[x], layout[y])
                        )
                        changed |= {x: [pair[0] + pair[1]], y: []}
                    yield _replaced(layout, changed)
            for x, y in ((r, s), (s, r)):
                giver, taker = layout[x], layout[y]
                for k, mesh in enumerate(giver):
                    left = giver[:k] + giver[k + 1 :]
                    for at in range(len(taker) + 1):
                        new = (*taker[:at], mesh, *taker[at:])
                        yield _replaced(layout, {x: [left] if left else [], y: [new]})
            for k, mesh in enumerate(a):
                for n, other in enumerate(b):
                    if mesh.shape_id != other.shape_id:
                        new_a = (*a[:k], other, *a[k + 1 :])
                        new_b = (*b[:n], mesh, *b[n + 1 :])
                        yield _replaced(layout, {r: [new_a], s: [new_b]})


def _additions(layout: Layout, cluster: Cluster, maker: MeshMaker) -> Iterator[Layout]:
    """Unused devices: the first of each node and kind alone, or as one more stage."""
    used = {name for meshes in layout for mesh in meshes for name in mesh.devices}
    tried: set[tuple[str, str]] = set()
    for device in cluster.devices:
        key = (device.node, device.kind)
        if device.name in used or key in tried:
            continue
        tried.add(key)
        mesh = maker.mesh((device.name,), 1)
        yield (*layout, (mesh,))
        for r in range(min(len(layout), 4)):
            for at in range(len(layout[r]) + 1):
                new = (*layout[r][:at], mesh, *layout[r][at:])
                yield _replaced(layout, {r: [new]})
