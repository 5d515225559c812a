"""Sums, updates and new parameters of one group over the places that hold it.

    gradients at the users -> send_grads -> pieces at their homes -> sum -> update
    slices at the homes -> send_params -> pieces at the users -> join -> parameters

State never moves: a home updates its boxes, and only new parameters travel. Of a group
that does not train its state is masters alone: the parameters of its home as they are,
or what they were cast from, in host memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.layers.chain import Group
from hexijax.plan.plan import Place
from hexijax.program.program import Memory, Site
from hexijax.runtime.gathers import Gathers
from hexijax.runtime.group_shapes import Arrays
from hexijax.runtime.host import host_memory, seen_by_host, to_host
from hexijax.runtime.later import value
from hexijax.runtime.layout import PINNED_HOST, Layout
from hexijax.runtime.memo import memo
from hexijax.runtime.memories import pin
from hexijax.runtime.move import move
from hexijax.runtime.optimizer import GroupUpdate, Moment
from hexijax.runtime.packs import Joined, unpack
from hexijax.runtime.programs import Programs, struct
from hexijax.runtime.sums import Sums


class GroupRuntime(Sums, Gathers):
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
        super().__init__(
            layout=layout,
            programs=programs,
            group=group,
            members=members,
            param_dtypes=param_dtypes,
        )
        self._update, self._unscale, self._guarded = update, unscale, guarded

    def place_masters(self, home: Place, cut: Sequence[jax.Array]) -> Arrays:
        """A home's boxes, wherever they are, as its master parameters.

        Copies of its own: the next update overwrites them, not the caller's.
        """
        moved = move(cut, self._slices(home))
        if self._memory is Memory.DEVICE:
            return tuple(x.copy() for x in moved)
        return self._to_rest(tuple(moved), self._masters(home))

    def _to_rest(self, made: Any, structs: Any) -> Any:
        """State that was made on the devices, where it rests."""
        if self._memory is Memory.DEVICE:
            return made
        if self._site is Site.HOST:
            leaves, tree = jax.tree.flatten(made)
            return jax.tree.unflatten(tree, to_host(leaves))
        where = jax.tree.map(lambda s: s.sharding, self.at_rest(structs))
        what = f"The state of {self.group.name!r}"
        return jax.block_until_ready(pin(made, where, what))

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
        """Shapes and shardings of the state as it rests at a home: ``master`` and
        ``moments``."""
        return self.at_rest(self.computed_structs(home))

    def computed_structs(self, home: Place) -> dict[str, Any]:
        """As the update reads it."""
        return {"master": self._masters(home), "moments": self._moment_structs(home)}

    @memo
    def _joined_moments(self, home: Place) -> Joined:
        structs = self._moment_structs(home)
        return self._small(home, structs, [True] * len(structs))

    def closed(self, home: Place, state: Mapping[str, Any]) -> dict[str, Any]:
        """State as the executor has it: of what rests in pinned memory and comes to
        the device for its update, the small arrays are one, so that fewer travel."""
        where = self.layout.replicated(home).with_memory_kind(PINNED_HOST)

        def join(arrays: Sequence[Any]) -> jax.Array:
            whole = np.concatenate([np.asarray(x).reshape(-1) for x in arrays])
            return pin(whole, where, self.state_buffer(home))

        return self._each(home, state, lambda joined, x, _: joined.closed(x, join))

    def opened(self, home: Place, state: Mapping[str, Any]) -> dict[str, Any]:
        """State as everybody else has it: an array for each box and moment."""
        structs = self.state_structs(home)

        def part(joined: Joined, arrays: Sequence[Any], key: str) -> list[Any]:
            where = [structs[key][i].sharding for i in joined.which]
            return joined.opened(
                arrays,
                lambda flat, shapes: jax.device_put(
                    [np.array(x) for x in unpack(np.asarray(flat), shapes)], where
                ),
            )

        return self._each(home, state, part)

    def _each(
        self,
        home: Place,
        state: Mapping[str, Any],
        change: Callable[[Joined, Sequence[Any], str], list[Any]],
    ) -> dict[str, Any]:
        masters = change(self._joined(home), state["master"], "master")
        moments = change(self._joined_moments(home), state["moments"], "moments")
        return {"master": tuple(masters), "moments": moments}

    def _closed_structs(self, home: Place) -> dict[str, Any]:
        """Of what ``closed`` gives, as the update reads it."""

        def join(arrays: Sequence[Any]) -> jax.ShapeDtypeStruct:
            size = sum(x.size for x in arrays)
            return struct((size,), "float32", self.layout.replicated(home))

        structs = self.computed_structs(home)
        return self._each(home, structs, lambda joined, x, _: joined.closed(x, join))

    def init_state(self, home: Place, masters: Arrays) -> dict[str, Any]:
        """State from master parameters that rest at their home."""
        if not self.group.trainable:
            return {"master": masters, "moments": []}
        names = self._names(home)
        structs = list(self._masters(home)), self._moment_structs(home)
        if self._site is Site.HOST:
            # Made where they rest: what comes from a device comes at 1 GB/s.
            structs = self.at_rest(structs)
        here, rest = ([x.sharding for x in each] for each in structs)
        f = self.programs.get(
            lambda p: self._update.init(names, p), (structs[0],), out_shardings=rest
        )
        moments = f(jax.device_put(list(masters), here))
        if self._site is not Site.HOST:
            moments = self._to_rest(moments, structs[1])
        return {"master": masters, "moments": moments}

    def prepare_update(self, home: Place, *, judged: bool, travels: bool) -> None:
        """Compiles what ``update`` of such a home will call."""
        self._update_program(home, judged, travels)

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
        return self._with_slices(home, new, cast, travels)

    def update_on_host(
        self,
        home: Place,
        state: Any,
        grads: Arrays,
        verdict: jax.Array | None,
        *,
        travels: bool,
    ) -> tuple[dict[str, Any], Arrays]:
        """The same by the host's processor; waits for what it reads.

        The state may be still to come. Slices are new arrays: the next update
        overwrites the masters.
        """
        moved = seen_by_host([*grads] if verdict is None else [*grads, verdict])
        f = self._update_program(home, verdict is not None, travels)
        new, cast = f(value(state), tuple(moved[: len(grads)]), *moved[len(grads) :])
        new, slices = self._with_slices(home, new, cast, travels)
        jax.block_until_ready((new, slices))
        own = {id(x) for x in new["master"]}
        return new, tuple(
            jax.device_put(np.array(x), host_memory(x.shape)) if id(x) in own else x
            for x in slices
        )

    def _with_slices(
        self, home: Place, new: dict[str, Any], cast: Arrays, travels: bool
    ) -> tuple[dict[str, Any], Arrays]:
        """The new state and what is gathered of it."""
        if not travels:
            return new, ()
        # All that are joined are cast, so nobody asks for them.
        masters = self._joined(home).opened(new["master"], lambda _, shapes: shapes)
        if self._packs(home):
            return new, (*cast, *self._uncast(home, masters))
        narrow = iter(cast)
        return new, tuple(
            next(narrow) if cast_it else master
            for cast_it, master in zip(self._casts(home), masters, strict=True)
        )

    @memo
    def _update_program(
        self, home: Place, judged: bool, travels: bool
    ) -> Callable[..., Any]:
        names, guarded, unscale = self._names(home), self._guarded, self._unscale
        packs = self._packs(home) if travels else {}
        casts = [
            self.slice_dtypes[leaf.id] if cast_it and travels else None
            for (leaf, _), cast_it in zip(
                self.held[home], self._casts(home), strict=True
            )
        ]

        def f(
            state: dict[str, Any], grads: Arrays, *verdict: jax.Array
        ) -> tuple[dict[str, Any], Arrays]:
            opened = self._each(home, state, lambda joined, x, _: joined.opened(x))
            masters, moments = opened["master"], opened["moments"]
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
                new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, opened)
            closed = self._each(home, new, lambda joined, x, _: joined.closed(x))
            if packs:
                return closed, self._pack(home, tuple(new["master"]))
            cast = (x.astype(d) for x, d in zip(new["master"], casts, strict=True) if d)
            return closed, tuple(cast)

        structs, boxes = self._closed_structs(home), self._masters(home)
        args: list[Any] = [structs, self._slice_structs(home, "float32")]
        if judged:
            args.append(struct((4,), "float32", self.layout.replicated(home)))
        if self._site is Site.HOST:
            args = self.at_rest(args)
            structs, boxes = args[0], args[0]["master"]
        where = jax.tree.map(lambda s: s.sharding, structs)
        cast_to = tuple(box.sharding for box, d in zip(boxes, casts, strict=True) if d)
        if packs:
            on_host = self._site is Site.HOST
            cast_to = tuple(
                host_memory(x.shape) if on_host else x.sharding
                for x in self._pack_structs(home)
            )
        return self.programs.get(
            f, tuple(args), out_shardings=(where, cast_to), donate_argnums=(0,)
        )
