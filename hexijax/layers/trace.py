"""Any loss as a chain of layers that can be compiled one by one.

    loss, params, batch -> trace_model -> TracedModel
        .chain     what the planner reads
        .segment   what the runtime compiles

Everything happens on shapes: nothing is computed and no device is touched. The trace
is taken at one lane's microbatch, because shapes are fixed in it.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.errors import UserError
from hexijax.layers import cut, inline, jaxprs, names, pieces
from hexijax.layers.chain import Group, Leaf, Remat
from hexijax.layers.equations import Equations, Source
from hexijax.layers.loss import per_sample
from hexijax.layers.segment import (
    KEYS,
    MASK,
    METRIC,
    METRIC_WEIGHT,
    SUM,
    WEIGHT,
    Code,
    Segment,
)

SMALL_CONST_BYTES = 64 * 1024
"""Closed-over arrays up to this size are compiled into the program."""

UNUSED = "unused"
"""Group of the parameters that no layer reads."""


class TraceError(UserError):
    """A loss that cannot be made into a chain."""


def trace_model(
    loss: Any,
    params: Any,
    batch: Mapping[str, Any],
    *,
    microbatch_size: int,
    name: str = "model",
    per_microbatch: bool = False,
    padded: bool = False,
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

    Raises:
        TraceError: the loss does not have the form above, or (unless
            ``per_microbatch``) is no sum over samples.
    """
    equations = _equations(loss, params, batch, microbatch_size)
    scalar = equations.outputs[SUM].aval.ndim == 0
    if padded and (scalar or equations.outputs[WEIGHT].aval.ndim == 0):
        loss = per_sample(loss)
        equations = _equations(loss, params, batch, microbatch_size)
    return TracedModel(
        loss=loss,
        params=jax.tree.map(jaxprs.struct, params),
        equations=equations,
        microbatch_size=microbatch_size,
        name=name,
    )


def _equations(
    loss: Any, params: Any, batch: Mapping[str, Any], num_samples: int
) -> Equations:
    """The loss as one flat program."""
    by_name = names.flatten(params)
    arrays = {k: _batch_struct(k, x, num_samples) for k, x in sorted(batch.items())}
    key_data = jax.eval_shape(
        lambda: jax.random.key_data(jax.random.split(jax.random.key(0), num_samples))
    )
    output_names: list[str] = []

    def program(flat: list[Any], batch: Mapping[str, Any], key_data: Any) -> list[Any]:
        tree = names.unflatten(params, dict(zip(by_name, flat, strict=True)))
        keys = jax.random.wrap_key_data(key_data)
        outputs = _outputs(loss(tree, dict(batch), keys), num_samples)
        output_names.extend(outputs)
        return list(outputs.values())

    flat = [jaxprs.struct(x) for x in by_name.values()]
    closed = jax.make_jaxpr(program)(flat, arrays, key_data)
    output_names = output_names[: len(closed.jaxpr.outvars)]
    stacks = inline.find_stacks(closed.jaxpr, len(flat))
    inlined = inline.flatten_program(closed, stacks)
    inputs = iter(inlined.jaxpr.invars)
    leaves, paths = {}, {}
    for leaf, path in _leaves(by_name, stacks):
        v = next(inputs)
        leaves[v], paths[v] = leaf, path
    batch_vars = {next(inputs): k for k in arrays}
    keys = next(inputs)
    consts = dict(zip(inputs, closed.consts, strict=True))
    consts |= dict(zip(inlined.jaxpr.constvars, inlined.consts, strict=True))
    equations = Equations(
        closed=inlined,
        params=leaves,
        paths=paths,
        batch=batch_vars,
        keys=keys,
        consts=consts,
        outputs=dict(zip(output_names, inlined.jaxpr.outvars, strict=True)),
    )
    _check_weight(equations)
    return equations


def _batch_struct(name: str, array: Any, num_samples: int) -> jax.ShapeDtypeStruct:
    if jnp.ndim(array) == 0:
        raise TraceError(
            f"Batch array {name!r} has no dims; dim 0 of every batch array is the "
            "sample. Close over constants instead."
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct((num_samples, *array.shape[1:]), dtype)


def _outputs(returned: Any, num_samples: int) -> dict[str, Any]:
    """The loss's outputs by name: ``sum``, ``weight``, and two a metric."""
    form = "loss(params, batch, keys) -> (sum, weight) or (sum, weight, metrics)"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise TraceError(
            f"The loss returned {type(returned).__name__}; the rule is {form}. Return "
            "the loss summed by sample and the weights (as token counts) to divide by."
        )
    total, weight, *rest = returned
    outputs = {SUM: total, WEIGHT: weight}
    for key, metric in (rest[0] if rest else {}).items():
        value, by = metric if isinstance(metric, tuple) else (metric, weight)
        outputs |= {METRIC + key: value, METRIC_WEIGHT + key: by}
    for key, value in outputs.items():
        if jnp.shape(value) not in ((), (num_samples,)):
            raise TraceError(
                f"The loss's {key} has shape {jnp.shape(value)}; with {num_samples} "
                f"samples it must be ({num_samples},), a number a sample, or (). Sum "
                "over the other dims."
            )
    return {k: jnp.asarray(v, jnp.float32) for k, v in outputs.items()}


def _leaves(
    by_name: Mapping[str, Any], stacks: Mapping[int, inline.Stack]
) -> list[tuple[Leaf, tuple[str, ...]]]:
    """Each input leaf, with its path as if stacked layers were listed."""
    paths = [tuple(name.split("/")) for name in by_name]
    scans: dict[int, list[tuple[str, ...]]] = {}
    for i, stack in stacks.items():
        scans.setdefault(stack.scan, []).append(paths[i])
    found = []
    for i, (name, x) in enumerate(by_name.items()):
        dtype = np.dtype(x.dtype).name
        if i not in stacks:
            found.append((Leaf(name=name, shape=tuple(x.shape), dtype=dtype), paths[i]))
            continue
        depth = _common_depth(scans[stacks[i].scan])
        for row in range(stacks[i].length):
            leaf = Leaf(name=name, shape=(1, *x.shape[1:]), dtype=dtype, row=row)
            found.append((leaf, (*paths[i][:depth], str(row), *paths[i][depth:])))
    return found


def _common_depth(paths: Sequence[tuple[str, ...]]) -> int:
    """Components that all paths share, the last one of each left out."""
    shortest = min(len(path) for path in paths) - 1
    same = (len({path[i] for path in paths}) == 1 for i in range(shortest))
    return next((i for i, equal in enumerate(same) if not equal), shortest)


def _check_weight(equations: Equations) -> None:
    for key, atom in equations.outputs.items():
        if key != WEIGHT and not key.startswith(METRIC_WEIGHT):
            continue
        if jaxprs.is_literal(atom):
            continue
        if equations.sources[atom] & (Source.PARAMS | Source.KEYS):
            read = sorted(
                equations.params[v].id for v in _params_behind(equations, atom)
            )
            what = f"parameters ({', '.join(read[:3])}, ...)" if read else "random keys"
            raise TraceError(
                f"The loss's {key} depends on {what}; it must depend on the batch "
                "alone, because the weight of the whole step is known before the first "
                "backward. Divide by a count taken from the batch."
            )


def _params_behind(equations: Equations, atom: Any) -> set[Any]:
    eqns = [equations.eqns[i] for i in jaxprs.needed(equations.eqns, [atom])]
    read = {v for eqn in eqns for v in jaxprs.variables(eqn.invars)} | {atom}
    return read & set(equations.params)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A loss, cut into layers."""

    loss: Any
    """What was traced, sample by sample if padding asked for it."""

    params: Any
    """Shapes of the parameter tree."""

    equations: Equations
    """The flat program."""

    microbatch_size: int
    """Samples of one lane's microbatch."""

    name: str
    """Name of the model, for people."""

    @property
    def uses_keys(self) -> bool:
        """Whether the loss draws random numbers."""
        reads = [v for eqn in self.equations.eqns for v in jaxprs.variables(eqn.invars)]
        return self.equations.keys in reads

    @property
    def maskable(self) -> bool:
        """Whether padding can be left out: every output is one number a sample."""
        return all(v.aval.ndim == 1 for v in self.equations.outputs.values())

    @functools.cached_property
    def consts(self) -> Mapping[str, Any]:
        """Large arrays the loss closed over, by the names segments read them under."""
        return {name: self.equations.consts[v] for v, name in self._large.items()}

    @functools.cached_property
    def _large(self) -> Mapping[Any, str]:
        consts = self.equations.consts.items()
        large = [v for v, x in consts if jaxprs.num_bytes(v.aval) > SMALL_CONST_BYTES]
        return {v: f"@const/{i}" for i, v in enumerate(large)}

    @functools.cached_property
    def _cuts(self) -> tuple[tuple[cut.Cut, ...], tuple[str, ...]]:
        return cut.find_cuts(self.equations)

    def _span(self, layer: int) -> tuple[int, int]:
        starts = [c.start for c in self._cuts[0]] + [len(self.equations.eqns)]
        return starts[layer], starts[layer + 1]

    @functools.cached_property
    def _borders(self) -> list[tuple[Any, ...]]:
        """Live variables before each layer, and the loss's outputs after the last."""
        borders = [self.equations.border(c.start) for c in self._cuts[0]]
        return [(), *borders[1:], tuple(self.equations.outputs.values())]

    @functools.cached_property
    def _bodies(self) -> list[pieces.Body]:
        return [
            pieces.body(self.equations, *self._span(i), self._borders[i + 1])
            for i in range(len(self._cuts[0]))
        ]

    def _reads(self, layer: int) -> list[Any]:
        """What a layer's body and outputs read from outside."""
        body = self._bodies[layer]
        last = layer + 1 == len(self._bodies)
        made = set(body.makes)
        extra = jaxprs.variables(self._borders[-1]) if last else []
        return [*body.reads, *(v for v in extra if v not in made)]

    @functools.cached_property
    def groups(self) -> tuple[tuple[Group, tuple[Any, ...]], ...]:
        """Parameter groups with their variables, in the order of first use."""
        users: dict[Any, list[int]] = {}
        for i in range(len(self._bodies)):
            prelude = pieces.param_prelude(self.equations, self._reads(i))
            for v in prelude.invars:
                if v in self.equations.params:
                    users.setdefault(v, []).append(i)
        sets: dict[tuple[int, ...], list[Any]] = {}
        for v, layers in users.items():
            sets.setdefault(tuple(layers), []).append(v)
        unused = [v for v in self.equations.params if v not in users]
        found = []
        for layers, vs in sets.items():
            first = self.equations.params[vs[0]]
            name = self._cuts[0][layers[0]].name if len(layers) == 1 else first.id
            found.append((name, layers, vs))
        if unused:
            found.append((UNUSED, (len(self._bodies) - 1,), unused))
        leaf = self.equations.params
        return tuple(
            (
                Group(name=name, leaves=tuple(leaf[v] for v in vs), layers=layers),
                tuple(vs),
            )
            for name, layers, vs in found
        )

    def segment(self, start: int, stop: int, remat: tuple[Remat, ...]) -> Segment:
        """Layers [start, stop) as functions, with one remat policy a layer."""
        key = (start, stop, tuple(remat))
        if key not in self._segments:
            self._segments[key] = _segment(self, *key)
        return self._segments[key]

    @functools.cached_property
    def _segments(self) -> dict[tuple[int, int, tuple[Remat, ...]], Segment]:
        return {}


def _segment(
    model: TracedModel, start: int, stop: int, remat: tuple[Remat, ...]
) -> Segment:
    assert 0 <= start < stop <= len(model._bodies), (start, stop)
    assert len(remat) == stop - start, "one policy a layer"
    equations = model.equations
    is_last = stop == len(model._bodies)
    bodies = tuple(model._bodies[start:stop])
    reads = [v for i in range(start, stop) for v in model._reads(i)]
    groups = [
        (group, vs)
        for group, vs in model.groups
        if any(start <= layer < stop for layer in group.layers)
    ]
    leaf_of = {
        v: leaf.id for g, vs in groups for v, leaf in zip(vs, g.leaves, strict=True)
    }
    h, handed = _handed(pieces.param_prelude(equations, reads), leaf_of, equations)
    k = pieces.batch_prelude(equations, reads)
    read = {*h.invars, *k.invars, *(v for b in bodies for v in b.reads)}
    batch = [name for v, name in equations.batch.items() if v in read]
    if equations.keys in read:
        batch.append(KEYS)
    outputs = model._borders[stop]
    if is_last and any(v.aval.ndim == 1 for v in outputs):
        batch.append(MASK)
    large = {v: name for v, name in model._large.items() if v in read}
    act = model._borders[start]
    border_out = () if is_last else outputs
    dtype_of = {leaf: np.dtype(v.aval.dtype).name for v, leaf in handed.items()}
    return Segment(
        layers=(start, stop),
        groups=tuple(group.name for group, _ in groups),
        leaves=tuple(leaf for group, _ in groups for leaf in group.leaves),
        param_dtypes=tuple(dtype_of[leaf] for leaf in leaf_of.values()),
        batch=tuple(batch),
        consts=tuple(large.values()),
        border_in=tuple(jaxprs.struct(v.aval) for v in act),
        border_out=tuple(jaxprs.struct(v.aval) for v in border_out),
        is_last=is_last,
        scalar_names=tuple(equations.outputs) if is_last else (),
        num_samples=model.microbatch_size,
        code=Code(
            like=equations.closed,
            h=h,
            k=k,
            bodies=bodies,
            remat=remat,
            act=act,
            outputs=outputs,
            keys=equations.keys,
            params=handed,
            batch=equations.batch,
            large=large,
            small={v: x for v, x in equations.consts.items() if v not in model._large},
        ),
    )


def _handed(
    h: jaxprs.Piece, leaf_of: Mapping[Any, str], equations: Equations
) -> tuple[jaxprs.Piece, dict[Any, str]]:
    """The prelude with parameters handed in the dtype of their first use.

    Where every use of a parameter converts it to one dtype, the runtime hands it in
    that dtype, once a step, and the conversion leaves the program.
    """
    readers: dict[Any, list[Any]] = {}
    for eqn in h.eqns:
        for v in jaxprs.variables(eqn.invars):
            readers.setdefault(v, []).append(eqn)
    stand_in, dropped = {}, []
    for v in leaf_of:
        casts = readers.get(v, [])
        dtypes = {str(eqn.params.get("new_dtype")) for eqn in casts}
        only_cast = all(eqn.primitive.name == "convert_element_type" for eqn in casts)
        to_float = all(jaxprs.is_float(eqn.outvars[0].aval) for eqn in casts)
        if len(dtypes) == 1 and only_cast and to_float and v not in h.outvars:
            stand_in[v] = casts[0].outvars[0]
            dropped.append(casts[0])
    eqns = [
        eqn.replace(
            invars=[
                v if jaxprs.is_literal(v) else stand_in.get(v, v) for v in eqn.invars
            ]
        )
        for eqn in h.eqns
        if all(eqn is not cast for cast in dropped)
    ]
    invars = [stand_in.get(v, v) for v in h.invars]
    handed = {stand_in.get(v, v): leaf for v, leaf in leaf_of.items()}
    return jaxprs.Piece(equations.closed, invars, h.outvars, eqns), handed
