"""Programs: one trace for each that is asked for, one compilation for all alike."""

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hexijax.runtime.programs import Programs, struct


def test_alike_programs_are_traced_once_each_and_compiled_once():
    here = SingleDeviceSharding(jax.devices()[0])
    programs, args = Programs(), (struct((4,), "float32", here),)
    traced: list[str] = []

    def add(name: str, number: float):
        def f(x: jax.Array) -> jax.Array:
            traced.append(name)
            return x + number

        return programs.get(f, args, out_shardings=here)

    one, again, two = add("one", 1.0), add("again", 1.0), add("two", 2.0)
    assert traced == ["one", "again", "two"]
    assert one is again
    assert two(jnp.zeros(4)).tolist() == [2.0] * 4
