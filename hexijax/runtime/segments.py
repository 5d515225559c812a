"""Segments compiled for their meshes: one microbatch forward, backward, evaluated.

    layers.Segment (one lane's arrays) -> Compiled (arrays with a lane dim) -> executor

Every lane runs the segment on its own samples under ``shard_map``, so that no gradient
is summed over lanes before a whole step is done. Programs are lowered one after another
and compiled side by side; two segments that are alike on the same devices share one.
"""

import concurrent.futures
import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hexijax.layers.chain import Leaf
from hexijax.layers.segment import KEYS, MASK, Segment
from hexijax.plan.plan import Place
from hexijax.runtime.layout import DATA, MODEL, Layout

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The programs of one segment at one place; all arrays carry the lane dim."""

    segment: Segment
    forward: Callable[..., Any] | None
    """(params, act, batch, consts) -> (act or scalars, residuals)."""
    backward: Callable[..., Any] | None
    """(params, act, batch, consts, residuals, cot or seed, grads) -> (grads, cot)."""
    fused: Callable[..., Any] | None
    """(params, act, batch, consts, seed, grads) -> (scalars, grads, cot)."""
    evaluate: Callable[..., Any] | None
    """(params, act, batch, consts) -> act or scalars."""


class Work(enum.Enum):
    """Which programs of a segment are wanted."""

    TRAIN = "forward and backward"
    FUSED = "both in one"
    EVALUATE = "forward alone"


class Compiler:
    """Compiles the segments of a plan, each distinct program once."""

    def __init__(self, layout: Layout, progress: Progress | None = None):
        self.layout = layout
        self._progress = progress or (lambda what, done, total: None)
        self._made: dict[Any, _Job] = {}
        self._wanted: dict[Any, Any] = {}

    def add(
        self,
        name: Any,
        place: Place,
        segment: Segment,
        dtypes: Sequence[str],
        work: Work,
    ) -> None:
        """Ask for a segment's programs; its parameters arrive in ``dtypes``."""
        names, lanes, tensor = self.layout.shape(place)
        leaves = [self.layout.leaf[leaf.id] for leaf in segment.leaves]
        cut = tuple(leaf.tensor_dim for leaf in leaves) if tensor > 1 else ()
        key = (segment.signature, names, lanes, tensor, cut, tuple(dtypes), work)
        if key not in self._made:
            self._made[key] = _Job(self.layout, place, segment, dtypes, work)
        self._wanted[name] = (key, segment)

    @property
    def num_distinct(self) -> int:
        """Segments that differ in computation or devices."""
        return len(self._made)

    def compile(self) -> dict[Any, Compiled]:
        """All programs asked for, by name."""
        jobs = list(self._made.values())
        total = sum(job.num_programs for job in jobs)
        done = 0
        self._progress("compiling", 0, total)
        workers = min(16, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            # A backward's inputs are its forward's outputs, sharded as XLA chose.
            stages = [
                [
                    job.lower_fused if job.work is Work.FUSED else job.lower_first
                    for job in jobs
                ],
                [job.lower_backward for job in jobs if job.work is Work.TRAIN],
            ]
            for lowerings in stages:
                futures = [pool.submit(lower().finish) for lower in lowerings]
                for future in concurrent.futures.as_completed(futures):
                    future.result()
                    done += 1
                    self._progress("compiling", done, total)
        return {
            name: dataclasses.replace(self._made[key].compiled, segment=segment)
            for name, (key, segment) in self._wanted.items()
        }


@dataclasses.dataclass
class _Lowered:
    lowered: Any
    keep: Callable[[Any], None]

    def finish(self) -> None:
        self.keep(self.lowered.compile())


class _Job:
    """One distinct segment program set."""

    def __init__(
        self,
        layout: Layout,
        place: Place,
        segment: Segment,
        dtypes: Sequence[str],
        work: Work,
    ):
        self.layout, self.place, self.segment, self.work = layout, place, segment, work
        # The chain's leaves, which know the dim that tensor parallelism splits.
        self.leaves = tuple(layout.leaf[leaf.id] for leaf in segment.leaves)
        self.dtypes = tuple(dtypes)
        self.lanes = layout.lanes(place)
        self.num_programs = 2 if work is Work.TRAIN else 1
        self.compiled = Compiled(segment, None, None, None, None)
        self._residuals: Any = None

    # Shapes and shardings of what goes in.

    def _params(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct(
                leaf.shape,
                jnp.dtype(dtype),
                sharding=self.layout.param(self.place, leaf),
            )
            for leaf, dtype in zip(self.leaves, self.dtypes, strict=True)
        )

    def _laned(self, struct: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (self.lanes, *struct.shape),
            struct.dtype,
            sharding=self.layout.by_lane(self.place),
        )

    def _act(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(map(self._laned, self.segment.border_in))

    def _batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {k: self._laned(v) for k, v in batch_shapes(self.segment).items()}

    def _consts(self) -> dict[str, jax.ShapeDtypeStruct]:
        whole = self.layout.replicated(self.place)
        return {
            k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=whole)
            for k, v in const_shapes(self.segment).items()
        }

    def _cot(self) -> Any:
        if self.segment.is_last:
            return jax.ShapeDtypeStruct(
                (), jnp.float32, sharding=self.layout.replicated(self.place)
            )
        borders = [self.segment.border_out[i] for i in self.segment.float_out]
        return tuple(map(self._laned, borders))

    def _grads(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct(
                self.layout.grad_shape(self.place, leaf),
                jnp.float32,
                sharding=self.layout.grad(self.place, leaf),
            )
            for leaf in self.leaves
        )

    def _use(self, params: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Parameters in the dtype this segment first uses (another may keep more)."""
        return tuple(
            p.astype(dtype) if p.dtype != jnp.dtype(dtype) else p
            for p, dtype in zip(params, self.segment.param_dtypes, strict=True)
        )

    # The programs.

    def lower_first(self) -> _Lowered:
        """Forward with residuals, or evaluation."""
        segment, grad = self.segment, self.work is Work.TRAIN

        def run(params: Any, consts: Any, laned: Any) -> Any:
            act, batch = laned
            f = segment.forward if grad else segment.evaluate
            return f(self._use(params), act, {**batch, **consts})

        by_lane = self.layout.by_lane(self.place)

        def program(params: Any, act: Any, batch: Any, consts: Any) -> Any:
            return self._per_lane(run)(params, consts, (act, batch))

        out = (by_lane, None) if grad else by_lane
        lowered = jax.jit(program, out_shardings=out).lower(
            self._params(), self._act(), self._batch(), self._consts()
        )
        if grad:
            shapes = lowered.out_info[1]

        def keep(compiled: Any) -> None:
            if grad:
                shardings = compiled.output_shardings[1]
                self._residuals = jax.tree.map(
                    lambda s, sharding: jax.ShapeDtypeStruct(
                        s.shape, s.dtype, sharding=sharding
                    ),
                    shapes,
                    shardings,
                )
            self._keep("forward" if grad else "evaluate", compiled)

        return _Lowered(lowered, keep)

    def lower_backward(self) -> _Lowered:
        """Backward that adds to the gradients, which it is given to overwrite."""
        segment = self.segment

        def run(params: Any, shared: Any, laned: Any) -> Any:
            consts, seed = shared
            act, batch, residuals, cot, grads = laned
            d_params, d_act = segment.backward(
                self._use(params),
                act,
                {**batch, **consts},
                residuals,
                seed if segment.is_last else cot,
            )
            return _added(grads, d_params), d_act

        def program(
            params: Any,
            act: Any,
            batch: Any,
            consts: Any,
            residuals: Any,
            cot: Any,
            grads: Any,
        ) -> Any:
            seed, laned = (cot, ()) if segment.is_last else ((), cot)
            grads, d_act = self._per_lane(run)(
                params,
                (consts, seed),
                (act, batch, residuals, laned, self._open(grads)),
            )
            return self._close(grads), d_act

        by_lane = self.layout.by_lane(self.place)
        lowered = jax.jit(
            program, out_shardings=(self._grad_shardings(), by_lane), donate_argnums=6
        ).lower(
            self._params(),
            self._act(),
            self._batch(),
            self._consts(),
            self._residuals,
            self._cot(),
            self._grads(),
        )
        return _Lowered(lowered, functools.partial(self._keep, "backward"))

    def lower_fused(self) -> _Lowered:
        """Forward and backward at once: nothing is kept in between."""
        segment = self.segment

        def run(params: Any, shared: Any, laned: Any) -> Any:
            consts, seed = shared
            act, batch, grads = laned
            given = self._use(params), act, {**batch, **consts}
            out, residuals = segment.forward(*given)
            d_params, d_act = segment.backward(*given, residuals, seed)
            return out, _added(grads, d_params), d_act

        def program(
            params: Any, act: Any, batch: Any, consts: Any, seed: Any, grads: Any
        ) -> Any:
            out, grads, d_act = self._per_lane(run)(
                params, (consts, seed), (act, batch, self._open(grads))
            )
            return out, self._close(grads), d_act

        by_lane = self.layout.by_lane(self.place)
        lowered = jax.jit(
            program,
            out_shardings=(by_lane, self._grad_shardings(), by_lane),
            donate_argnums=5,
        ).lower(
            self._params(),
            self._act(),
            self._batch(),
            self._consts(),
            self._cot(),
            self._grads(),
        )
        return _Lowered(lowered, functools.partial(self._keep, "fused"))

    def _keep(self, field: str, compiled: Any) -> None:
        self.compiled = dataclasses.replace(self.compiled, **{field: compiled})

    def _grad_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(self.layout.grad(self.place, leaf) for leaf in self.leaves)

    def _open(self, grads: Any) -> Any:
        """Accumulators with a lane dim, which a single lane's do not carry."""
        return grads if self.lanes > 1 else tuple(g[None] for g in grads)

    def _close(self, grads: Any) -> Any:
        return grads if self.lanes > 1 else tuple(g[0] for g in grads)

    def _per_lane(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f(params, shared, laned)`` on each lane's own part of ``laned``."""

        def body(params: Any, shared: Any, laned: Any) -> Any:
            out = f(params, shared, jax.tree.map(lambda x: jnp.squeeze(x, 0), laned))
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), out)

        if self.lanes == 1:
            return body
        tensor = self.layout.shape(self.place)[2]
        # Without check_vma=False the backward would sum weight gradients over the
        # lanes, once a microbatch.
        return jax.shard_map(
            body,
            mesh=self.layout.mesh(self.place),
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(DATA)),
            out_specs=PartitionSpec(DATA),
            axis_names={DATA} if tensor > 1 else {DATA, MODEL},
            check_vma=False,
        )


def _added(grads: Any, d_params: Any) -> tuple[jax.Array, ...]:
    return tuple(
        g + d.astype(jnp.float32) for g, d in zip(grads, d_params, strict=True)
    )


def batch_shapes(segment: Segment) -> dict[str, Any]:
    """Shapes of the batch arrays a segment reads, of one lane."""
    shapes = {name: v.aval for v, name in segment.code.batch.items()}
    shapes[KEYS] = segment.code.keys.aval
    shapes[MASK] = jax.ShapeDtypeStruct((segment.num_samples,), jnp.float32)
    return {name: shapes[name] for name in segment.batch}


def const_shapes(segment: Segment) -> dict[str, Any]:
    """Shapes of the large constants a segment reads."""
    shapes = {name: v.aval for v, name in segment.code.large.items()}
    return {name: shapes[name] for name in segment.consts}


def zeros(layout: Layout, place: Place, leaves: Sequence[Leaf]) -> Callable[[], Any]:
    """A compiled maker of fresh gradient accumulators."""
    shardings: tuple[NamedSharding, ...] = tuple(layout.grad(place, x) for x in leaves)
    shapes = tuple(layout.grad_shape(place, x) for x in leaves)

    def make() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)

    return jax.jit(make, out_shardings=shardings)


def lane_arrays(
    layout: Layout, place: Place, arrays: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Rows of host arrays on the lanes of a place: ``[lanes, rows a lane, ...]``."""
    lanes = layout.lanes(place)
    shaped = {
        k: v.reshape(lanes, v.shape[0] // lanes, *v.shape[1:])
        for k, v in arrays.items()
    }
    return jax.device_put(shaped, layout.by_lane(place))
