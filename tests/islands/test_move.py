"""What several places of an island want crosses once, whatever stands for it there."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hexijax.runtime.carrying import Coming, Spot, at_spot
from hexijax.runtime.move import move
from tests.islands.cases import cluster
from tests.islands.nearby import all_at_once, carriers


def at(device: jax.Device) -> NamedSharding:
    return NamedSharding(
        Mesh(np.array([device], dtype=object), ("x",)), PartitionSpec()
    )


def test_what_comes_is_made_once_whoever_asks():
    made: list[Any] = []

    def make() -> Any:
        time.sleep(0.05)
        made.append(jnp.zeros(3))
        return made[-1]

    coming = Coming(make)
    found = all_at_once([coming.value] * 4)
    assert len(made) == 1
    assert all(x is made[0] for x in found)


@pytest.mark.parametrize(("same", "crossed"), [((0, 0, 1), 2), ((), 3)])
def test_arrays_cross_once_for_each_number(same: tuple[int, ...], crossed: int):
    made, devices = cluster(2), jax.devices()
    names = [device.name for device in made.devices]
    joined = carriers(made, dict(zip(names, devices, strict=True)))
    x, y = (jax.device_put(jnp.arange(6.0) + n, at(devices[0])) for n in (0, 1))
    targets = [at(device) for device in devices[-3:]]

    def elsewhere() -> Any:  # a new one each time: not the same object, as x is
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at(devices[0]))

    def part(name: str) -> list[Any]:
        given = [x, x, y] if name == "n0" else [elsewhere() for _ in targets]
        with at_spot(Spot(("a test",), "a test")):
            came = move(given, targets, joined[name], same=same)
        return joined[name].settle(came)

    _, got = all_at_once([lambda name=name: part(name) for name in joined])
    for array, want, target in zip(got, (x, x, y), targets, strict=True):
        assert array.sharding == target
        np.testing.assert_array_equal(array, want)
    channel: Any = joined["n0"].channel
    assert channel.offered_bytes == crossed * x.nbytes
