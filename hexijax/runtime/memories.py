"""Which memory holds a buffer's arrays, and that it is the one the Program says.

Offload that is asked for and silently without effect is worse than none: XLA may place
what it likes where it was not told.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hexijax.costs.hosts import LIMIT_BYTES, LIMIT_VARIABLE
from hexijax.errors import UserError
from hexijax.program.program import Buffer, Memory
from hexijax.runtime.later import value as there
from hexijax.runtime.layout import PINNED_HOST

EXHAUSTED = "RESOURCE_EXHAUSTED"
"""What XLA's error says where no memory is left."""


def pin(arrays: Any, where: Any, what: object) -> Any:
    """Arrays to pinned host memory; those that lie there already are not copied.

    Args:
      arrays: a tree of them.
      where: a tree of shardings of that memory.
      what: whose they are, for people.

    Raises:
      UserError: no memory is left to pin.
    """
    try:
        return _put(arrays, where)
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        asked = sum(x.nbytes for x in jax.tree.leaves(arrays))
        raise UserError(
            f"{what}: {asked:,} bytes of pinned host memory were asked for, and the "
            f"backend has no more ({str(error).splitlines()[0]}). XLA pins at most "
            f"{LIMIT_BYTES >> 30} GiB unless {LIMIT_VARIABLE} said another number of "
            "GiB before JAX started: set it, or let less of the plan wait or rest in "
            "host memory. A run that was under way goes on from its last checkpoint "
            "with --resume."
        ) from error


_put = jax.device_put


def on_host(value: Any) -> set[bool]:
    """Of all arrays of a value, whether they lie in pinned host memory, or in that of
    the host's own processor."""
    cards = jax.default_backend() != "cpu"
    return {
        x.sharding.memory_kind == PINNED_HOST
        or (cards and all(d.platform == "cpu" for d in x.sharding.device_set))
        for x in jax.tree.leaves(there(value))
        if isinstance(x, jax.Array)
    }


def check_memory(buffer: Buffer, value: Any) -> None:
    """That arrays lie where their buffer's name says.

    Raises:
      UserError: some do not.
    """
    wanted = buffer.memory is Memory.HOST
    if on_host(value) <= {wanted}:
        return
    kinds = {str(x.sharding.memory_kind) for x in jax.tree.leaves(there(value))}
    raise UserError(
        f"{buffer} is to lie in {'pinned host' if wanted else 'device'} memory, and "
        f"its arrays lie in {', '.join(sorted(kinds))}. The backend does not place "
        "them where it is told; take host memory out of the plan (params, waits, "
        "residuals, state), or report it."
    )


def copied(arrays: Sequence[jax.Array], what: object) -> list[jax.Array | np.ndarray]:
    """Copies in host memory, each of an array on one device or in parts on the host's
    processor; what lies on a device is copied beside what is dispatched after, and only
    who overwrites it waits.

    Args:
      arrays: they, in any memory.
      what: whose they are, for people.
    """
    cards = jax.default_backend() != "cpu"

    def rests(x: jax.Array) -> bool:
        in_memory = x.sharding.memory_kind == PINNED_HOST
        by_host = cards and all(d.platform == "cpu" for d in x.sharding.device_set)
        return in_memory or by_host

    away = [x for x in arrays if not rests(x)]
    where = [x.sharding.with_memory_kind(PINNED_HOST) for x in away]
    left = iter(pin(away, where, what))
    return [np.array(x) if rests(x) else next(left) for x in arrays]
