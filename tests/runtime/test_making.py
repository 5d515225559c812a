"""First parameters made one after another: the numbers of all at once, less memory."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexijax.layers.names import flatten
from hexijax.runtime.making import Made
from tests.cli import tiny


def stacked(key: jax.Array) -> Any:
    """Layers of one equation, and a parameter that is another, too."""
    keys = jax.random.split(key, 3)
    _, rows = jax.lax.scan(lambda c, k: (c, jax.random.normal(k, (4, 4))), 0, keys)
    tied = jax.random.normal(keys[0], (5,))
    return {"blocks": rows, "a": tied, "b": tied, "one": jnp.ones(2), "two": 2 * tied}


MAKERS = {"a model": tiny.experiment().loss.init, "one equation": stacked}


@pytest.mark.parametrize("name", MAKERS)
def test_the_numbers_are_those_of_all_at_once(name: str):
    make, key, device = MAKERS[name], jax.random.key(3), jax.devices()[0]
    whole = flatten(make(key))
    made = Made(make, key, device, dict.fromkeys(whole, 2))
    for name in [*reversed(whole), *whole]:  # in any order, as often as was said
        np.testing.assert_array_equal(made[name], whole[name], err_msg=name)


def test_what_was_read_is_let_go():
    size = 1000

    def make(key: jax.Array) -> Mapping[str, jax.Array]:
        keys = jax.random.split(key, 9)
        return {f"w{i}": jax.random.normal(k, (size,)) for i, k in enumerate(keys)}

    made = Made(
        make, jax.random.key(0), jax.devices()[0], {f"w{i}": 1 for i in range(8)}
    )
    most = 0
    for i in range(8):
        made[f"w{i}"]
        most = max(most, held(made))
    assert most < size  # keys alone; what nobody reads, w8, is not made


def held(made: Made) -> int:
    """Numbers that wait to be read."""
    return sum(np.size(x) for x in made._values.values() if not is_key(x))


def is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
