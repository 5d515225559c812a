"""Uneven boxes in one collective over all users: packed, padded to one length.

    arrays of each home -> pack -> a row a member -> all-gather -> rows -> unpack
    gradient of each member -> pack -> a row a home -> reduce-scatter -> a row -> unpack

A row has the first ``path`` elements of a home's boxes, leaf after leaf; what a home
has beyond them, and all of one that computes with nothing, are rests, and go by pieces.
Rows stand in the order of the members, and so is what a reduce-scatter adds, on a
backend that adds in the order of its devices: the same one each time in any case.

Leaves of several dtypes travel as words of 16 or 8 bits: a gather changes none.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hexijax.errors import UserError
from hexijax.plan.plan import Place
from hexijax.runtime.equals import Equals, kind
from hexijax.runtime.group_shapes import Arrays, GroupShapes, Sent
from hexijax.runtime.layout import box_shape
from hexijax.runtime.memo import memo


class Packed(NamedTuple):
    """What has come to one place."""

    path: int
    rows: Sent
    """Of parameters one vector of all rows; of a sum the home's own row, if any."""
    rests: Sent
    """Of parameters by home, of a sum by member; without those that have none."""


class Cut(NamedTuple):
    """Where a home's boxes, as one vector of words, are cut."""

    row: int
    """Words in the collective."""
    rest: int
    """Words by pieces."""


class Collectives(GroupShapes):
    """One group's boxes as vectors, and its users as one mesh."""

    @memo
    def _equals(self) -> Equals:
        """The users' devices, in their order.

        Raises:
          UserError: they are not of one kind and process.
        """
        names = [name for m in self.members for name in self.layout.shape(m)[0]]
        devices = tuple(self.layout.devices[name] for name in names)
        kinds = {kind(d): name for d, name in zip(devices, names, strict=True)}
        if len(kinds) > 1 or len(devices) > len(self.members):
            listed = "; ".join(
                f"{name} is {platform} {model}, process {process}"
                for (platform, model, process), name in kinds.items()
            )
            raise UserError(
                f"The Program moves group {self.group.name!r} by one collective over "
                f"{len(names)} devices, and they are unlike: {listed}. A collective "
                "runs on devices of one kind, which one process drives. Say in the "
                "cluster file what they are, and plan again."
            )
        return Equals(devices)

    def _parts(self, whole: jax.Array) -> dict[Place, jax.Array]:
        """What of it lies on each member."""
        parts = zip(self.members, self._equals().parts(whole), strict=True)
        return {member: self._placed(member, part) for member, part in parts}

    def _placed(self, place: Place, local: jax.Array) -> jax.Array:
        """An array that lies on a place of one device, as its programs know it."""
        where = self.layout.replicated(place)
        return jax.make_array_from_single_device_arrays(local.shape, where, [local])

    # Vectors

    def _word(self, dtypes: Sequence[str]) -> str:
        """What arrays of these dtypes are vectors of."""
        if len(set(dtypes)) == 1:
            return dtypes[0]
        return "uint16" if all(_bytes(d) % 2 == 0 for d in dtypes) else "uint8"

    def _cuts(self, path: int, dtypes: Mapping[str, str]) -> dict[Place, Cut]:
        """Of each home, in words of ``dtypes`` by leaf."""
        word = _bytes(self._word([*dtypes.values()]))
        cuts: dict[Place, Cut] = {}
        for home, held in self.held.items():
            left = path if home in self.members else 0
            row = words = 0
            for leaf, box in held:
                size, each = math.prod(box_shape(box)), _bytes(dtypes[leaf.id]) // word
                row += min(size, left) * each
                words += size * each
                left -= min(size, left)
            cuts[home] = Cut(row, words - row)
        return cuts

    def _boxes(
        self, home: Place, vector: jax.Array, dtypes: Mapping[str, str]
    ) -> Arrays:
        """The arrays that ``as_words`` made one vector of."""
        made: list[jax.Array] = []
        start = 0
        for leaf, box in self.held[home]:
            shape, dtype = box_shape(box), dtypes[leaf.id]
            each = _bytes(dtype) // vector.dtype.itemsize
            size = math.prod(shape) * each
            words = vector[start : start + size]
            start += size
            full = (*shape, each) if each > 1 else shape
            made.append(
                jax.lax.bitcast_convert_type(words.reshape(full), jnp.dtype(dtype))
            )
        return tuple(made)

    # Collectives

    @property
    def _members_here(self) -> bool:
        """Whether this process drives the users: one does, of all of them."""
        return self.layout.here(self.members[0])

    def _copies(
        self,
        arrays: Sequence[Any],
        places: Sequence[Place],
        same: Sequence[int] = (),
    ) -> list[Any]:
        """Arrays where they are wanted, each a place of one device, in one call."""
        targets = [self.layout.replicated(place) for place in places]
        return self.layout.move(arrays, targets, same)

    @memo
    def _nothing(self, member: Place, row: int, word: str) -> Callable[[], jax.Array]:
        """The row of a member that stores none of the group."""
        made = jax.jit(
            lambda: jnp.zeros(row, word), out_shardings=self.layout.replicated(member)
        )
        return made.lower().compile()

    @memo
    def _all_gather(self, row: int, word: str) -> Callable[..., Any]:
        """Every member's row on every member."""
        equals = self._equals()
        return self.programs.get(
            equals.all_gather, (equals.like(row, word),), out_shardings=equals.copied
        )

    @memo
    def _reduce_scatter(self, row: int) -> Callable[..., Any]:
        """The sum of a home's rows over all members, at each home."""
        equals = self._equals()
        given = equals.like(len(self.members) * row, "float32")
        return self.programs.get(
            equals.reduce_scatter, (given,), out_shardings=equals.apart
        )


def as_words(arrays: Sequence[jax.Array], word: str) -> jax.Array:
    """Arrays as one vector of words, in their order."""
    as_words = (jax.lax.bitcast_convert_type(x, jnp.dtype(word)) for x in arrays)
    return jnp.concatenate([x.reshape(-1) for x in as_words])


def padded(vector: jax.Array, length: int) -> jax.Array:
    """With zeros behind it."""
    return jnp.pad(vector, (0, length - vector.size))


def _bytes(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
