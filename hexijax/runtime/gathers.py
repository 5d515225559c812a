"""New parameters of one group from those who store it to those who compute with it.

    slices at the homes -> send_params -> pieces at the users -> join -> parameters

They travel in the dtype they are computed with, to each lane its part, and the lanes
gather the whole. Of a group that does not train they travel once. Between users of one
device each, all of one kind, a part of them may go to all by one collective.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hexijax.layers.chain import Leaf
from hexijax.plan.plan import Place
from hexijax.program.boxes import Box
from hexijax.program.program import Memory, Site
from hexijax.runtime.collectives import Collectives, Packed, as_words, padded
from hexijax.runtime.group_shapes import Arrays, Sent, is_like
from hexijax.runtime.host import way_to_cards
from hexijax.runtime.layout import box_shape
from hexijax.runtime.memo import memo
from hexijax.runtime.packs import pack, size_of, unpack
from hexijax.runtime.programs import struct


class Gathers(Collectives):
    """Gather and Join of one group."""

    def slices(self, home: Place, state: dict[str, Any] | None) -> Sent:
        """New parameters of a home's boxes in the dtype they travel in.

        Where that is the master's dtype they are the master arrays themselves. Of a
        home on another island there is no state, and they are structs.
        """
        if state is None:
            return self._elsewhere(home)
        if self._memory is Memory.HOST:
            return self._from_host(home, state["master"])
        if self._packs(home):
            packed = self._slice_program(home)(state["master"])
            return (*packed, *self._uncast(home, state["master"]))
        if any(self._casts(home)):
            return self._slice_program(home)(state["master"])
        return state["master"]

    @memo
    def _slice_program(self, home: Place) -> Callable[..., Any]:
        """What makes slices of masters on their devices, each time they are read."""
        packs, masters = self._packs(home), self._masters(home)
        if packs:
            return self.programs.get(
                functools.partial(self._pack, home),
                (masters,),
                out_shardings=tuple(x.sharding for x in self._pack_structs(home)),
            )
        dtypes = tuple(self.slice_dtypes[leaf.id] for leaf, _ in self.held[home])
        return self.programs.get(
            lambda p: tuple(x.astype(d) for x, d in zip(p, dtypes, strict=True)),
            (masters,),
            out_shardings=self._slices(home),
        )

    def _pack(self, home: Place, masters: Arrays) -> Arrays:
        """The masters that travel in another dtype, in one array for each."""
        return tuple(
            pack([masters[i].astype(dtype) for i in which])
            for dtype, which in self._packs(home).items()
        )

    def _uncast(self, home: Place, masters: Sequence[Any]) -> tuple[Any, ...]:
        """The masters that travel as they are."""
        casts = self._casts(home)
        return tuple(x for x, cast in zip(masters, casts, strict=True) if not cast)

    def _unpack(self, home: Place, arrays: Arrays) -> list[jax.Array]:
        """What ``_pack`` and ``_uncast`` gave, as a home's boxes in their order."""
        packs, shapes = self._packs(home), self._shapes(home)
        found: dict[int, jax.Array] = {}
        for flat, which in zip(arrays, packs.values(), strict=False):
            boxes = unpack(flat, [shapes[i] for i in which])
            found |= dict(zip(which, boxes, strict=True))
        rest = iter(arrays[len(packs) :])
        return [found[i] if i in found else next(rest) for i in range(len(shapes))]

    def _from_host(self, home: Place, masters: Arrays) -> Arrays:
        """One by one: of their own dtype, no device ever holds more than one, of what
        does not train and may be all that there is. Joined ones come together."""
        made: list[jax.Array] = []
        joined = self._joined(home)
        given = joined.opened(masters, lambda flat, _: self._parted(home, flat))
        for i, master in enumerate(given):
            x = jax.device_put(master, self._slices(home)[i])
            if self._casts(home)[i]:
                x = self._cast_program(home, i)(x)
            made.append(x if self.group.trainable else jax.block_until_ready(x))
        if not self._packs(home):
            return tuple(made)
        return (*self._pack_program(home)(tuple(made)), *self._uncast(home, made))

    @memo
    def _pack_program(self, home: Place) -> Callable[..., Any]:
        """Packs what is cast already."""
        dtypes = [self.slice_dtypes[leaf.id] for leaf, _ in self.held[home]]
        given = tuple(
            struct(m.shape, dtype, m.sharding)
            for m, dtype in zip(self._masters(home), dtypes, strict=True)
        )
        return self.programs.get(
            functools.partial(self._pack, home),
            (given,),
            out_shardings=(self._at(home),) * len(self._packs(home)),
        )

    @memo
    def _cast_program(self, home: Place, i: int) -> Callable[..., Any]:
        master, (leaf, _) = self._masters(home)[i], self.held[home][i]
        return self.programs.get(
            _caster(self.slice_dtypes[leaf.id]),
            (master,),
            out_shardings=master.sharding,
        )

    def _parted(self, home: Place, flat: jax.Array) -> Arrays:
        """Joined masters, apart on their home's device."""
        return self._part_program(home)(jax.device_put(flat, self._at(home)))

    @memo
    def _part_program(self, home: Place) -> Callable[..., Any]:
        joined, masters = self._joined(home), self._masters(home)
        shapes = joined.shapes
        return self.programs.get(
            lambda flat: unpack(flat, shapes),
            (struct((size_of(shapes),), "float32", self._at(home)),),
            out_shardings=tuple(masters[i].sharding for i in joined.which),
        )

    def _elsewhere(self, home: Place) -> Sent:
        """What ``slices`` gives of a home on another island."""
        assert not self.layout.here(home), (self.group.name, home)
        if any(self._packs(home)):
            return self._sent(home, self.layout.replicated(home))
        return tuple(
            struct(m.shape, self.slice_dtypes[leaf.id], m.sharding)
            for m, (leaf, _) in zip(self._masters(home), self.held[home], strict=True)
        )

    def on_devices(self, home: Place, slices: Arrays | None) -> Sent:
        """Slices that an update has made, at their home; the host's come there."""
        if slices is None:
            return self._elsewhere(home)
        if self._site is not Site.HOST:
            return slices
        return tuple(
            to_card(x) for to_card, x in zip(self._to_cards(home), slices, strict=True)
        )

    @memo
    def _to_cards(self, home: Place) -> list[Callable[[jax.Array], jax.Array]]:
        """For each array that the host's update makes of new parameters."""
        slices = [
            struct(box_shape(box), self.slice_dtypes[leaf.id], where)
            for (leaf, box), where in zip(
                self.held[home], self._slices(home), strict=True
            )
        ]
        packs = self._pack_structs(home)
        if packs:
            slices = [*packs, *self._uncast(home, slices)]
        return [way_to_cards(x, self.programs) for x in slices]

    @memo
    def _pack_structs(self, home: Place) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of what ``_pack`` gives."""
        shapes, where = self._shapes(home), self.layout.replicated(home)
        return tuple(
            struct((size_of([shapes[i] for i in which]),), dtype, where)
            for dtype, which in self._packs(home).items()
        )

    def send_params(
        self, places: Sequence[Place], slices: Mapping[Place, Sent]
    ) -> list[Any]:
        """For each place every leaf's pieces, on their way there.

        All in one move: what several places of another island want goes there once.
        """
        if len(places) == 1 and self.homes == tuple(places):
            return [slices[places[0]]]
        given = [x for home in self.homes for x in slices[home]]
        wanted = [self._wanted(place, given) for place in places]
        targets = [target for each in wanted for target in each]
        size = len(given)
        same = [*range(size)] * len(places)
        came = self.layout.move(given * len(places), targets, same)
        parts = [came[i * size : (i + 1) * size] for i in range(len(places))]
        return [
            slices[place] if self.homes == (place,) else self._arranged(part, slices)
            for place, part in zip(places, parts, strict=True)
        ]

    def _wanted(self, place: Place, given: Sequence[Any]) -> Sequence[NamedSharding]:
        """Where all that is sent to a place is to lie."""
        if self.homes == (place,):  # it stays as it is
            return [x.sharding for x in given]
        if any(map(self._packs, self.homes)):
            return [self._at(place)] * len(given)
        return [
            target
            for home in self.homes
            for target in (
                self._pieces(place, home) if home != place else self._slices(home)
            )
        ]

    def _arranged(self, came: Sequence[Any], slices: Mapping[Place, Sent]) -> Any:
        """What has been sent to a place, as ``join`` takes it."""
        if any(map(self._packs, self.homes)):
            rest = iter(came)
            return [tuple(next(rest) for _ in slices[home]) for home in self.homes]
        order = [(x.id, box) for home in self.homes for x, box in self.held[home]]
        moved = dict(zip(order, came, strict=True))
        return tuple(
            [moved[key] for key in sorted(moved) if key[0] == leaf.id]
            for leaf in self.group.leaves
        )

    def gather(self, slices: Mapping[Place, Sent], path: int) -> dict[Place, Packed]:
        """What every user gets, a part of it by one collective."""
        cuts, word = self._cuts(path, self.slice_dtypes), self._slice_word
        row = max(cut.row for cut in cuts.values())
        rows: dict[Place, Any] = {}
        rests: list[Any] = []
        for home in self.homes:
            mine, rest = self._row_and_rest(home, path)(slices[home])
            rows.update((home, x) for x in mine)
            rests += rest
        whole: dict[Place, Any] = dict.fromkeys(self.members)
        if self._members_here:
            own = [
                rows[m] if m in rows else self._nothing(m, row, word)()
                for m in self.members
            ]
            whole = self._parts(self._all_gather(row, word)(self._equals().whole(own)))
        to = [member for member in self.members for _ in rests]
        same = [*range(len(rests))] * len(self.members)
        copies = iter(self._copies(rests * len(self.members), to, same))
        return {
            member: Packed(path, (whole[member],), tuple(next(copies) for _ in rests))
            for member in self.members
        }

    @property
    def _slice_word(self) -> str:
        return self._word([self.slice_dtypes[leaf.id] for leaf in self.group.leaves])

    @memo
    def _row_and_rest(self, home: Place, path: int) -> Callable[..., Any]:
        """A home's boxes as its row and its rest, each if there is any."""
        cuts, word = self._cuts(path, self.slice_dtypes), self._slice_word
        length, (row, rest) = max(cut.row for cut in cuts.values()), cuts[home]

        def f(slices: Arrays) -> tuple[Arrays, Arrays]:
            vector = as_words(self._unpack(home, slices), word)
            mine = (padded(vector[:row], length),) if home in self.members else ()
            return mine, (vector[row:],) if rest else ()

        here = self.layout.replicated(home)
        return self.programs.get(f, (self._sent(home, here),), out_shardings=here)

    @memo
    def _of_rows(self, place: Place, path: int) -> Callable[..., Any]:
        """Parameters of all homes' rows and rests."""
        cuts, target = self._cuts(path, self.slice_dtypes), self._params(place)
        length = max(cut.row for cut in cuts.values())
        start = {member: i * length for i, member in enumerate(self.members)}

        def f(rows: Arrays, rests: Arrays) -> Arrays:
            beyond = iter(rests)
            found: dict[str, list[tuple[Box, jax.Array]]] = {}
            for home, cut in cuts.items():
                at = start.get(home, 0)
                parts = [
                    rows[0][at : at + cut.row],
                    *([next(beyond)] if cut.rest else []),
                ]
                boxes = self._boxes(home, jnp.concatenate(parts), self.slice_dtypes)
                for (leaf, box), x in zip(self.held[home], boxes, strict=True):
                    found.setdefault(leaf.id, []).append((box, x))
            return tuple(
                _whole(leaf, found[leaf.id]).astype(t.dtype)
                for leaf, t in zip(self.group.leaves, target, strict=True)
            )

        here, word = self.layout.replicated(place), self._slice_word
        rows = (struct((length * len(self.members),), word, here),)
        rests = tuple(struct((c.rest,), word, here) for c in cuts.values() if c.rest)
        return self.programs.get(
            f, (rows, rests), out_shardings=tuple(t.sharding for t in target)
        )

    def join(self, place: Place, pieces: Any) -> Arrays:
        """The group's parameters as a place computes with them, of what has come."""
        pieces = self.layout.carrier.settle(pieces)
        if isinstance(pieces, Packed):
            return self._of_rows(place, pieces.path)(pieces.rows, pieces.rests)
        if any(map(self._packs, self.homes)):
            return self._join_packs(place)(pieces)
        make = self._spread if self.homes == (place,) else self._join
        return make(place)(pieces)

    @memo
    def _join_packs(self, place: Place) -> Callable[..., Any]:
        """Boxes that have come in packs become whole parameters."""
        target, here = self._params(place), self.layout.replicated(place)

        def f(parts: list[Arrays]) -> Arrays:
            boxes: dict[str, list[tuple[Box, jax.Array]]] = {}
            for home, arrays in zip(self.homes, parts, strict=True):
                unpacked = self._unpack(home, arrays)
                for (leaf, box), x in zip(self.held[home], unpacked, strict=True):
                    boxes.setdefault(leaf.id, []).append((box, x))
            return tuple(
                _whole(leaf, boxes[leaf.id]).astype(t.dtype)
                for leaf, t in zip(self.group.leaves, target, strict=True)
            )

        return self.programs.get(
            f,
            ([self._sent(home, here) for home in self.homes],),
            out_shardings=tuple(t.sharding for t in target),
        )

    def _sent(
        self, home: Place, here: NamedSharding
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What ``slices`` gives of a home, wherever it is."""
        shapes, packs = self._shapes(home), self._packs(home)
        flats = (
            struct((size_of([shapes[i] for i in which]),), dtype, here)
            for dtype, which in packs.items()
        )
        packed = {i for which in packs.values() for i in which}
        alone = (
            struct(shapes[i], self.slice_dtypes[leaf.id], here)
            for i, (leaf, _) in enumerate(self.held[home])
            if i not in packed
        )
        return (*flats, *alone)

    @memo
    def _spread(self, place: Place) -> Callable[..., Any]:
        """One home that is also the user: all-gather over its lanes, or nothing."""
        source = [
            struct(box_shape(box), self.slice_dtypes[leaf.id], sharding)
            for (leaf, box), sharding in zip(
                self.held[place], self._slices(place), strict=True
            )
        ]
        target = self._params(place)
        if all(is_like(s, t) for s, t in zip(source, target, strict=True)):
            return lambda slices: slices
        return self.programs.get(
            lambda p: tuple(x.astype(t.dtype) for x, t in zip(p, target, strict=True)),
            (tuple(source),),
            out_shardings=tuple(t.sharding for t in target),
        )

    @memo
    def _join(self, place: Place) -> Callable[..., Any]:
        """Boxes of several homes, all lying on ``place``, become whole parameters.

        Each is gathered over the lanes before they are joined: the other way round the
        lanes' rows would lie in turns, and the whole be copied once more.
        """
        target = self._params(place)
        found: dict[str, list[tuple[Box, jax.ShapeDtypeStruct]]] = {}
        for home in self.homes:
            here = self._pieces(place, home) if home != place else self._slices(home)
            for (leaf, box), sharding in zip(self.held[home], here, strict=True):
                piece = struct(box_shape(box), self.slice_dtypes[leaf.id], sharding)
                found.setdefault(leaf.id, []).append((box, piece))
        parts = tuple(
            [piece for _, piece in sorted(found[leaf.id], key=lambda x: x[0])]
            for leaf in self.group.leaves
        )
        if all(
            len(p) == 1 and is_like(p[0], t) for p, t in zip(parts, target, strict=True)
        ):
            return lambda parts: tuple(p[0] for p in parts)
        dims = [
            next((d for d, n in enumerate(leaf.shape) if p[0].shape[d] != n), 0)
            for leaf, p in zip(self.group.leaves, parts, strict=True)
        ]

        def f(parts: tuple[list[jax.Array], ...]) -> Arrays:
            whole = [
                [
                    jax.lax.with_sharding_constraint(x.astype(t.dtype), t.sharding)
                    for x in p
                ]
                for p, t in zip(parts, target, strict=True)
            ]
            return tuple(
                jnp.concatenate(p, axis=d) if len(p) > 1 else p[0]
                for p, d in zip(whole, dims, strict=True)
            )

        return self.programs.get(
            f, (parts,), out_shardings=tuple(t.sharding for t in target)
        )


def _whole(leaf: Leaf, boxes: list[tuple[Box, jax.Array]]) -> jax.Array:
    """A leaf of all its boxes, cut along one dim."""
    ordered = [x for _, x in sorted(boxes, key=lambda each: each[0])]
    if len(ordered) == 1:
        return ordered[0]
    dims = [d for d, rows in enumerate(leaf.shape) if ordered[0].shape[d] != rows]
    return jnp.concatenate(ordered, axis=dims[0])


@functools.cache
def _caster(dtype: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype)
