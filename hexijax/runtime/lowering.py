"""One segment's programs for its mesh, lowered one by one.

    layers.Segment (one lane's arrays) -> Job -> Compiled (arrays with a lane dim)

Every lane runs the segment on its own samples under ``shard_map``, so that no gradient
is summed over lanes before a whole step is done. A program's inputs are outputs of the
one before it, sharded as XLA chose, so each is lowered when the one before is compiled.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from hexijax.layers.segment import KEYS, MASK, Segment
from hexijax.plan.plan import Place
from hexijax.runtime.layout import DATA, MODEL, Layout


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The programs of one segment at one place; all arrays carry the lane dim."""

    segment: Segment
    forward: Callable[..., Any] | None = None
    """(params, act, batch, consts) -> (act or scalars, residuals)."""
    backward: Callable[..., Any] | None = None
    """(params, act, batch, consts, residuals, cot or seed, grads) -> (grads, cot)."""
    input: Callable[..., Any] | None = None
    """(params, act, batch, consts, residuals, cot or seed) -> (cot, made)."""
    weight: Callable[..., Any] | None = None
    """(params, batch, consts, handed, grads) -> grads."""
    fused: Callable[..., Any] | None = None
    """(params, act, batch, consts, seed, grads) -> (scalars, grads, cot)."""
    fused_input: Callable[..., Any] | None = None
    """(params, act, batch, consts, seed) -> (scalars, cot, kept residuals, made)."""
    evaluate: Callable[..., Any] | None = None
    """(params, act, batch, consts) -> act or scalars."""


class Work(enum.Enum):
    """Which programs of a segment are wanted."""

    TRAIN = ("forward", "backward")
    SPLIT = ("forward", "input", "weight")
    FUSED = ("fused",)
    FUSED_SPLIT = ("fused_input", "weight")
    EVALUATE = ("evaluate",)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Shapes and shardings of what a segment's programs are handed."""

    params: Any
    """Parameters."""
    act: Any
    """At its first border."""
    batch: Any
    """Arrays of the batch, by name."""
    consts: Any
    """Large constants, by name."""
    cot: Any
    """At its last border; of the last segment, what multiplies the loss."""
    grads: Any
    """Gradients so far."""


@dataclasses.dataclass
class Lowered:
    """A program before it is compiled, and where it goes then."""

    lowered: Any
    keep: Callable[[Any], None]


class Job:
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
        self.trained = tuple(self.leaves[i] for i in segment.trained)
        self.dtypes = tuple(dtypes)
        self.lanes = layout.lanes(place)
        self.compiled = Compiled(segment)
        self._kept: Any = None
        """Residuals: all that the forward keeps, or those that the weight part reads.
        """
        self._made: Any = None

    # Shapes and shardings of what goes in.

    def given(self) -> Given:
        """All of it but residuals, which are the forward's own."""
        return Given(
            params=self._params(),
            act=self._act(),
            batch=self._batch(),
            consts=self._consts(),
            cot=self._cot(),
            grads=self._grads(),
        )

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
            for leaf in self.trained
        )

    def _use(self, params: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Parameters in the dtype this segment first uses (another may keep more)."""
        return tuple(
            p.astype(dtype) if p.dtype != jnp.dtype(dtype) else p
            for p, dtype in zip(params, self.segment.param_dtypes, strict=True)
        )

    # The programs.

    def lower(self, turn: int) -> Lowered:
        """The one that comes next."""
        match self.work.value[turn]:
            case "forward":
                return self._lower_first(grad=True)
            case "evaluate":
                return self._lower_first(grad=False)
            case "backward":
                return self._lower_backward()
            case "input":
                return self._lower_input()
            case "weight":
                return self._lower_weight()
            case "fused":
                return self._lower_fused()
            case _:
                return self._lower_fused_input()

    def _lower_first(self, *, grad: bool) -> Lowered:
        """Forward with residuals, or evaluation."""
        segment = self.segment

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

        def keep(compiled: Any) -> None:
            if grad:
                self._kept = _results(lowered, compiled, 1)
            self._keep("forward" if grad else "evaluate", compiled)

        return Lowered(lowered, keep)

    def _lower_backward(self) -> Lowered:
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
            self._kept,
            self._cot(),
            self._grads(),
        )
        return Lowered(lowered, functools.partial(self._keep, "backward"))

    def _lower_input(self) -> Lowered:
        """The part of a backward that hands cotangents back."""
        segment = self.segment

        def run(params: Any, shared: Any, laned: Any) -> Any:
            consts, seed = shared
            act, batch, residuals, cot = laned
            return segment.backward_input(
                self._use(params),
                act,
                {**batch, **consts},
                residuals,
                seed if segment.is_last else cot,
            )

        def program(
            params: Any, act: Any, batch: Any, consts: Any, residuals: Any, cot: Any
        ) -> Any:
            seed, laned = (cot, ()) if segment.is_last else ((), cot)
            return self._per_lane(run)(
                params, (consts, seed), (act, batch, residuals, laned)
            )

        out = (self.layout.by_lane(self.place), None)
        lowered = jax.jit(program, out_shardings=out).lower(
            self._params(),
            self._act(),
            self._batch(),
            self._consts(),
            self._kept,
            self._cot(),
        )

        def keep(compiled: Any) -> None:
            self._kept = [self._kept[i] for i in segment.split.residuals]
            self._made = _results(lowered, compiled, 1)
            self._keep("input", compiled)

        return Lowered(lowered, keep)

    def _lower_weight(self) -> Lowered:
        """The part that adds to the gradients, which it is given to overwrite."""
        segment = self.segment
        cot = () if segment.is_last else self._cot()
        handed = segment.split.hand_on(self._act(), self._kept, cot, self._made)

        def run(params: Any, consts: Any, laned: Any) -> Any:
            batch, handed, grads = laned
            d_params = segment.backward_weight(
                self._use(params), {**batch, **consts}, handed
            )
            return _added(grads, d_params)

        def program(
            params: Any, batch: Any, consts: Any, handed: Any, grads: Any
        ) -> Any:
            grads = self._per_lane(run)(
                params, consts, (batch, handed, self._open(grads))
            )
            return self._close(grads)

        lowered = jax.jit(
            program, out_shardings=self._grad_shardings(), donate_argnums=4
        ).lower(self._params(), self._batch(), self._consts(), handed, self._grads())
        return Lowered(lowered, functools.partial(self._keep, "weight"))

    def _lower_fused_input(self) -> Lowered:
        """Forward and input part at once: kept is only what the weight part reads."""
        segment = self.segment

        def run(params: Any, shared: Any, laned: Any) -> Any:
            consts, seed = shared
            act, batch = laned
            given = self._use(params), act, {**batch, **consts}
            out, residuals = segment.forward(*given)
            d_act, made = segment.backward_input(*given, residuals, seed)
            return out, d_act, [residuals[i] for i in segment.split.residuals], made

        def program(params: Any, act: Any, batch: Any, consts: Any, seed: Any) -> Any:
            return self._per_lane(run)(params, (consts, seed), (act, batch))

        by_lane = self.layout.by_lane(self.place)
        lowered = jax.jit(program, out_shardings=(by_lane, by_lane, None, None)).lower(
            self._params(), self._act(), self._batch(), self._consts(), self._cot()
        )

        def keep(compiled: Any) -> None:
            self._kept = _results(lowered, compiled, 2)
            self._made = _results(lowered, compiled, 3)
            self._keep("fused_input", compiled)

        return Lowered(lowered, keep)

    def _lower_fused(self) -> Lowered:
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
        return Lowered(lowered, functools.partial(self._keep, "fused"))

    def _keep(self, field: str, compiled: Any) -> None:
        self.compiled = dataclasses.replace(self.compiled, **{field: compiled})

    def _grad_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(self.layout.grad(self.place, leaf) for leaf in self.trained)

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


def _results(lowered: Any, compiled: Any, index: int) -> Any:
    """One of a program's results, with the shardings XLA chose."""
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        lowered.out_info[index],
        compiled.output_shardings[index],
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
