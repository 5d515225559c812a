"""A model that fits no card by even parts trains where there is room, exactly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hexijax import Trainer
from hexijax.cluster import Cluster
from hexijax.plan.plan import Schedule, stage_place
from hexijax.planner import InfeasiblePlanError
from tests.plan.examples import make_cluster, make_kind

WIDTH, LAYERS, SIZE = 512, 12, 24
LAYER_BYTES = 4 * WIDTH * WIDTH
OPTIMIZER = optax.sgd(0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("backend")


def loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    x = batch["x"]
    for layer in params["layers"].values():
        x = jnp.tanh(x @ layer["w"]) + x
    errors = jnp.mean((x - batch["y"]) ** 2, axis=-1)
    return errors, jnp.ones_like(errors)


def params() -> Any:
    rng = np.random.default_rng(0)
    shape = (WIDTH, WIDTH)
    return {
        "layers": {
            str(i): {"w": rng.normal(size=shape, scale=0.05).astype(np.float32)}
            for i in range(LAYERS)
        }
    }


def batch(number: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(SIZE, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def machines(fast_bytes: float, slow_bytes: float) -> Cluster:
    """A fast card and a slow one; bytes in those of a layer's parameters."""
    kinds = [
        make_kind("fast", tflops=0.01, memory_bytes=int(fast_bytes * LAYER_BYTES)),
        make_kind("slow", tflops=0.005, memory_bytes=int(slow_bytes * LAYER_BYTES)),
    ]
    return make_cluster([[("fast", 1), ("slow", 1)]], kinds, gb_per_s=10)


def trainer(cluster: Cluster, plan: str | None = None) -> Trainer:
    return Trainer(
        loss,
        params(),
        OPTIMIZER,
        cluster=cluster,
        plan=plan,
        emulate=True,
        offload=False,
    )


def losses(own: Trainer) -> list[float]:
    return [own.step(batch(number))["loss"] for number in range(3)]


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    return losses(trainer(machines(200, 200), "single"))


@pytest.mark.parametrize(
    ("fast", "freed"), [(18, True), pytest.param(24, False, marks=pytest.mark.laws)]
)
def test_a_small_card_computes_what_another_stores(
    fast: float, freed: bool, plain_losses: list[float]
):
    """By even parts a card holds at least parameters, gradients and half the state:
    12 layers and 12 and 12."""
    own = trainer(machines(fast, 90))
    assert losses(own) == pytest.approx(plain_losses, rel=1e-5)
    plan = own.plan
    assert plan is not None
    assert plan.schedule is Schedule.LAYERED
    (share,) = plan.state[1:]
    small, *large = plan.replicas
    assert small.stages[0].devices == ("n0/0",)
    # The large one computes a part of the batch, or stores and nothing else: what a
    # program takes beside its arrays depends on JAX.
    (home,) = share.shares
    assert home == (stage_place(1, 0) if large else "n0/1")
    assert small.samples > SIZE // 2
    assert bool(small.stages[0].params) is freed


def test_what_fits_nowhere_is_refused_with_numbers():
    with pytest.raises(InfeasiblePlanError) as refused:
        losses(trainer(machines(12, 18)))
    text, each = str(refused.value), LAYERS * LAYER_BYTES
    assert f"the layers hold {4 * each:,} bytes of parameters, gradients" in text
    assert f"sums of gradients and state stay, {3 * each:,} bytes" in text
    assert f"the devices have {30 * LAYER_BYTES:,} usable together" in text
