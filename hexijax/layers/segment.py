"""A run of layers as functions of its parameters, its first border and the batch.

    evaluate(params, act, batch)                        -> out
    forward(params, act, batch)                         -> out, residuals
    backward(params, act, batch, residuals, cotangents) -> d_params, d_act

or, in two parts, the second at any time after the first:

    backward_input(params, act, batch, residuals, cotangents) -> d_act, made
    backward_weight(params, batch, handed)                    -> d_params

``d_params`` are the gradients of the parameters that train; ``d_act`` is empty where
none before the segment does.

All are to be traced under `jit`, on the arrays of one lane. ``out`` is the tuple
of arrays at the last border; for the last segment a dict of float32 scalars.

What the forward keeps is a flat list, and nothing in it can be had from the arguments:
parameters, borders, batch arrays and the preludes of both are read or computed again.
Both directions come from one trace of `jax.vjp`, so they may be lowered apart, and
inside `shard_map` (with ``check_vma=False``: gradients stay partial, one a lane).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hexijax.layers import jaxprs
from hexijax.layers.chain import Leaf, LeafPart, Remat, whole_leaf
from hexijax.layers.code import Code, Trace
from hexijax.layers.split import Split

KEYS, MASK = "@keys", "@mask"
"""Names in a segment's batch beside the user's: key data uint32, weights of samples."""

SUM, WEIGHT = "sum", "weight"
METRIC, METRIC_WEIGHT = "metric:", "metric_weight:"


def _dots_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
    """Matrix products, convolutions and fused attention kernels, which are as dear."""
    name = primitive.name
    return name in ("dot_general", "conv_general_dilated") or "attention_fwd" in name


_POLICIES: dict[Remat, dict[str, Any]] = {
    # Forward and backward are apart, so that nothing can undo the recomputation; a
    # barrier would only keep it from fusing with what reads it.
    Remat.DOTS: {"policy": _dots_saveable, "prevent_cse": False},
    # The barrier keeps the layers' recomputation from running all at once, early.
    Remat.FULL: {"policy": jax.checkpoint_policies.nothing_saveable},
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Layers [start, stop) of a model, compiled and dispatched as one."""

    layers: tuple[int, int]
    """First layer and the one past the last."""

    groups: tuple[str, ...]
    """Names of its parameter groups, in the order it is handed them."""

    leaves: tuple[Leaf, ...]
    """Leaves of those groups, or their parts: the order of ``params``."""

    param_dtypes: tuple[str, ...]
    """Dtype each leaf is handed in: that of its first use."""

    batch: tuple[str, ...]
    """Batch arrays it reads, with ``@keys`` and ``@mask``."""

    consts: tuple[str, ...]
    """Large arrays the loss closed over: given in ``batch`` too, the same each time."""

    border_in: tuple[jax.ShapeDtypeStruct, ...]
    """Arrays at its first border; none for layer 0."""

    border_out: tuple[jax.ShapeDtypeStruct, ...]
    """Arrays at its last border; none for the last segment."""

    is_last: bool
    """Whether it ends in the loss."""

    scalar_names: tuple[str, ...]
    """Keys of the last segment's ``out``."""

    num_samples: int
    """Samples of one lane's microbatch, as traced."""

    hands_back: bool = True
    """Whether parameters before it train, so that cotangents leave its first border."""

    code: Code = dataclasses.field(repr=False)
    """The equations."""

    @property
    def float_in(self) -> tuple[int, ...]:
        """Positions in ``border_in`` that have a cotangent."""
        if not self.hands_back:
            return ()
        return tuple(i for i, x in enumerate(self.border_in) if jaxprs.is_float(x))

    @functools.cached_property
    def trained(self) -> tuple[int, ...]:
        """Positions in ``leaves`` that have a gradient."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.trainable)

    @property
    def has_backward(self) -> bool:
        """Whether there is anything to differentiate."""
        return self.hands_back or bool(self.trained)

    @property
    def float_out(self) -> tuple[int, ...]:
        """Positions in ``border_out`` that have a cotangent."""
        return tuple(i for i, x in enumerate(self.border_out) if jaxprs.is_float(x))

    @functools.cached_property
    def signature(self) -> str:
        """Equal exactly for the same computation on the same shapes and dtypes."""
        code, trace = self.code, self._trace
        programs = (code.h.closed, code.k.closed, trace.forward, trace.backward)
        texts = [jaxprs.canonical_text(program) for program in programs]
        wiring = (self.param_dtypes, self.batch, self.consts, self.scalar_names)
        kept = (trace.given, trace.derived, trace.kept, code.wiring())
        if len(self.trained) < len(self.leaves) or not self.hands_back:
            kept = (*kept, self.trained, self.hands_back)
        parts = [
            (i, x.dim, x.start, x.whole.id)
            for i, x in enumerate(self.leaves)
            if isinstance(x, LeafPart)
        ]
        if parts:
            kept = (*kept, parts)
        return jaxprs.digest(*texts, repr(wiring), repr(kept))

    @property
    def residuals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What ``forward`` keeps."""
        return self._trace.residuals

    @property
    def reads_act(self) -> bool:
        """Whether the backward reads arrays of the first border as they came."""
        act = len(self._trace.forward.jaxpr.invars) - len(self.border_in)
        return any(at >= act for at in self._trace.given.values())

    @property
    def backward_program(self) -> core.ClosedJaxpr:
        """(all residuals, seeds) -> gradients: for counting."""
        return self._trace.backward

    @property
    def differentiated(self) -> Trace:
        """Both directions as programs: for counting."""
        return self._trace

    def evaluate(
        self, params: Sequence[Any], act: Sequence[Any], batch: Mapping[str, Any]
    ) -> Any:
        """Runs forward only."""
        h, k = self._h(params, batch), self._k(batch)
        return self._out(self._run(h, k, self._extra(batch), act))

    def forward(
        self, params: Sequence[Any], act: Sequence[Any], batch: Mapping[str, Any]
    ) -> tuple[Any, list[Any]]:
        """Runs forward and keeps what the backward needs."""
        trace = self._trace
        h, k = self._h(params, batch), self._k(batch)
        made = core.jaxpr_as_fun(trace.forward)(*h, *k, *self._extra(batch), *act)
        out, residuals = made[: trace.num_out], made[trace.num_out :]
        return self._out(out), [residuals[i] for i in trace.kept]

    def backward(
        self,
        params: Sequence[Any],
        act: Sequence[Any],
        batch: Mapping[str, Any],
        residuals: Sequence[Any],
        cotangents: Any,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Gradients of parameters that train, and cotangents of the float inputs.

        ``cotangents``: one a float array at the last border, or the float32 scalar that
        multiplies the gradient of ``sum``.
        """
        full = self._full(params, act, batch) | self._kept(residuals)
        flat = [full[i] for i in range(len(full))]
        seeds = self._seeds(cotangents)
        made = core.jaxpr_as_fun(self._trace.backward)(*flat, *seeds)
        d_params = self._h_transpose(params, batch, made[: self.num_gradients])
        return d_params, tuple(made[self.num_gradients :])

    def backward_input(
        self,
        params: Sequence[Any],
        act: Sequence[Any],
        batch: Mapping[str, Any],
        residuals: Sequence[Any],
        cotangents: Any,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Cotangents of the float inputs, and what ``split`` has the weight part read.

        `Split.hand_on` puts the latter beside what travels on as it is.
        """
        full = self._full(params, act, batch) | self._kept(residuals)
        flat = [full[i] for i in range(len(full))]
        seeds, split = self._seeds(cotangents), self.split
        made = split.input(*flat, *seeds, *split.consts)
        num_d_act = len(self.float_in)
        return tuple(made[:num_d_act]), tuple(made[num_d_act:])

    def backward_weight(
        self, params: Sequence[Any], batch: Mapping[str, Any], handed: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Gradients of the parameters that train."""
        split = self.split
        absent = [None] * len(self.border_in)
        full = self._full(params, absent, batch)
        again = [full[i] for i in split.again]
        d_h = split.weight(*again, *handed, *split.consts)
        return self._h_transpose(params, batch, d_h)

    @functools.cached_property
    def split(self) -> Split:
        """The backward in two parts."""
        return Split.of(
            self._trace,
            num_h=self.num_gradients,
            num_act=len(self.border_in),
            is_last=self.is_last,
        )

    # The pieces in between.

    @property
    def num_gradients(self) -> int:
        """Arrays of gradients that the backward begins with, before the prelude's."""
        return len(self._trained_h)

    @functools.cached_property
    def trained_weights(self) -> tuple[bool, ...]:
        """Of each result of the parameters' prelude, whether a parameter that trains is
        behind it."""
        h, params = self.code.h, self.code.params
        ids = {whole_leaf(self.leaves[i]).id for i in self.trained}
        jaxpr = h.closed.jaxpr
        behind = {
            v
            for v, given in zip(jaxpr.invars, h.invars, strict=True)
            if params.get(given) in ids
        }
        for eqn in jaxpr.eqns:
            if not behind.isdisjoint(jaxprs.variables(eqn.invars)):
                behind.update(eqn.outvars)
        return tuple(not jaxprs.is_literal(v) and v in behind for v in jaxpr.outvars)

    @functools.cached_property
    def _trained_h(self) -> tuple[int, ...]:
        """Positions of the float ones among them."""
        outvars = self.code.h.outvars
        return tuple(
            i
            for i, trained in enumerate(self.trained_weights)
            if trained and jaxprs.is_float(outvars[i].aval)
        )

    def _full(
        self, params: Sequence[Any], act: Sequence[Any], batch: Mapping[str, Any]
    ) -> dict[int, Any]:
        """Residuals by number that can be had from the arguments."""
        trace = self._trace
        h, k = self._h(params, batch), self._k(batch)
        given = [*h, *k, *self._extra(batch), *act]
        full = {i: given[at] for i, at in trace.given.items()}
        if trace.derived:
            again = trace.rederive(*trace.rederive_inputs(given))
            full |= dict(zip(trace.derived, again, strict=True))
        return full

    def _kept(self, residuals: Sequence[Any]) -> dict[int, Any]:
        """Residuals by number that travelled."""
        return dict(zip(self._trace.kept, residuals, strict=True))

    def _seeds(self, cotangents: Any) -> list[Any]:
        return [cotangents] if self.is_last else list(cotangents)

    def _h(self, params: Sequence[Any], batch: Mapping[str, Any]) -> list[Any]:
        assert len(params) == len(self.leaves)
        whole = _assembled(self.leaves, params)
        return self.code.h(*self.code.lookup(self.code.h.invars, whole, batch))

    def _k(self, batch: Mapping[str, Any]) -> list[Any]:
        return self.code.k(*self.code.lookup(self.code.k.invars, {}, batch))

    def _h_transpose(
        self, params: Sequence[Any], batch: Mapping[str, Any], d_h: Sequence[Any]
    ) -> tuple[Any, ...]:
        at = [i for i in self.trained if jaxprs.is_float(params[i])]
        floats = self._trained_h

        def prelude(chosen: Sequence[Any]) -> list[Any]:
            merged = list(params)
            for i, p in zip(at, chosen, strict=True):
                merged[i] = p
            h = self._h(merged, batch)
            return [h[i] for i in floats]

        _, transpose = jax.vjp(prelude, [params[i] for i in at])
        gradients = dict(zip(at, transpose(list(d_h))[0], strict=True))
        return tuple(
            gradients[i] if i in gradients else jnp.zeros_like(params[i])
            for i in self.trained
        )

    def _extra(self, batch: Mapping[str, Any]) -> list[Any]:
        return [batch[name] for name in (KEYS, MASK) if name in self.batch]

    def _run(
        self,
        h: Sequence[Any],
        k: Sequence[Any],
        extra: Sequence[Any],
        act: Sequence[Any],
    ) -> list[Any]:
        """Flat outputs: the last border's arrays or the loss's scalars."""
        code = self.code
        env = dict(zip(code.h.outvars, h, strict=True))
        env |= dict(zip(code.k.outvars, k, strict=True))
        env |= dict(zip(code.act, act, strict=True))
        named = dict(
            zip((n for n in (KEYS, MASK) if n in self.batch), extra, strict=True)
        )
        if KEYS in named:
            env[code.keys] = named[KEYS]
        for piece, remat in zip(code.bodies, code.remat, strict=True):
            layer = jaxprs.Piece.of(code.like, piece.reads, piece.makes, piece.eqns)
            run = layer.__call__
            if remat is not Remat.NONE:
                run = jax.checkpoint(run, **_POLICIES[remat])
            env.update(
                zip(piece.makes, run(*[env[v] for v in piece.reads]), strict=True)
            )
        values = [v.val if jaxprs.is_literal(v) else env[v] for v in code.outputs]
        if not self.is_last:
            return values
        return [_total(value, named.get(MASK)) for value in values]

    def _out(self, values: Sequence[Any]) -> Any:
        if self.is_last:
            return dict(zip(self.scalar_names, values, strict=True))
        return tuple(values)

    @functools.cached_property
    def _trace(self) -> Trace:
        code = self.code
        extra = [
            jax.ShapeDtypeStruct((self.num_samples,), np.dtype(np.float32))
            if name == MASK
            else jaxprs.struct(code.keys.aval)
            for name in (KEYS, MASK)
            if name in self.batch
        ]
        h, k = ([jaxprs.struct(v.aval) for v in p.outvars] for p in (code.h, code.k))
        act = [jaxprs.struct(v.aval) for v in code.act]
        in_h = self._trained_h
        out = (0,) if self.is_last else self.float_out
        any_float = bool(in_h) or bool(self.float_in)
        tree: list[Any] = []

        def forward(h: Any, k: Any, extra: Any, act: Any) -> Any:
            def run(floats_h: Any, floats_act: Any) -> Any:
                full_h, full_act = list(h), list(act)
                for i, x in zip(in_h, floats_h, strict=True):
                    full_h[i] = x
                for i, x in zip(self.float_in, floats_act, strict=True):
                    full_act[i] = x
                values = self._run(full_h, k, extra, full_act)
                return [values[i] for i in out], values

            floats = [h[i] for i in in_h], [act[i] for i in self.float_in]
            if not any_float:
                return run(*floats)[1], list[Any]()
            _, vjp, values = jax.vjp(run, *floats, has_aux=True)
            leaves, structure = jax.tree.flatten(vjp)
            tree.append(structure)
            return values, leaves

        traced = jax.make_jaxpr(forward)(h, k, extra, act)
        num_out = len(code.outputs)
        leaves = [jaxprs.struct(v.aval) for v in traced.jaxpr.outvars[num_out:]]
        seeds = (
            [jax.ShapeDtypeStruct((), np.dtype(np.float32))]
            if self.is_last
            else [self.border_out[i] for i in out]
        )
        backward = jax.make_jaxpr(
            lambda leaves, seeds: (
                jax.tree.unflatten(tree[0], leaves)(seeds) if any_float else []
            )
        )(leaves, seeds)
        return Trace.of(traced, backward, num_out, num_h=len(h), num_k=len(k))


def _assembled(leaves: Sequence[Leaf], params: Sequence[Any]) -> dict[str, Any]:
    """Parameters by the id of their leaf; those that come in parts, put together."""
    found: dict[str, Any] = {}
    parts: dict[str, list[tuple[LeafPart, Any]]] = {}
    for leaf, param in zip(leaves, params, strict=True):
        if isinstance(leaf, LeafPart):
            parts.setdefault(leaf.whole.id, []).append((leaf, param))
        else:
            found[leaf.id] = param
    for name, of_leaf in parts.items():
        ordered = sorted(of_leaf, key=lambda each: each[0].start)
        found[name] = jnp.concatenate([x for _, x in ordered], ordered[0][0].dim)
    return found


def _total(value: Any, mask: Any) -> Any:
    """Sum over the lane's samples, padding left out, in float32."""
    value = jnp.asarray(value, jnp.float32)
    if mask is None or value.ndim == 0:
        return jnp.sum(value)
    return jnp.sum(jnp.where(mask > 0, value, jnp.zeros_like(value)))
