"""A resumed run is the unbroken one, bit for bit; what does not belong is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hexijax.checkpoint import latest, restore, save
from hexijax.errors import UserError
from hexijax.weights.runs import Stored


@dataclasses.dataclass
class Momentum:
    """An engine on two devices: w split over both, its momentum on one, a counter."""

    width: int = 4

    def __post_init__(self) -> None:
        devices = jax.devices()
        mesh = jax.sharding.Mesh(np.array(devices[:2]), ("model",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
        one = jax.sharding.SingleDeviceSharding(devices[1])
        self.state = {
            "blocks/0/w|master|0:4": jax.device_put(jnp.zeros(self.width), split),
            "blocks/0/w|trace|0:4": jax.device_put(jnp.zeros(self.width), one),
            "blocks/0/w|count|": jax.device_put(jnp.int32(0), one),
            "blocks/0/none|master|0:0": jax.device_put(jnp.zeros((0, 3)), one),
        }

    def step(self, x: float) -> float:
        w, m, n, none = (jax.device_get(v) for v in self.state.values())
        m = 0.9 * m + (w - x)
        new = (w - np.float32(0.1) * m, m, n + 1, none)
        for (key, old), value in zip(list(self.state.items()), new, strict=True):
            self.state[key] = jax.device_put(value.astype(old.dtype), old.sharding)
        return float(np.sum((w - x) ** 2))

    def arrays(self) -> dict[str, jax.Array]:
        return dict(self.state)

    def array_targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for key, x in self.state.items()
        }

    def stored_params(self) -> list[Stored]:
        return []

    def load_arrays(self, arrays: dict[str, jax.Array]) -> None:
        assert {k: v.sharding for k, v in arrays.items()} == {
            k: v.sharding for k, v in self.state.items()
        }
        self.state = {key: arrays[key] for key in self.state}


FACTS = {"plan": "abc", "seed": 0}


def write(folder: Path, engine: Momentum, step: int, keep: int = 2) -> None:
    save(folder, engine, step=step, data_state={"at": step}, facts=FACTS, keep=keep)


def test_a_resumed_run_repeats_the_unbroken_one(tmp_path: Path):
    unbroken = Momentum()
    for x in range(3):
        unbroken.step(x)
    write(tmp_path, unbroken, 3)
    resumed = Momentum()
    saved = restore(tmp_path, resumed, facts=FACTS)
    assert (saved.step, saved.data_state) == (3, {"at": 3})
    assert [unbroken.step(x) for x in (5, 6)] == [resumed.step(x) for x in (5, 6)]


def test_the_newest_steps_are_kept_and_a_half_written_one_does_not_exist(
    tmp_path: Path,
):
    assert latest(tmp_path) is latest(tmp_path / "none") is None
    for step in (1, 2, 10):
        write(tmp_path, Momentum(), step)
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    assert latest(tmp_path) == 10
    assert not (tmp_path / "1").exists()
    assert restore(tmp_path, Momentum(), facts=FACTS, step=2).step == 2


def test_what_does_not_belong_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="There is no checkpoint in"):
        restore(tmp_path, Momentum(), facts=FACTS)
    write(tmp_path, Momentum(), 1)
    with pytest.raises(UserError, match="There is no step 2 in"):
        restore(tmp_path, Momentum(), facts=FACTS, step=2)
    with pytest.raises(UserError, match="its seed is 0, this run's is 1"):
        restore(tmp_path, Momentum(), facts={"seed": 1})
    other = Momentum(width=6)
    with pytest.raises(UserError) as error:
        restore(tmp_path, other, facts=FACTS)
    assert (
        "difference is at 'blocks/0/w|master|0:4': it has float32[4], this run has "
        "float32[6]."
    ) in str(error.value)
    del other.state["blocks/0/none|master|0:0"]
    with pytest.raises(UserError, match=r"it has float32\[0,3\], this run has none"):
        restore(tmp_path, other, facts=FACTS)


def test_another_format_is_refused(tmp_path: Path):
    write(tmp_path, Momentum(), 1)
    meta = tmp_path / "1" / "meta" / "metadata"
    meta.write_text(json.dumps({"version": 0}))
    with pytest.raises(UserError, match="has format version 0"):
        restore(tmp_path, Momentum(), facts=FACTS)
    meta.write_text("{")
    with pytest.raises(UserError, match="is no checkpoint of a hexijax run"):
        restore(tmp_path, Momentum(), facts=FACTS)
