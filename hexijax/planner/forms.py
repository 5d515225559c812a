"""Forms of replicas: how many of which class a replica has, and in which meshes.

    Cluster -> device_classes -> Forms.pure, .place({form: count}) -> Layout

Devices of one kind in nodes of one size count as equal, so a form stands for any of
them; ``place`` says which.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hexijax.cluster import Cluster
from hexijax.planner.fit import Fitter
from hexijax.planner.mesh import Layout, Mesh, MeshMaker


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceClass:
    """Devices that count as equal."""

    blocks: tuple[tuple[str, ...], ...]
    """Devices of each node that has some."""

    @property
    def per_block(self) -> int:
        """Devices in each node."""
        return len(self.blocks[0])

    @property
    def count(self) -> int:
        """Devices of all nodes."""
        return sum(map(len, self.blocks))


class Slot(NamedTuple):
    """A stage's mesh, any devices of a class."""

    at: int
    """Index of the class."""

    devices: int
    """How many."""

    tensor: int
    """Tensor degree."""


Form = tuple[Slot, ...]
"""Slots of a replica, in the order of its stages."""


def device_classes(
    cluster: Cluster, only: str | None = None
) -> tuple[DeviceClass, ...]:
    """The classes of a cluster, or of its devices of one kind, roomiest first."""
    blocks: dict[tuple[str, str, int], list[str]] = {}
    for device in cluster.devices:
        if only not in (None, device.kind):
            continue
        key = (device.node, device.kind, device.usable_memory_bytes)
        blocks.setdefault(key, []).append(device.name)
    classes: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    for (name, kind, usable), devices in blocks.items():
        node = cluster.node(name)
        key = (kind, -usable, len(devices), node.site, node.link, node.nic)
        classes.setdefault(key, []).append(tuple(devices))
    found = [DeviceClass(blocks=tuple(x)) for x in classes.values()]

    def room(cls: DeviceClass) -> int:
        return cluster.device(cls.blocks[0][0]).usable_memory_bytes

    return tuple(sorted(found, key=room, reverse=True))


class Forms:
    """Forms of one cluster's devices, or of those of one kind."""

    def __init__(
        self,
        cluster: Cluster,
        maker: MeshMaker,
        fitter: Fitter,
        *,
        degrees: Sequence[int],
        sizes: Sequence[int],
        kind: str | None = None,
    ) -> None:
        self.classes = device_classes(cluster, kind)
        self._cluster = cluster
        self._maker = maker
        self._fitter = fitter
        self._degrees = degrees
        self._sizes = sizes
        self._meshes: dict[Form, tuple[Mesh, ...] | None] = {}
        self._ideals: dict[Form, float] = {}
        self._rates: dict[Slot, float] = {}

    @functools.cached_property
    def kinds(self) -> list[tuple[int, ...]]:
        """Classes of each kind."""
        found: dict[str, list[int]] = {}
        for at, cls in enumerate(self.classes):
            kind = self._cluster.device(cls.blocks[0][0]).kind
            found.setdefault(kind, []).append(at)
        return [tuple(ats) for ats in found.values()]

    def ideal(self, form: Form) -> float:
        """Samples a second and device, were its stages always busy and all did fit."""
        if form not in self._ideals:
            rate = sum(self._rate(slot) for slot in form)
            self._ideals[form] = rate / form_size(form)
        return self._ideals[form]

    def _rate(self, slot: Slot) -> float:
        """Samples a second of a stage's mesh that has all layers; 0: there is none."""
        if slot not in self._rates:
            meshes = self.meshes((slot,))
            each_s = (
                self._fitter.bound_s((meshes,), self._sizes) if meshes else math.inf
            )
            self._rates[slot] = 1 / each_s
        return self._rates[slot]

    def meshes(self, form: Form) -> tuple[Mesh, ...] | None:
        """A form on the first devices there are."""
        if form not in self._meshes:
            layout = self.place({form: 1})
            self._meshes[form] = layout[0] if layout else None
        return self._meshes[form]

    def pure(self, at: int) -> Iterator[Form]:
        """Replicas of one class: parts of a node, a node, or several nodes."""
        cls = self.classes[at]
        per_block, num_blocks = cls.per_block, len(cls.blocks)
        sizes = [n for n in range(1, per_block + 1) if per_block % n == 0]
        nodes = [k for k in scales(num_blocks) if k > 1]
        for total, tensor in itertools.product(
            [*sizes, *(k * per_block for k in nodes)], self._degrees
        ):
            for width in sizes:
                if width % tensor == 0 and total % width == 0:
                    slot = Slot(at=at, devices=width, tensor=tensor)
                    yield (slot,) * (total // width)

    def place(self, counts: Mapping[Form, int]) -> Layout | None:
        """Devices for each slot: a replica stays in a node where it can.

        None where nodes cannot be cut that way.
        """
        forms = [
            form
            for form in sorted(counts, key=lambda form: (-form_size(form), repr(form)))
            for _ in range(counts[form])
        ]
        free = self._all_free()
        taken = [self._take(form, free) for form in forms]
        layout = tuple(meshes for meshes in taken if meshes is not None)
        return layout if len(layout) == len(forms) else self._pack(forms)

    def _all_free(self) -> list[list[list[str]]]:
        return [[list(block) for block in cls.blocks] for cls in self.classes]

    def _pack(self, forms: Sequence[Form]) -> Layout | None:
        """The widest slots of all replicas first, each beside its replica's others."""
        free = self._all_free()
        slots = [(r, k) for r, form in enumerate(forms) for k in range(len(form))]
        slots.sort(key=lambda at: -forms[at[0]][at[1]].devices)
        blocks: dict[tuple[int, int], list[str]] = {}
        meshes: dict[tuple[int, int], Mesh] = {}
        for r, k in slots:
            slot = forms[r][k]
            block = blocks.get((r, slot.at))
            if block is None or len(block) < slot.devices:
                block = _fullest(free[slot.at], slot.devices, slot.devices)
            if block is None:
                return None
            blocks[r, slot.at] = block
            names = tuple(block[: slot.devices])
            del block[: slot.devices]
            meshes[r, k] = self._maker.mesh(names, slot.tensor)
        return tuple(
            tuple(meshes[r, k] for k in range(len(form)))
            for r, form in enumerate(forms)
        )

    def _take(self, form: Form, free: list[list[list[str]]]) -> tuple[Mesh, ...] | None:
        left = demand(form, len(self.classes))
        current: dict[int, list[str]] = {}
        meshes: list[Mesh] = []
        for slot in form:
            block = current.get(slot.at)
            if block is None or len(block) < slot.devices:
                block = _fullest(free[slot.at], slot.devices, left[slot.at])
                if block is None:
                    return None
                current[slot.at] = block
            left[slot.at] -= slot.devices
            names = tuple(block[: slot.devices])
            del block[: slot.devices]
            meshes.append(self._maker.mesh(names, slot.tensor))
        return tuple(meshes)


def _fullest(blocks: Sequence[list[str]], least: int, demand: int) -> list[str] | None:
    """The smallest block with room for all, else the one with most room."""
    roomy = [block for block in blocks if len(block) >= least]
    if not roomy:
        return None
    whole = [block for block in roomy if len(block) >= demand]
    return min(whole, key=len) if whole else max(roomy, key=len)


def scales(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and what divides ``most``, up to it."""
    found = {n for k in range(most.bit_length()) for n in (2**k, 3 * 2**k)}
    divisors = {most // n for n in range(1, 9) if most % n == 0}
    return sorted(n for n in found | divisors if n <= most)


def form_size(form: Form) -> int:
    """Devices of a replica."""
    return sum(slot.devices for slot in form)


def demand(form: Form, num_classes: int) -> list[int]:
    """Devices of each class."""
    need = [0] * num_classes
    for slot in form:
        need[slot.at] += slot.devices
    return need
