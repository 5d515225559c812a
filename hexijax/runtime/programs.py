"""Compiled programs by what they compute, and the arrays they are compiled for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ONE_COLLECTIVE: dict[str, bool | str] = {
    f"xla_gpu_{kind}_combine_threshold_bytes": str(2**31 - 1)
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
}
"""A bucket's leaves in one call: XLA's own 30 MB use half of a fast link."""


class Programs:
    """Compiled programs by what they compute: groups that are alike share one."""

    def __init__(self) -> None:
        self._made: dict[Any, Callable[..., Any]] = {}

    def get(self, f: Callable[..., Any], args: Any, **jit: Any) -> Callable[..., Any]:
        """``jit(f)`` for arguments like ``args`` (structs with shardings)."""
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        out = jit.get("out_shardings")
        out_key = tuple(jax.tree.leaves(out)), jax.tree.structure(out)
        donated = jit.get("donate_argnums", ())
        closed = jax.make_jaxpr(f)(*args)
        consts = tuple(np.asarray(c).tobytes() for c in closed.consts)
        key = (str(closed), consts, shapes, tree, out_key, donated)
        if key not in self._made:
            device, *_ = leaves[0].sharding.device_set
            options = _ONE_COLLECTIVE if device.platform == "gpu" else None
            lowered = jax.jit(f, **jit).lower(*args)
            self._made[key] = lowered.compile(compiler_options=options)
        return self._made[key]


def struct(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """An array to come."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
