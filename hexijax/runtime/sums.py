"""Gradients of one group from those who compute with it to those who store it.

    gradients at the users -> send_grads -> pieces at their homes -> sum

A gradient is first summed over the lanes of its own mesh and cut to each home's box,
then copied there and added in the order the Program lists. Each lane sends and receives
its part of a box, never all of it: links between meshes are slower than those inside.
Between users of one device each, all of one kind, a part of the sum may be made by one
collective, in an order of its own.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hexijax.layers.chain import Leaf
from hexijax.plan.plan import Place, Reductions
from hexijax.program.boxes import Box
from hexijax.runtime.collectives import Collectives, Packed, padded
from hexijax.runtime.group_shapes import Arrays, Sent, cut
from hexijax.runtime.layout import DATA, MODEL, box_shape
from hexijax.runtime.memo import memo
from hexijax.runtime.packs import pack, size_of, unpack
from hexijax.runtime.programs import struct


class Sums(Collectives):
    """Reduce and Sum of one group."""

    @property
    def _alone(self) -> bool:
        """Whether the only user is the only home: then nothing travels."""
        return self.homes == self.members and len(self.homes) == 1

    def send_grads(self, grads: Mapping[Place, Any]) -> dict[Place, Any]:
        """Home -> each member's gradient of its boxes, on the way there.

        Of members on other islands there are none.
        """
        if self._alone:
            return dict(grads)
        cut: dict[Place, dict[Place, Sent]] = {}
        for member in self.members:
            if self._packed:
                packs = self._pack_grads(member)(grads[member])
                cut[member] = {h: (x,) for h, x in zip(self.homes, packs, strict=True)}
            else:
                cut[member] = self._partial(member)(grads[member])
        sent = {
            home: [
                self._inside(home, which, [cut[m][home] for m in which])
                for which in self._together(home)
            ]
            for home in self.homes
        }
        flat = [x for parts in sent.values() for part in parts for x in part]
        targets = [
            where
            for home, parts in sent.items()
            for _ in parts
            for where in self._ends(home, home)
        ]
        moved = iter(self.layout.move(flat, targets))
        came = {
            home: [tuple(next(moved) for _ in part) for part in parts]
            for home, parts in sent.items()
        }
        if not self._packed:
            return dict(came)
        return {home: [x for (x,) in parts] for home, parts in came.items()}

    @memo
    def _together(self, home: Place) -> tuple[tuple[Place, ...], ...]:
        """Members whose gradients are added before they set out: where reductions need
        not keep to the Program's order, those of an island that is not the home's."""
        if self.layout.plan.reductions is not Reductions.FAST:
            return tuple((member,) for member in self.members)
        found: dict[Any, list[Place]] = {}
        for member in self.members:
            island = self.layout.island(member)
            at_home = island == self.layout.island(home)
            found.setdefault(member if at_home else (island,), []).append(member)
        return tuple(map(tuple, found.values()))

    def _inside(self, home: Place, which: Sequence[Place], parts: list[Sent]) -> Sent:
        """What members of one island have for a home, added up at the first of them."""
        if len(which) == 1:
            return parts[0]
        leader = which[0]
        ends = self._ends(leader, home)
        came = self.layout.move([x for part in parts for x in part], ends * len(which))
        size = len(ends)
        turns = [tuple(came[i : i + size]) for i in range(0, len(came), size)]
        return self._add_inside(leader, home, len(which))(turns)

    @memo
    def _add_inside(self, leader: Place, home: Place, count: int) -> Callable[..., Any]:
        def f(parts: list[Arrays]) -> Arrays:
            return tuple(
                functools.reduce(jnp.add, each) for each in zip(*parts, strict=True)
            )

        ends, shapes = self._ends(leader, home), self._shapes(home)
        if self._packed:
            shapes = ((size_of(shapes),),)
        one = tuple(
            struct(x, "float32", where) for x, where in zip(shapes, ends, strict=True)
        )
        return self.programs.get(f, ([one] * count,), out_shardings=tuple(ends))

    def _ends(self, place: Place, home: Place) -> list[NamedSharding]:
        """Where a home's gradient lies on its way, at a place."""
        if self._packed:
            return [self._at(place)]
        return list(self._pieces(place, home))

    @memo
    def _pack_grads(self, member: Place) -> Callable[..., Any]:
        index = {leaf.id: i for i, leaf in enumerate(self.group.leaves)}

        def f(grads: Arrays) -> Arrays:
            return tuple(
                pack([cut(grads[index[leaf.id]], box) for leaf, box in self.held[home]])
                for home in self.homes
            )

        out = (self.layout.replicated(member),) * len(self.homes)
        return self.programs.get(f, (self._grads(member),), out_shardings=out)

    @memo
    def _add_packs(self, home: Place, count: int) -> Callable[..., Any]:
        shapes = self._shapes(home)

        def f(parts: list[jax.Array]) -> tuple[Arrays, jax.Array]:
            summed = unpack(functools.reduce(jnp.add, parts), shapes)
            return summed, _squares(summed)

        here = self.layout.replicated(home)
        flat = struct((size_of(shapes),), "float32", here)
        args = ([flat] * count,)
        return self.programs.get(f, args, out_shardings=(self._slices(home), here))

    def reduce(self, grads: Mapping[Place, Any], path: int) -> dict[Place, Packed]:
        """What every home gets, a part of it summed up by one collective."""
        cuts = self._cuts(path, self._float32)
        rows: list[Any] = []
        rests: list[Any] = []
        for member in self.members:
            mine, beyond = self._rows_of_grads(member, path)(grads[member])
            rows.append(mine)
            rests += beyond
        row = max(cut.row for cut in cuts.values())
        summed: dict[Place, Any] = {}
        if self._members_here:
            summed = self._parts(self._reduce_scatter(row)(self._equals().whole(rows)))
        to = [home for home, cut in cuts.items() if cut.rest]
        copies = self._copies(rests, to * len(self.members))
        return {
            home: Packed(
                path,
                (summed[home],) if cut.row and summed else (),
                tuple(copies[to.index(home) :: len(to)]) if cut.rest else (),
            )
            for home, cut in cuts.items()
        }

    @property
    def _float32(self) -> dict[str, str]:
        return {leaf.id: "float32" for leaf in self.group.leaves}

    @memo
    def _rows_of_grads(self, member: Place, path: int) -> Callable[..., Any]:
        """A row for each member that is a home, and the rests of all homes."""
        cuts = self._cuts(path, self._float32)
        length = max(cut.row for cut in cuts.values())
        index = {leaf.id: i for i, leaf in enumerate(self.group.leaves)}

        def f(grads: Arrays) -> tuple[jax.Array, Arrays]:
            vectors = {
                home: pack([cut(grads[index[x.id]], box) for x, box in held])
                for home, held in self.held.items()
            }
            rows = [
                padded(vectors[home][: cuts[home].row], length)
                if home in cuts
                else jnp.zeros(length)
                for home in self.members
            ]
            rests = [vectors[h][c.row :] for h, c in cuts.items() if c.rest]
            return jnp.concatenate(rows), tuple(rests)

        here = self.layout.replicated(member)
        return self.programs.get(f, (self._grads(member),), out_shardings=here)

    @memo
    def _sum_of_rows(self, home: Place, path: int) -> Callable[..., Any]:
        """A home's boxes of its row, as it was summed, and the members' rests."""
        cuts = self._cuts(path, self._float32)
        length, (row, rest) = max(c.row for c in cuts.values()), cuts[home]

        def f(rows: Arrays, rests: Arrays) -> tuple[Arrays, jax.Array]:
            parts = [x[:row] for x in rows]
            if rests:
                parts.append(functools.reduce(jnp.add, rests))
            summed = self._boxes(home, jnp.concatenate(parts), self._float32)
            return summed, _squares(summed)

        here = self.layout.replicated(home)
        rows = (struct((length,), "float32", here),) if row else ()
        rests = (struct((rest,), "float32", here),) * len(self.members) if rest else ()
        out = (self._slices(home), here)
        return self.programs.get(f, (rows, rests), out_shardings=out)

    def prepare_sum(self, home: Place) -> None:
        """Compiles what ``sum`` will call, as far as that is known."""
        if self._alone:
            self._lanes_alone(home)

    def sum(self, home: Place, pieces: Any) -> tuple[Arrays, jax.Array]:
        """The summed boxes of a home, and their sum of squares, of what has come."""
        pieces = self.layout.carrier.settle(pieces)
        if isinstance(pieces, Packed):
            return self._sum_of_rows(home, pieces.path)(pieces.rows, pieces.rests)
        if self._alone:
            return self._lanes_alone(home)(pieces)
        add = self._add_packs if self._packed else self._add
        return add(home, len(pieces))(pieces)

    @memo
    def _lanes_alone(self, home: Place) -> Callable[..., Any]:
        given, wanted = self._grads(home), self._slices(home)
        if self.layout.lanes(home) == 1 and all(
            g.sharding.is_equivalent_to(w, len(g.shape))
            for g, w in zip(given, wanted, strict=True)
        ):
            norm = self.programs.get(
                _squares, (given,), out_shardings=self.layout.replicated(home)
            )
            return lambda grads: (grads, norm(grads))

        def f(grads: Arrays) -> tuple[Arrays, jax.Array]:
            summed = self._over_lanes(home, self.held[home], grads, wanted)
            return summed, _squares(summed)

        out = (self._slices(home), self.layout.replicated(home))
        return self.programs.get(f, (self._grads(home),), out_shardings=out)

    @memo
    def _partial(self, member: Place) -> Callable[..., Any]:
        index = {leaf.id: i for i, leaf in enumerate(self.group.leaves)}

        out = {home: self._pieces(member, home) for home in self.homes}

        def f(grads: Arrays) -> dict[Place, Arrays]:
            return {
                home: self._over_lanes(
                    member,
                    self.held[home],
                    [grads[index[leaf.id]] for leaf, _ in self.held[home]],
                    out[home],
                )
                for home in self.homes
            }

        return self.programs.get(f, (self._grads(member),), out_shardings=out)

    def _over_lanes(
        self,
        place: Place,
        held: Sequence[tuple[Leaf, Box]],
        grads: Sequence[jax.Array],
        targets: Sequence[NamedSharding],
    ) -> Arrays:
        """The sums over lanes of boxes; each lane keeps its rows if a target says so.

        Said as a reduce-scatter: a sum whose result is then cut would move twice the
        bytes on backends that do not see through it. Said for each tensor shard: left
        to the partitioner, every shard would gather the others' first. Said of all at
        once: JAX takes milliseconds for each ``shard_map``.
        """
        if self.layout.lanes(place) == 1:
            return tuple(cut(g, box) for g, (_, box) in zip(grads, held, strict=True))
        tensor = self.layout.shape(place)[2]
        specs = tuple(self.layout.grad(place, leaf).spec for leaf, _ in held)
        targeted = tuple(target.spec for target in targets)

        def one(mine: jax.Array, box: Box, spec: Any, target: Any) -> jax.Array:
            here = tuple(
                (0, (stop - start) // tensor)
                if MODEL in spec[dim + 1 : dim + 2]
                else (start, stop)
                for dim, (start, stop) in enumerate(box)
            )
            split = [dim for dim, axis in enumerate(target) if axis == DATA]
            part = cut(jnp.squeeze(mine, 0), here)
            if not split:
                return jax.lax.psum(part, DATA)
            return jax.lax.psum_scatter(
                part, DATA, scatter_dimension=split[0], tiled=True
            )

        def each(mine: Arrays) -> Arrays:
            boxes = [box for _, box in held]
            return tuple(map(one, mine, boxes, specs, targeted))

        return jax.shard_map(
            each,
            mesh=self.layout.mesh(place),
            in_specs=(specs,),
            out_specs=targeted,
            check_vma=False,
        )(tuple(grads))

    @memo
    def _add(self, home: Place, count: int) -> Callable[..., Any]:
        def f(parts: list[Arrays]) -> tuple[Arrays, jax.Array]:
            summed = tuple(
                functools.reduce(jnp.add, each) for each in zip(*parts, strict=True)
            )
            return summed, _squares(summed)

        structs = tuple(
            struct(box_shape(box), "float32", sharding)
            for (_, box), sharding in zip(
                self.held[home], self._pieces(home, home), strict=True
            )
        )
        out = (self._slices(home), self.layout.replicated(home))
        args = ([structs] * count,)
        return self.programs.get(f, args, out_shardings=out)


def _squares(arrays: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(
        jnp.add, [jnp.sum(jnp.square(x)) for x in arrays], jnp.zeros(())
    )
