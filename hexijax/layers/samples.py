"""Is the loss a sum over samples? Only then may a batch be cut into microbatches.

    flat program -> the sample dim followed from batch to outputs -> yes, no (where), ?

Where a primitive is unknown and the model is small, numbers decide: the loss of three
samples against those of each alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.layers import dims, jaxprs, pieces
from hexijax.layers.dims import Along, Mixed, Same, State, Summed, Unknown
from hexijax.layers.equations import Equations
from hexijax.layers.intake import loss_equations, named_outputs
from hexijax.layers.places import place_of

PROBE_MAX_PARAMS = 2_000_000
"""Models up to this size are tried with numbers."""

_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is known of a loss."""

    kind: str
    """``sum``, ``mixes`` or ``unknown``."""

    output: str = ""
    """The output concerned: ``sum``, ``weight``, a metric."""

    primitive: str = ""
    """What mixes samples, or is not known."""

    where: str = ""
    """The user's source line."""

    how: str = ""
    """What it does to samples."""


def check(
    loss: Callable[..., Any],
    params: Any,
    batch: Mapping[str, Any],
    known: tuple[int, Equations] | None = None,
) -> Verdict:
    """Whether ``loss`` is a sum over samples.

    Traced with three samples, a size that no other dim hides, and with another number
    of them, because a mean over samples differs from a sum in a number only.

    Args:
      loss: the loss.
      params: shapes of the parameters.
      batch: shapes of the batch arrays.
      known: the loss's equations at some number of samples. They are the others unless
        that number is three, or one sample has equations of its own.
    """
    three = loss_equations(loss, params, batch, 3)
    few, other = known or (3, three)
    if few == 3 or len(other.eqns) != len(three.eqns):
        few, other = 2, loss_equations(loss, params, batch, 2)
    verdicts = [*follow(three, 3), *_constants(few, other, three)]
    order = {"mixes": 0, "unknown": 1, "sum": 2}
    worst = min(verdicts, key=lambda verdict: order[verdict.kind])
    if worst.kind == "unknown":
        size = sum(x.size for x in jax.tree.leaves(params))
        if size <= PROBE_MAX_PARAMS:
            kind = "sum" if probe(loss, params, batch) else "mixes"
            return dataclasses.replace(worst, kind=kind)
    return worst


def follow(equations: Equations, num_samples: int) -> list[Verdict]:
    """Follows the sample dim through the equations; a verdict for each output."""
    env: dict[Any, State] = dict.fromkeys(equations.params, Same())
    env |= dict.fromkeys(equations.consts, Same())
    env |= dict.fromkeys(equations.batch, Along(0)) | {equations.keys: Along(0)}
    for eqn in equations.eqns:
        states = [dims.state_of(atom, env) for atom in eqn.invars]
        env.update(zip(eqn.outvars, dims.step(eqn, states, num_samples), strict=True))
    return [
        _judge(equations, name, atom, dims.state_of(atom, env))
        for name, atom in equations.outputs.items()
    ]


def _judge(equations: Equations, name: str, atom: Any, state: State) -> Verdict:
    if isinstance(state, Mixed | Unknown):
        mixed = isinstance(state, Mixed)
        return Verdict(
            kind="mixes" if mixed else "unknown",
            output=name,
            primitive=state.eqn.primitive.name,
            where=place_of(state.eqn, equations.eqns),
            how=state.how if mixed else "is not known to keep samples apart",
        )
    by_sample = atom.aval.ndim == 1
    if isinstance(state, Along) or (isinstance(state, Summed) and not by_sample):
        return Verdict(kind="sum", output=name)
    if isinstance(state, Same):
        fixed = jaxprs.is_literal(atom) or not equations.sources[atom]
        if by_sample or fixed:  # the value of a fixed one: see _constants
            return Verdict(kind="sum", output=name)
    how = "is a sum over samples already, repeated for each"
    if isinstance(state, Same):
        how = "is the same however many samples there are"
    eqn = equations.eqns[equations.producer[atom]]
    return Verdict(
        kind="mixes",
        output=name,
        primitive=eqn.primitive.name,
        where=place_of(eqn, equations.eqns),
        how=how,
    )


def _constants(few: int, other: Equations, three: Equations) -> list[Verdict]:
    """Finds numbers that depend on how many samples there are, as a mean's divisor;
    ``other`` is of a few."""
    found = []
    for name in three.outputs:
        of_few = _fixed_value(other, other.outputs[name])
        of_three = _fixed_value(three, three.outputs[name])
        if of_few is None or of_three is None:
            continue
        if 3 * of_few != few * of_three:
            found.append(
                Verdict(
                    kind="mixes",
                    output=name,
                    primitive="constant",
                    where="the end of the loss",
                    how=f"is {of_few:g} for {few} and {of_three:g} for 3 samples",
                )
            )
    if len(other.eqns) != len(three.eqns):
        return found
    for a, b in zip(other.eqns, three.eqns, strict=True):
        pairs = zip(a.invars, b.invars, strict=True)
        if a.primitive is b.primitive and any(_differ(x, y) for x, y in pairs):
            found.append(
                Verdict(
                    kind="mixes",
                    output="sum",
                    primitive=b.primitive.name,
                    where=place_of(b, three.eqns),
                    how="contains the number of samples in the microbatch",
                )
            )
    return found


def _fixed_value(equations: Equations, atom: Any) -> float | None:
    """The value of a scalar output that depends on nothing."""
    if atom.aval.ndim:
        return None
    if jaxprs.is_literal(atom):
        return float(atom.val)
    if equations.sources[atom]:
        return None
    prelude = pieces.batch_prelude(equations, [atom])
    return float(prelude(*[equations.consts[v] for v in prelude.invars])[0])


def _differ(a: Any, b: Any) -> bool:
    """Whether two literals are different floats; integers count places, not samples."""
    if not (jaxprs.is_literal(a) and jaxprs.is_literal(b)):
        return False
    return jaxprs.is_float(b.aval) and not np.array_equal(a.val, b.val, equal_nan=True)


def probe(loss: Callable[..., Any], params: Any, batch: Mapping[str, Any]) -> bool:
    """Whether numbers agree: three samples together, and each alone.

    Args:
        loss: the loss.
        params: shapes of the parameters; values are drawn here.
        batch: shapes of the batch arrays.
    """
    key = jax.random.key(0)
    leaves, structure = jax.tree.flatten(params)
    drawn = [
        0.1 * jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
        if jaxprs.is_float(x)
        else jnp.ones(x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    tree = structure.unflatten(drawn)
    rng = np.random.default_rng(0)
    arrays = {k: _draw(rng, (3, *x.shape[1:]), x.dtype) for k, x in batch.items()}
    keys = jax.random.split(key, 3)

    def sums(arrays: Any, keys: Any) -> list[Any]:
        named = named_outputs(loss(tree, arrays, keys), len(keys))
        return [jnp.sum(x) for x in named.values()]

    run = jax.jit(sums)
    together = np.asarray(run(arrays, keys))
    alone = sum(
        np.asarray(run({k: x[i : i + 1] for k, x in arrays.items()}, keys[i : i + 1]))
        for i in range(3)
    )
    return np.allclose(together, alone, rtol=_TOLERANCE, atol=_TOLERANCE)


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(rng.standard_normal(shape), dtype)
    return jnp.asarray(rng.integers(0, 2, shape), dtype)
