"""Sums, updates and new parameters of one group over the places that hold it.

    gradients at the users -> send_grads -> pieces at their homes -> sum -> update
    slices at the homes -> send_params -> pieces at the users -> join -> parameters

A gradient is first summed over the lanes of its own mesh and cut to each home's box,
then copied there and added in the order the Program lists. State never moves: a home
updates its boxes, and only new parameters travel, in the dtype they are computed with.
Of a group that does not train parameters travel once. Its state is masters alone: the
parameters of its home as they are, or what they were cast from, in host memory.
Each lane sends and receives its part of a box, never all of it: links between meshes
are slower than those inside, where the lanes then gather the whole.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hexijax.layers.chain import Group, Leaf
from hexijax.plan.plan import Place
from hexijax.program.boxes import Box
from hexijax.program.names import state as state_name
from hexijax.program.placement import state_memory
from hexijax.program.program import Buffer, Memory
from hexijax.runtime.layout import DATA, MODEL, PINNED_HOST, Layout, box_shape
from hexijax.runtime.memo import memo
from hexijax.runtime.move import move
from hexijax.runtime.optimizer import GroupUpdate, Moment

Arrays = tuple[jax.Array, ...]


_ONE_COLLECTIVE: dict[str, bool | str] = {
    f"xla_gpu_{kind}_combine_threshold_bytes": str(2**31 - 1)
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
}
"""A bucket's leaves in one call: XLA's own 30 MB use half of a fast link."""


class Programs:
    """Compiled programs by what they compute: groups that are alike share one."""

    def __init__(self) -> None:
        self._made: dict[Any, Callable[..., Any]] = {}

    def get(self, f: Callable[..., Any], args: Any, **jit: Any) -> Callable[..., Any]:
        """``jit(f)`` for arguments like ``args`` (structs with shardings)."""
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        out = jit.get("out_shardings")
        out_key = tuple(jax.tree.leaves(out)), jax.tree.structure(out)
        donated = jit.get("donate_argnums", ())
        closed = jax.make_jaxpr(f)(*args)
        consts = tuple(np.asarray(c).tobytes() for c in closed.consts)
        key = (str(closed), consts, shapes, tree, out_key, donated)
        if key not in self._made:
            device, *_ = leaves[0].sharding.device_set
            options = _ONE_COLLECTIVE if device.platform == "gpu" else None
            lowered = jax.jit(f, **jit).lower(*args)
            self._made[key] = lowered.compile(compiler_options=options)
        return self._made[key]


def struct(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """An array to come."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


class GroupRuntime:
    """What the executor calls for one group."""

    def __init__(
        self,
        *,
        layout: Layout,
        programs: Programs,
        update: GroupUpdate,
        group: Group,
        members: tuple[Place, ...],
        param_dtypes: Mapping[Place, Sequence[str]],
        unscale: float,
        guarded: bool,
    ):
        """``param_dtypes``: what each user computes with, leaf by leaf."""
        self.layout, self.programs, self.group = layout, programs, group
        self.members, self.param_dtypes = members, param_dtypes
        self._update, self._unscale, self._guarded = update, unscale, guarded
        self._memory = state_memory(layout.plan, layout.chain, group)
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

    # Reduce

    @property
    def _alone(self) -> bool:
        """Whether the only user is the only home: then nothing travels."""
        return self.homes == self.members and len(self.homes) == 1

    def send_grads(self, grads: Mapping[Place, Arrays]) -> dict[Place, Any]:
        """Home -> each member's gradient of its boxes, on the way there."""
        if self._alone:
            return dict(grads)
        parts: dict[Place, list[Arrays]] = {home: [] for home in self.homes}
        for member in self.members:
            cut = self._partial(member)(grads[member])
            flat = [x for home in self.homes for x in cut[home]]
            targets = [s for home in self.homes for s in self._pieces(home, home)]
            moved = iter(move(flat, targets))
            for home in self.homes:
                parts[home].append(tuple(next(moved) for _ in self.held[home]))
        return dict(parts)

    def sum(self, home: Place, pieces: Any) -> tuple[Arrays, jax.Array]:
        """The summed boxes of a home, and their sum of squares."""
        return (self._lanes_alone if self._alone else self._add)(home)(pieces)

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
            summed = tuple(
                self._over_lanes(home, leaf, g, box, sharding)
                for g, (leaf, box), sharding in zip(
                    grads, self.held[home], wanted, strict=True
                )
            )
            return summed, _squares(summed)

        out = (self._slices(home), self.layout.replicated(home))
        return self.programs.get(f, (self._grads(home),), out_shardings=out)

    @memo
    def _partial(self, member: Place) -> Callable[..., Any]:
        index = {leaf.id: i for i, leaf in enumerate(self.group.leaves)}

        out = {home: self._pieces(member, home) for home in self.homes}

        def f(grads: Arrays) -> dict[Place, Arrays]:
            return {
                home: tuple(
                    self._over_lanes(member, leaf, grads[index[leaf.id]], box, sharding)
                    for (leaf, box), sharding in zip(
                        self.held[home], out[home], strict=True
                    )
                )
                for home in self.homes
            }

        return self.programs.get(f, (self._grads(member),), out_shardings=out)

    def _over_lanes(
        self,
        place: Place,
        leaf: Leaf,
        grad: jax.Array,
        box: Box,
        target: NamedSharding,
    ) -> jax.Array:
        """The sum over lanes of a box; each lane keeps its rows if ``target`` says so.

        Said as a reduce-scatter: a sum whose result is then cut would move twice the
        bytes on backends that do not see through it. Said for each tensor shard: left
        to the partitioner, every shard would gather the others' first.
        """
        if self.layout.lanes(place) == 1:
            return _cut(grad, box)
        spec = self.layout.grad(place, leaf).spec
        here = tuple(
            (0, (stop - start) // self.layout.shape(place)[2])
            if MODEL in spec[dim + 1 : dim + 2]
            else (start, stop)
            for dim, (start, stop) in enumerate(box)
        )
        split = [dim for dim, axis in enumerate(target.spec) if axis == DATA]

        def each(mine: jax.Array) -> jax.Array:
            part = _cut(jnp.squeeze(mine, 0), here)
            if not split:
                return jax.lax.psum(part, DATA)
            return jax.lax.psum_scatter(
                part, DATA, scatter_dimension=split[0], tiled=True
            )

        return jax.shard_map(
            each,
            mesh=self.layout.mesh(place),
            in_specs=spec,
            out_specs=target.spec,
            check_vma=False,
        )(grad)

    @memo
    def _add(self, home: Place) -> Callable[..., Any]:
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
        args = ([structs] * len(self.members),)
        return self.programs.get(f, args, out_shardings=out)

    # Update

    @memo
    def _names(self, home: Place) -> list[str]:
        return [leaf.name for leaf, _ in self.held[home]]

    @memo
    def moments(self, home: Place) -> list[Moment]:
        """What each array of ``moments`` in the state at a home is."""
        if not self.group.trainable:
            return []
        return self._update.moments(self._names(home), list(self._masters(home)))

    def _moment_structs(self, home: Place) -> list[jax.ShapeDtypeStruct]:
        master = self._masters(home)
        out = []
        # The sharding of a moment is its parameter's when it has the same shape.
        for moment in self.moments(home):
            where = self.layout.replicated(home)
            if moment.owner is not None and master[moment.owner].shape == moment.shape:
                where = master[moment.owner].sharding
            out.append(struct(moment.shape, moment.dtype, where))
        return out

    def state_structs(self, home: Place) -> dict[str, Any]:
        """Shapes and shardings of the state at a home: ``master`` and ``moments``."""
        return {"master": self._masters(home), "moments": self._moment_structs(home)}

    def init_state(self, home: Place, masters: Arrays) -> dict[str, Any]:
        """State from master parameters that lie at their home."""
        if not self.group.trainable:
            return {"master": masters, "moments": []}
        names = self._names(home)
        f = self.programs.get(
            lambda p: self._update.init(names, p),
            (list(self._masters(home)),),
            out_shardings=[m.sharding for m in self._moment_structs(home)],
        )
        return {"master": masters, "moments": f(list(masters))}

    def update(
        self,
        home: Place,
        state: dict[str, Any],
        grads: Arrays,
        verdict: jax.Array | None,
        *,
        travels: bool = True,
    ) -> tuple[dict[str, Any], Arrays]:
        """The next state, which overwrites ``state``, and the slices to gather.

        ``verdict`` is (norm, factor, finite, scale) when clipped or guarded. Where no
        user keeps the parameters nothing ``travels``: passes gather from the state.
        """
        f = self._update_program(home, verdict is not None, travels)
        new, cast = f(state, grads, *(() if verdict is None else (verdict,)))
        if not travels:
            return new, ()
        narrow = iter(cast)
        return new, tuple(
            next(narrow) if cast_it else master
            for cast_it, master in zip(self._casts(home), new["master"], strict=True)
        )

    @memo
    def _casts(self, home: Place) -> tuple[bool, ...]:
        """Which leaves of a home travel in another dtype than their master's."""
        return tuple(
            jnp.dtype(self.slice_dtypes[leaf.id]) != jnp.dtype(leaf.dtype)
            for leaf, _ in self.held[home]
        )

    @memo
    def _update_program(
        self, home: Place, judged: bool, travels: bool
    ) -> Callable[..., Any]:
        names, guarded, unscale = self._names(home), self._guarded, self._unscale
        casts = [
            self.slice_dtypes[leaf.id] if cast_it and travels else None
            for (leaf, _), cast_it in zip(
                self.held[home], self._casts(home), strict=True
            )
        ]

        def f(
            state: dict[str, Any], grads: Arrays, *verdict: jax.Array
        ) -> tuple[dict[str, Any], Arrays]:
            masters, moments = state["master"], state["moments"]
            factor = verdict[0][1] if judged else unscale
            scaled = (
                [g * factor for g in grads] if judged or unscale != 1 else list(grads)
            )
            typed = [g.astype(p.dtype) for g, p in zip(scaled, masters, strict=True)]
            params, new_moments = self._update.update(
                names, typed, moments, list(masters)
            )
            new = {"master": tuple(params), "moments": new_moments}
            if guarded:
                finite = verdict[0][2] > 0
                new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, state)
            cast = (x.astype(d) for x, d in zip(new["master"], casts, strict=True) if d)
            return new, tuple(cast)

        structs = self.state_structs(home)
        args: list[Any] = [structs, self._slice_structs(home, "float32")]
        if judged:
            args.append(struct((4,), "float32", self.layout.replicated(home)))
        where = jax.tree.map(lambda s: s.sharding, structs)
        cast_to = tuple(
            sharding for sharding, d in zip(where["master"], casts, strict=True) if d
        )
        return self.programs.get(
            f, tuple(args), out_shardings=(where, cast_to), donate_argnums=(0,)
        )

    # Gather

    def slices(self, home: Place, state: dict[str, Any]) -> Arrays:
        """New parameters of a home's boxes in the dtype they travel in.

        Where that is the master's dtype they are the master arrays themselves.
        """
        if self._memory is Memory.HOST:
            return self._from_host(home, state["master"])
        dtypes = tuple(self.slice_dtypes[leaf.id] for leaf, _ in self.held[home])
        masters = self._masters(home)
        if all(m.dtype == jnp.dtype(d) for m, d in zip(masters, dtypes, strict=True)):
            return state["master"]
        f = self.programs.get(
            lambda p: tuple(x.astype(d) for x, d in zip(p, dtypes, strict=True)),
            (masters,),
            out_shardings=self._slices(home),
        )
        return f(state["master"])

    def _from_host(self, home: Place, masters: Arrays) -> Arrays:
        """One by one: of their own dtype, no device ever holds more than one."""
        made: list[jax.Array] = []
        for master, (leaf, _), where in zip(
            masters, self.held[home], self._slices(home), strict=True
        ):
            x, dtype = jax.device_put(master, where), self.slice_dtypes[leaf.id]
            if x.dtype != jnp.dtype(dtype):
                here = (struct(x.shape, x.dtype, where),)
                x = self.programs.get(_caster(dtype), here, out_shardings=where)(x)
            made.append(jax.block_until_ready(x))
        return tuple(made)

    def send_params(self, place: Place, slices: Mapping[Place, Arrays]) -> Any:
        """Every leaf's pieces on their way to a place."""
        if self.homes == (place,):
            return slices[place]
        flat: list[jax.Array] = []
        targets: list[NamedSharding] = []
        order: list[tuple[str, Box]] = []
        for home in self.homes:
            flat += slices[home]
            targets += (
                self._pieces(place, home) if home != place else self._slices(home)
            )
            order += [(leaf.id, box) for leaf, box in self.held[home]]
        moved = dict(zip(order, move(flat, targets), strict=True))
        return tuple(
            [moved[key] for key in sorted(moved) if key[0] == leaf.id]
            for leaf in self.group.leaves
        )

    def join(self, place: Place, pieces: Any) -> Arrays:
        """The group's parameters as a place computes with them."""
        make = self._spread if self.homes == (place,) else self._join
        return make(place)(pieces)

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
        if all(_is(s, t) for s, t in zip(source, target, strict=True)):
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
            len(p) == 1 and _is(p[0], t) for p, t in zip(parts, target, strict=True)
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

    # Shapes

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
        shardings = self._slices(home)
        if self._memory is Memory.HOST:
            shardings = [s.with_memory_kind(PINNED_HOST) for s in shardings]
        return tuple(
            struct(box_shape(box), leaf.dtype, sharding)
            for (leaf, box), sharding in zip(self.held[home], shardings, strict=True)
        )

    def place_masters(self, home: Place, cut: Sequence[jax.Array]) -> Arrays:
        """A home's boxes, wherever they are, as its master parameters.

        Copies of its own: the next update overwrites them, not the caller's.
        """
        moved = move(cut, self._slices(home))
        if self._memory is Memory.DEVICE:
            return tuple(x.copy() for x in moved)
        where = [m.sharding for m in self._masters(home)]
        return tuple(jax.device_put(moved, where))

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


def _is(given: jax.ShapeDtypeStruct, wanted: jax.ShapeDtypeStruct) -> bool:
    """Whether one array can stand for another as it lies."""
    return given.dtype == wanted.dtype and given.sharding.is_equivalent_to(
        wanted.sharding, len(given.shape)
    )


@functools.cache
def _caster(dtype: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype)


def _cut(x: jax.Array, box: Box) -> jax.Array:
    return x[tuple(slice(start, stop) for start, stop in box)]


def _squares(arrays: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(
        jnp.add, [jnp.sum(jnp.square(x)) for x in arrays], jnp.zeros(())
    )
