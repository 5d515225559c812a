"""Any loss as a chain of layers that can be compiled one by one.

    loss, params, batch -> trace_model -> TracedModel
        .chain     what the planner reads
        .segment   what the runtime compiles

Everything happens on shapes: nothing is computed and no device is touched. The trace
is taken at one lane's microbatch, because shapes are fixed in it.
"""

import dataclasses
import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.layers import build, jaxprs, pieces, samples
from hexijax.layers.chain import Array, Chain, Group, Layer, Remat
from hexijax.layers.equations import Equations
from hexijax.layers.figures import Figures, compute_dtype, layer_figures
from hexijax.layers.intake import TraceError, loss_equations
from hexijax.layers.layering import UNUSED, Layering
from hexijax.layers.loss import ModelLoss, per_sample
from hexijax.layers.rows import picked_rows
from hexijax.layers.segment import WEIGHT, Segment
from hexijax.layers.tensor import tensor_dims

__all__ = ["TraceError", "TracedModel", "trace_model"]


def trace_model(
    loss: Any,
    params: Any,
    batch: Mapping[str, Any],
    *,
    microbatch_size: int,
    name: str = "model",
    per_microbatch: bool = False,
    padded: bool = False,
    frozen: Collection[str] = (),
    checked: bool = True,
) -> "TracedModel":
    """Traces ``loss`` and cuts it into layers.

    Args:
        loss: ``loss(params, batch, keys) -> (sum, weight)`` or with a dict of metrics.
        params: a tree of arrays or of their shapes.
        batch: arrays or shapes by name; dim 0 is the sample, of any size.
        microbatch_size: samples of one lane's microbatch.
        name: of the model, for people.
        per_microbatch: allow a loss that is no sum over samples.
        padded: microbatches may hold padding; a loss that returns scalars is then
            taken sample by sample.
        frozen: names of parameters that do not train.
        checked: hold it to being a sum over samples; False: another form of it was.

    Raises:
        TraceError: the loss does not have the form above, or (unless
            ``per_microbatch``) is no sum over samples.
    """
    params = jax.tree.map(jaxprs.struct, params)
    if isinstance(loss, ModelLoss) and loss.per_microbatch != per_microbatch:
        loss = loss.variant(per_microbatch=per_microbatch)
    equations = loss_equations(loss, params, batch, microbatch_size, frozen)
    wanted = checked and not per_microbatch
    known = (microbatch_size, equations)
    notes = _check_samples(loss, params, batch, known) if wanted else ()
    if padded and any(x.aval.ndim == 0 for x in equations.outputs.values()):
        assert not per_microbatch, "padding would count among its samples"
        loss = per_sample(loss)
        equations = loss_equations(loss, params, batch, microbatch_size, frozen)
    return TracedModel(
        loss=loss,
        params=params,
        layering=Layering(equations),
        microbatch_size=microbatch_size,
        name=name,
        notes=(*notes, *getattr(loss, "notes", ())),
    )


def _check_samples(
    loss: Any, params: Any, batch: Mapping[str, Any], known: tuple[int, Equations]
) -> tuple[str, ...]:
    """Refuses a loss that is no sum over samples; notes where that is not known.

    A model is traced often, in other sizes and dtypes; it is checked once.
    """
    function = getattr(loss, "per_sample", loss)
    shapes = jaxprs.digest(str((params, sorted(batch), getattr(loss, "build", None))))
    try:
        notes = _checked.setdefault(function, {})
    except TypeError:  # what cannot be referred to weakly is checked each time
        notes = dict[str, tuple[str, ...]]()
    if shapes not in notes:
        notes[shapes] = _sample_notes(samples.check(loss, params, batch, known))
    return notes[shapes]


_checked: weakref.WeakKeyDictionary[Any, dict[str, tuple[str, ...]]] = (
    weakref.WeakKeyDictionary()
)


def _sample_notes(verdict: samples.Verdict) -> tuple[str, ...]:
    place = f"`{verdict.primitive}` at {verdict.where}"
    if verdict.kind == "mixes":
        raise TraceError(
            f"The loss is no sum over samples: its {verdict.output} goes through "
            f"{place}, which {verdict.how}. The loss of a sample must depend on that "
            "sample alone: batches are cut into microbatches. Use what works within a "
            "sample (LayerNorm for BatchNorm) and return sums, no means, with their "
            "weights; or set per_microbatch=True: the loss is then that of each "
            "microbatch, and depends on its size."
        )
    if verdict.kind == "unknown":
        return (
            f"Not known to be a sum over samples: {place} {verdict.how}, and the model "
            "is too large to try with numbers.",
        )
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A loss, cut into layers."""

    loss: Any
    """What was traced; taken sample by sample if padding asked for it."""

    params: Any
    """Shapes of the parameter tree."""

    layering: Layering
    """The flat program and its layers."""

    microbatch_size: int
    """Samples of one lane's microbatch."""

    name: str
    """Name of the model, for people."""

    notes: tuple[str, ...] = ()
    """What the trace found that people should know."""

    @property
    def uses_keys(self) -> bool:
        """Whether the loss draws random numbers."""
        equations = self.layering.equations
        reads = (v for eqn in equations.eqns for v in jaxprs.variables(eqn.invars))
        return equations.keys in set(reads)

    @property
    def maskable(self) -> bool:
        """Whether padding can be left out: every output is one number a sample."""
        return all(v.aval.ndim for v in self.layering.equations.outputs.values())

    @functools.cached_property
    def consts(self) -> Mapping[str, Any]:
        """Large arrays the loss closed over, by the names segments read them under."""
        values = self.layering.equations.consts
        return {
            name: values[v] for v, name in build.large_consts(self.layering).items()
        }

    def segment(
        self,
        start: int,
        stop: int,
        remat: Sequence[Remat],
        groups: Sequence[Group] | None = None,
    ) -> Segment:
        """Layers [start, stop) as functions, with one remat policy a layer.

        ``groups`` hold the segment's leaves in the order it is handed them; None: those
        of the chain.
        """
        if groups is None:
            groups = [group for group, _ in self.layering.groups_of(start, stop)]
        key = (start, stop, tuple(remat), tuple(groups))
        if key not in self._segments:
            self._segments[key] = build.make_segment(
                self.layering, *key, num_samples=self.microbatch_size
            )
        return self._segments[key]

    @functools.cached_property
    def _segments(self) -> dict[tuple[Any, ...], Segment]:
        return {}

    @functools.cached_property
    def measured(self) -> dict[str, Figures]:
        """Costs of the layers seen so far, by signature."""
        return {}

    def weight(self, batch: Mapping[str, Any]) -> jax.Array:
        """float32 weights of a batch of any size, as the loss gives them: (B,) or ().

        To be called under `jit`; only what the weight needs is evaluated.
        """
        num_samples = next(iter(batch.values())).shape[0]
        equations = self.layering.equations
        if num_samples != self.microbatch_size:
            equations = loss_equations(self.loss, self.params, batch, num_samples)
        atom = equations.outputs[WEIGHT]
        if jaxprs.is_literal(atom):
            return jnp.asarray(atom.val, jnp.float32)
        prelude = pieces.batch_prelude(equations, [atom])
        given = {v: batch[name] for v, name in equations.batch.items() if name in batch}
        given |= equations.consts
        return jnp.asarray(prelude(*[given[v] for v in prelude.invars])[0])

    @functools.cached_property
    def chain(self) -> Chain:
        """The layers with their costs, for the planner."""
        layering, equations = self.layering, self.layering.equations
        split = tensor_dims(equations, layering.starts)
        groups = tuple(
            dataclasses.replace(
                group,
                leaves=tuple(
                    dataclasses.replace(leaf, tensor_dim=split.get(v))
                    for leaf, v in zip(group.leaves, variables, strict=True)
                ),
            )
            for group, variables in layering.groups
        )
        picked = picked_rows(equations)
        batch = {
            name: Array(
                shape=tuple(v.aval.shape[1:]),
                dtype=np.dtype(v.aval.dtype).name,
                rows=picked[name].rows if name in picked else None,
                picks=picked[name].leaf if name in picked else "",
            )
            for v, name in equations.batch.items()
        }
        figures = [layer_figures(self, i) for i in range(len(layering))]
        dtype = compute_dtype(equations)
        layers = tuple(
            Layer(
                name=name,
                groups=tuple(group.name for group, _ in layering.groups_of(i, i + 1)),
                uncast=self._uncast(i, dtype),
                **vars(figures[i]),
            )
            for i, name in enumerate(layering.names)
        )
        return Chain(
            name=self.name,
            layers=layers,
            groups=groups,
            batch=batch,
            dtype=dtype,
            notes=(
                *self.notes,
                *layering.notes,
                *_unused_note(groups),
                *_frozen_note(groups),
            ),
        )

    def _uncast(self, layer: int, dtype: str) -> tuple[str, ...]:
        """Leaves that a layer is handed in another dtype than the products'."""
        segment = self.segment(layer, layer + 1, (Remat.NONE,))
        handed = zip(segment.leaves, segment.param_dtypes, strict=True)
        return tuple(leaf.id for leaf, held in handed if held != dtype)


def _unused_note(groups: Sequence[Group]) -> list[str]:
    unused = [leaf.id for g in groups if g.name == UNUSED for leaf in g.leaves]
    if not unused:
        return []
    return [
        f"{len(unused)} parameters are never read, their gradient is zero: "
        f"{', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}."
    ]


def _frozen_note(groups: Sequence[Group]) -> list[str]:
    frozen = {leaf.name for g in groups if not g.trainable for leaf in g.leaves}
    if not frozen:
        return []
    size, trained = (
        sum(g.size for g in groups if g.trainable or not only) for only in (False, True)
    )
    listed = ", ".join(sorted(frozen)[:3]) + (", ..." if len(frozen) > 3 else "")
    return [
        f"{trained:,} of {size:,} parameters train; {len(frozen)} arrays stay as they "
        f"are: {listed}."
    ]
