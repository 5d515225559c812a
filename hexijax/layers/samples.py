"""Is the loss a sum over samples? Only then may a batch be cut into microbatches.

    flat program -> the sample dim followed from batch to outputs -> yes, no (where), ?

Where a primitive is unknown and the model is small, numbers decide: the loss of three
samples against those of each alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import hexijax
from hexijax.layers import dims, jaxprs
from hexijax.layers.dims import Along, Mixed, Same, State, Summed, Unknown
from hexijax.layers.equations import Equations
from hexijax.layers.intake import named_outputs

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


def follow(equations: Equations, num_samples: int) -> Verdict:
    """Follows the sample dim through the equations."""
    env: dict[Any, State] = dict.fromkeys(equations.params, Same())
    env |= dict.fromkeys(equations.consts, Same())
    env |= dict.fromkeys(equations.batch, Along(0)) | {equations.keys: Along(0)}
    for eqn in equations.eqns:
        states = [dims.state_of(atom, env) for atom in eqn.invars]
        env.update(zip(eqn.outvars, dims.step(eqn, states, num_samples), strict=True))
    verdicts = [
        _judge(name, atom, dims.state_of(atom, env))
        for name, atom in equations.outputs.items()
    ]
    order = {"mixes": 0, "unknown": 1, "sum": 2}
    return min(verdicts, key=lambda v: order[v.kind])


def _judge(name: str, atom: Any, state: State) -> Verdict:
    if isinstance(state, Mixed):
        return Verdict(
            kind="mixes",
            output=name,
            primitive=state.eqn.primitive.name,
            where=source_line(state.eqn),
            how=state.how,
        )
    if isinstance(state, Unknown):
        return Verdict(
            kind="unknown",
            output=name,
            primitive=state.eqn.primitive.name,
            where=source_line(state.eqn),
            how="is not known to keep samples apart",
        )
    scalar = atom.aval.ndim == 0
    by_sample = isinstance(state, Along) or (isinstance(state, Same) and not scalar)
    if by_sample or isinstance(state, Summed):
        return Verdict(kind="sum", output=name)
    # A constant has no equation, and no sample owns it; zero is harmless.
    if isinstance(state, Same) and state.is_zero:
        return Verdict(kind="sum", output=name)
    return Verdict(
        kind="mixes",
        output=name,
        primitive="constant",
        where="the loss's return value",
        how="is the same however many samples there are",
    )


def source_line(eqn: Any) -> str:
    """The user's line an equation comes from: ``model.py:12 (function)``."""
    traceback = eqn.source_info.traceback
    frames = list(traceback.frames) if traceback is not None else []
    files = [f for f in frames if not f.file_name.startswith(("<", *_LIBRARIES))]
    for frame in files:
        return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "an unknown line"


_LIBRARIES = tuple(
    str(Path(module.__file__).parent)
    for module in (jax, flax, optax, hexijax)
    if module.__file__ is not None
)


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
    return bool(np.allclose(together, alone, rtol=_TOLERANCE, atol=_TOLERANCE))


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(rng.standard_normal(shape), dtype)
    return jnp.asarray(rng.integers(0, 2, shape), dtype)
