"""Compiled programs by what they compute, and the arrays they are compiled for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.collector import collector_paused
from hexijax.runtime.carrying import ONE_PROCESS, Carrier

_ONE_COLLECTIVE: dict[str, bool | str] = {
    f"xla_gpu_{kind}_combine_threshold_bytes": str(2**31 - 1)
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
}
"""A bucket's leaves in one call: XLA's own 30 MB use half of a fast link."""


class Programs:
    """Compiled programs by what they compute: groups that are alike share one."""

    def __init__(self, carrier: Carrier = ONE_PROCESS) -> None:
        """``carrier`` knows which devices are here."""
        self._made: dict[Any, Callable[..., Any]] = {}
        self._carrier = carrier

    def get(self, f: Callable[..., Any], args: Any, **jit: Any) -> Callable[..., Any]:
        """``jit(f)`` for arguments like ``args`` (structs with shardings).

        Of devices that are elsewhere: what it would return, as structs, whatever it is
        given.
        """
        leaves, tree = jax.tree.flatten(args)
        device, *_ = leaves[0].sharding.device_set
        if not self._carrier.here(device):
            out = _structs(jax.eval_shape(f, *args), jit["out_shardings"])
            return lambda *given: out
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        out = jit.get("out_shardings")
        out_key = tuple(jax.tree.leaves(out)), jax.tree.structure(out)
        donated = jit.get("donate_argnums", ())
        with collector_paused():
            traced = jax.jit(f, **jit).trace(*args)
            consts = tuple(np.asarray(c).tobytes() for c in traced.jaxpr.consts)
            key = (str(traced.jaxpr), consts, shapes, tree, out_key, donated)
            if key not in self._made:
                options = _ONE_COLLECTIVE if device.platform == "gpu" else None
                self._made[key] = traced.lower().compile(compiler_options=options)
        return self._made[key]


def _structs(out: Any, shardings: Any) -> Any:
    """Results with their shardings, which may be those of whole branches."""

    def each(sharding: Any, branch: Any) -> Any:
        return jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding), branch)

    return jax.tree.map(each, shardings, out)


def struct(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """An array to come."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
