"""Moves activations and cotangents from one stage's lanes to another's.

    split and cast on the source -> copies, lane to lane -> merge and cast on the target

With equal lanes and dtypes both programs fall away and only copies remain. With unlike
lanes a lane's samples are split into pieces along the dim whose size differs; what has
no such dim is a sum over the lane's samples: forward the pieces share it out (the first
takes it all) and are added again, backward every piece gets the same cotangent.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.errors import UserError
from hexijax.layers.chain import ITEM_BYTES
from hexijax.plan.plan import Place
from hexijax.runtime.carrying import Coming, Piece, settled
from hexijax.runtime.layout import Layout
from hexijax.runtime.move import joined
from hexijax.runtime.programs import Programs, struct

Structs = Sequence[jax.ShapeDtypeStruct]


class Border:
    """The road of one border's arrays from ``source`` to ``target``."""

    def __init__(
        self,
        *,
        layout: Layout,
        programs: Programs,
        source: Place,
        target: Place,
        given: Structs,
        wanted: Structs,
        cotangent: bool,
    ):
        """``given`` and ``wanted``: the arrays of one lane at either end.

        Raises:
          UserError: shapes differ in more than the samples of a lane.
        """
        self.layout, self.source, self.target = layout, source, target
        a, b = layout.lanes(source), layout.lanes(target)
        pieces = math.lcm(a, b)
        self.num_out, self.num_in = pieces // a, pieces // b
        dims = [_sample_dim(x, y, a, b) for x, y in zip(given, wanted, strict=True)]
        wire = [_narrower(x.dtype, y.dtype) for x, y in zip(given, wanted, strict=True)]
        self._given = self._laned(source, given)
        self._send = self._split(programs, given, dims, wire, cotangent)
        self._recv = self._merge(programs, given, wanted, dims, wire, cotangent)

    def send(self, arrays: tuple[jax.Array, ...] | None) -> list[list[Any]]:
        """Pieces on the target's devices, on their way: ``[piece][array]``.

        Args:
          arrays: None where they lie on another island.
        """
        by_piece = self._send(self._given if arrays is None else arrays)
        flat = [x for piece in by_piece for x in piece]
        if self.num_out == self.num_in == 1:
            targets = [self.layout.by_lane(self.target)] * len(flat)
            return [self.layout.move(flat, targets)]
        return self._deal(by_piece)

    def recv(self, wire: list[list[Any]]) -> Any:
        """The arrays on the target's lanes; from another island they are to come, and
        whoever computes with them waits, so that what stands before it goes out."""
        if any(isinstance(x, Coming) for piece in wire for x in piece):
            return Coming(lambda: self._recv(settled(wire)))
        return self._recv(wire)

    def _deal(self, by_piece: list[tuple[Any, ...]]) -> list[list[Any]]:
        """Piece j of source lane i is the microbatch's piece ``i * num_out + j``."""
        a, b = self.layout.lanes(self.source), self.layout.lanes(self.target)
        source, target = self.layout.mesh(self.source), self.layout.mesh(self.target)
        width = target.devices.shape[1]
        pieces: list[Piece] = []
        for q in range(self.num_in):
            for n, first in enumerate(by_piece[0]):
                for lane in range(b):
                    i, j = divmod(lane * self.num_in + q, self.num_out)
                    row = source.devices[i % a]
                    shards = _shards(by_piece[j][n])
                    for m in range(width):
                        device = row[m % len(row)]
                        pieces.append(
                            Piece(
                                functools.partial(shards.__getitem__, device),
                                (1, *first.shape[1:]),
                                first.dtype,
                                device,
                                target.devices[lane, m],
                                (q, n, lane),
                            )
                        )
        arrived = iter(self.layout.carrier.carry(pieces))
        sharding = self.layout.by_lane(self.target)
        return [
            [
                joined(
                    (b, *x.shape[1:]),
                    x.dtype,
                    sharding,
                    [([next(arrived)], ()) for _ in range(b * width)],
                )
                for x in by_piece[0]
            ]
            for _ in range(self.num_in)
        ]

    def _split(
        self,
        programs: Programs,
        given: Structs,
        dims: Sequence[int | None],
        wire: Sequence[Any],
        cotangent: bool,
    ) -> Callable[..., Any]:
        parts = self.num_out
        if parts == 1 and all(x.dtype == w for x, w in zip(given, wire, strict=True)):
            return lambda arrays: [arrays]

        def f(arrays: tuple[jax.Array, ...]) -> list[tuple[jax.Array, ...]]:
            cut = []
            for x, dim, dtype in zip(arrays, dims, wire, strict=True):
                x = x.astype(dtype)
                if dim is not None:
                    cut.append(jnp.split(x, parts, axis=dim + 1))
                elif cotangent:
                    cut.append([x] * parts)
                else:
                    cut.append([x, *[jnp.zeros_like(x)] * (parts - 1)])
            return [tuple(c[j] for c in cut) for j in range(parts)]

        return programs.get(
            f,
            (self._laned(self.source, given),),
            out_shardings=self.layout.by_lane(self.source),
        )

    def _merge(
        self,
        programs: Programs,
        given: Structs,
        wanted: Structs,
        dims: Sequence[int | None],
        wire: Sequence[Any],
        cotangent: bool,
    ) -> Callable[..., Any]:
        if self.num_in == 1 and all(
            x.dtype == w for x, w in zip(wanted, wire, strict=True)
        ):
            return lambda pieces: tuple(pieces[0])

        def f(pieces: list[list[jax.Array]]) -> tuple[jax.Array, ...]:
            whole = []
            for n, (want, dim) in enumerate(zip(wanted, dims, strict=True)):
                parts = [piece[n] for piece in pieces]
                if dim is not None:
                    x = jnp.concatenate(parts, axis=dim + 1)
                else:
                    x = parts[0] if cotangent else functools.reduce(jnp.add, parts)
                whole.append(x.astype(want.dtype))
            return tuple(whole)

        shapes = []
        for x, dim, dtype in zip(given, dims, wire, strict=True):
            shape = list(x.shape)
            if dim is not None:
                shape[dim] //= self.num_out
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
        piece = list(self._laned(self.target, shapes))
        return programs.get(
            f, ([piece] * self.num_in,), out_shardings=self.layout.by_lane(self.target)
        )

    def _laned(self, place: Place, arrays: Structs) -> tuple[jax.ShapeDtypeStruct, ...]:
        lanes, sharding = self.layout.lanes(place), self.layout.by_lane(place)
        return tuple(struct((lanes, *x.shape), x.dtype, sharding) for x in arrays)


def _shards(x: Any) -> dict[jax.Device, jax.Array]:
    """What lies on each device; nothing of an array that is elsewhere."""
    here = isinstance(x, jax.Array)
    return {s.device: s.data for s in x.addressable_shards} if here else {}


def _sample_dim(x: Any, y: Any, lanes_x: int, lanes_y: int) -> int | None:
    """The dim along which a lane's samples lie: where the two ends' shapes differ."""
    if len(x.shape) == len(y.shape):
        differ = [
            d for d, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n
        ]
        if not differ:
            return None
        if len(differ) == 1:
            (dim,) = differ
            if x.shape[dim] * lanes_x == y.shape[dim] * lanes_y:
                return dim
    raise UserError(
        f"A border hands over an array of shape {x.shape} with {lanes_x} lanes where "
        f"the next stage expects {y.shape} with {lanes_y}: the shapes may differ in "
        "one dim only, the samples. Give both stages the same number of lanes, or mark "
        "the layer so that another border is cut."
    )


def _narrower(a: Any, b: Any) -> Any:
    """The dtype that crosses: the smaller one, so that no byte travels in vain."""
    return min(jnp.dtype(a), jnp.dtype(b), key=lambda d: ITEM_BYTES.get(d.name, 8))
