"""What one group is and where: its places, boxes, shapes and shardings."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hexijax.layers.chain import Group, Leaf
from hexijax.plan.plan import Place
from hexijax.program.boxes import Box
from hexijax.program.buckets import update_site
from hexijax.program.names import state as state_name
from hexijax.program.placement import state_memory
from hexijax.program.program import Buffer, Memory, Site
from hexijax.program.resting import joined
from hexijax.runtime.host import host_memory
from hexijax.runtime.layout import PINNED_HOST, Layout, box_shape
from hexijax.runtime.memo import memo
from hexijax.runtime.packs import Joined
from hexijax.runtime.programs import Programs, struct

Arrays = tuple[jax.Array, ...]
Sent = tuple[Any, ...]
"""Arrays; structs of those elsewhere; those that are still to come."""


class GroupShapes:
    """What sums, updates and gathers of one group have in common."""

    def __init__(
        self,
        *,
        layout: Layout,
        programs: Programs,
        group: Group,
        members: tuple[Place, ...],
        param_dtypes: Mapping[Place, Sequence[str]],
    ):
        """``param_dtypes``: what each user computes with, leaf by leaf."""
        self.layout, self.programs, self.group = layout, programs, group
        self.members, self.param_dtypes = members, param_dtypes
        self._memory = state_memory(layout.plan, layout.chain, group)
        self._site = update_site(layout.plan, group)
        boxes = layout.boxes[group.name]
        self.homes: tuple[Place, ...] = tuple(boxes)
        self.held: dict[Place, list[tuple[Leaf, Box]]] = {
            home: [(x, boxes[home][x.id]) for x in group.leaves if x.id in boxes[home]]
            for home in self.homes
        }
        dtypes = [tuple(param_dtypes[m]) for m in members]
        agree = len(set(dtypes)) == 1
        self.slice_dtypes: dict[str, str] = {
            leaf.id: dtypes[0][i] if agree else leaf.dtype
            for i, leaf in enumerate(group.leaves)
        }

    def state_buffer(self, home: Place) -> Buffer:
        """What a Program calls the state at a home."""
        return state_name(home, self.group.name, memory=self._memory)

    @property
    def _packed(self) -> bool:
        """Whether what goes from one place to another goes as one array a dtype: no
        place divides it."""
        alone = len(self.homes) == 1 and self.homes[0] in self.members
        places = (*self.homes, *self.members)
        return (
            self.group.trainable
            and not alone
            and all(self._devices(place) == 1 for place in places)
        )

    def _devices(self, place: Place) -> int:
        _, lanes, tensor = self.layout.shape(place)
        return lanes * tensor

    @memo
    def _at(self, place: Place) -> NamedSharding:
        """Whole on every device of a place."""
        return self.layout.replicated(place)

    @memo
    def _shapes(self, home: Place) -> tuple[tuple[int, ...], ...]:
        """Of a home's boxes."""
        return tuple(box_shape(box) for _, box in self.held[home])

    @memo
    def _casts(self, home: Place) -> tuple[bool, ...]:
        """Which leaves of a home travel in another dtype than their master's."""
        return tuple(
            jnp.dtype(self.slice_dtypes[leaf.id]) != jnp.dtype(leaf.dtype)
            for leaf, _ in self.held[home]
        )

    @memo
    def _joined(self, home: Place) -> Joined:
        """Masters that rest as one array: small ones, whose copies in another dtype
        are what users get, of a home that does not divide them."""
        return self._small(home, self._masters(home), self._casts(home))

    def _small(
        self,
        home: Place,
        structs: Sequence[jax.ShapeDtypeStruct],
        may: Sequence[bool],
    ) -> Joined:
        which = joined(
            [x.size for x in structs],
            [
                yes and x.dtype == jnp.float32
                for x, yes in zip(structs, may, strict=True)
            ],
            site=self._site,
            devices=self._devices(home),
        )
        return Joined(which, tuple(structs[i].shape for i in which))

    @memo
    def _packs(self, home: Place) -> dict[str, tuple[int, ...]]:
        """Dtype of each array in which a home's parameters travel, and which of its
        leaves are in it. Those that are not cast travel alone, as they lie."""
        found: dict[str, list[int]] = {}
        for i, cast in enumerate(self._casts(home) if self._packed else ()):
            if cast:
                leaf, _ = self.held[home][i]
                found.setdefault(self.slice_dtypes[leaf.id], []).append(i)
        return {dtype: tuple(which) for dtype, which in found.items()}

    @memo
    def _pieces(self, place: Place, home: Place) -> tuple[NamedSharding, ...]:
        """A home's boxes on their way to or from a place."""
        return tuple(
            self.layout.piece(place, leaf, box) for leaf, box in self.held[home]
        )

    @memo
    def _slices(self, home: Place) -> tuple[NamedSharding, ...]:
        if not self.group.trainable and self._memory is Memory.DEVICE:
            return tuple(self.layout.param(home, leaf) for leaf, _ in self.held[home])
        return tuple(
            self.layout.slice(home, leaf, box) for leaf, box in self.held[home]
        )

    def _masters(self, home: Place) -> tuple[jax.ShapeDtypeStruct, ...]:
        """On the home's devices."""
        return tuple(
            struct(box_shape(box), leaf.dtype, sharding)
            for (leaf, box), sharding in zip(
                self.held[home], self._slices(home), strict=True
            )
        )

    def at_rest(self, structs: Any) -> Any:
        """State as it rests at its home: on the devices, in host memory that they can
        reach, or in the host processor's own, whole."""
        if self._memory is Memory.DEVICE:
            return structs
        if self._site is Site.HOST:
            return jax.tree.map(
                lambda s: struct(s.shape, s.dtype, host_memory(s.shape)), structs
            )
        return jax.tree.map(
            lambda s: struct(
                s.shape, s.dtype, s.sharding.with_memory_kind(PINNED_HOST)
            ),
            structs,
        )

    def _slice_structs(
        self, home: Place, dtype: str
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            struct(box_shape(box), dtype, self.layout.slice(home, leaf, box))
            for leaf, box in self.held[home]
        )

    def _grads(self, place: Place) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape, sharding = self.layout.grad_shape, self.layout.grad
        return tuple(
            struct(shape(place, leaf), "float32", sharding(place, leaf))
            for leaf in self.group.leaves
        )

    def _params(self, place: Place) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            struct(leaf.shape, dtype, self.layout.param(place, leaf))
            for leaf, dtype in zip(
                self.group.leaves, self.param_dtypes[place], strict=True
            )
        )


def is_like(given: jax.ShapeDtypeStruct, wanted: jax.ShapeDtypeStruct) -> bool:
    """Whether one array can stand for another as it lies."""
    return given.dtype == wanted.dtype and given.sharding.is_equivalent_to(
        wanted.sharding, len(given.shape)
    )


def cut(x: jax.Array, box: Box) -> jax.Array:
    """The rows of a box."""
    return x[tuple(slice(start, stop) for start, stop in box)]
