"""From a loss to its flat program: inputs by name, outputs in one form.

    loss, params, batch -> loss_equations -> Equations

The loss is traced on shapes alone. What it closed over becomes inputs, because arrays
written into a program sit on one device and are printed into its text.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.errors import UserError
from hexijax.layers import inline, jaxprs, names
from hexijax.layers.chain import Leaf
from hexijax.layers.equations import Equations, Source
from hexijax.layers.segment import METRIC, METRIC_WEIGHT, SUM, WEIGHT


class TraceError(UserError):
    """A loss that cannot be made into a chain."""


def loss_equations(
    loss: Any,
    params: Any,
    batch: Mapping[str, Any],
    num_samples: int,
    frozen: Collection[str] = (),
) -> Equations:
    """The loss of ``num_samples`` samples as one flat program.

    ``frozen`` names the parameters that do not train.
    """
    by_name = names.flatten(params)
    arrays = {k: _batch_struct(k, x, num_samples) for k, x in sorted(batch.items())}
    key_data = jax.eval_shape(
        lambda: jax.random.key_data(jax.random.split(jax.random.key(0), num_samples))
    )
    output_names: list[str] = []

    def program(flat: list[Any], batch: Mapping[str, Any], key_data: Any) -> list[Any]:
        tree = names.unflatten(params, dict(zip(by_name, flat, strict=True)))
        keys = jax.random.wrap_key_data(key_data)
        outputs = named_outputs(loss(tree, dict(batch), keys), num_samples)
        output_names.extend(outputs)
        return list(outputs.values())

    flat = [jaxprs.struct(x) for x in by_name.values()]
    closed = jax.make_jaxpr(program)(flat, arrays, key_data)
    output_names = output_names[: len(closed.jaxpr.outvars)]
    stacks = inline.find_stacks(closed.jaxpr, len(flat))
    inlined = inline.flatten_program(closed, stacks)
    inputs = iter(inlined.jaxpr.invars)
    leaves: dict[Any, Leaf] = {}
    paths: dict[Any, tuple[str, ...]] = {}
    for leaf, path in _leaves(by_name, stacks, frozen):
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


def named_outputs(returned: Any, num_samples: int) -> dict[str, Any]:
    """The loss's outputs by name: ``sum``, ``weight``, and two a metric."""
    form = "loss(params, batch, keys) -> (sum, weight) or (sum, weight, metrics)"
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise TraceError(
            f"The loss returned {_described(returned)}; the rule is {form}. Return "
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


def _described(returned: Any) -> str:
    if isinstance(returned, tuple):
        return f"{len(returned)} values"
    return "one array" if hasattr(returned, "shape") else f"a {type(returned).__name__}"


def _leaves(
    by_name: Mapping[str, Any],
    stacks: Mapping[int, inline.Stack],
    frozen: Collection[str],
) -> list[tuple[Leaf, tuple[str, ...]]]:
    """Each input leaf, with its path as if stacked layers were listed."""
    paths = [tuple(name.split("/")) for name in by_name]
    scans: dict[int, list[tuple[str, ...]]] = {}
    for i, stack in stacks.items():
        scans.setdefault(stack.scan, []).append(paths[i])
    found = []
    for i, (name, x) in enumerate(by_name.items()):
        dtype, trainable = np.dtype(x.dtype).name, name not in frozen
        if i not in stacks:
            leaf = Leaf(
                name=name, shape=tuple(x.shape), dtype=dtype, trainable=trainable
            )
            found.append((leaf, paths[i]))
            continue
        depth = _common_depth(scans[stacks[i].scan])
        for row in range(stacks[i].length):
            leaf = Leaf(
                name=name,
                shape=(1, *x.shape[1:]),
                dtype=dtype,
                row=row,
                trainable=trainable,
            )
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
