"""A loss that is one of a microbatch: the plain program over the same microbatches."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hexijax.experiment import Experiment
from hexijax.job.intake import trace_chain
from hexijax.layers.loss import ModelError, nnx_loss
from hexijax.layers.names import flatten
from hexijax.plan.plan import Plan, PlanError, Replica, Stage
from hexijax.runtime.batches import sample_keys, sample_map
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from tests.laws.cases import OPTIMIZER, cluster

WIDTH, BATCH_SIZE, SEED = 8, 12, 5


class Block(nnx.Module):
    """A residual block that looks at the whole batch, and drops some of it."""

    def __init__(self, rngs: nnx.Rngs):
        # The norm would take a bias away: its gradient would be rounding errors alone.
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        # Of two samples the variance may be tiny, and all rounding large beside it.
        self.norm = nnx.BatchNorm(WIDTH, epsilon=0.1, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


class Net(nnx.Module):
    """Three of them."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def score(model: Net, batch: Mapping[str, Any]) -> Any:
    logits = model(batch["x"])
    taken = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)
    weights = batch["weights"]
    right = (logits.argmax(-1) == batch["y"]).astype(jnp.float32)
    metrics = {"accuracy": (right.sum(), jnp.float32(len(right)))}
    return -(taken[:, 0] * weights).sum(), weights.sum(), metrics


class Rows:
    """The data of a run."""

    def batches(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        return iter([batch(batch_size)])


def batch(size: int = BATCH_SIZE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(size, WIDTH)).astype(np.float32),
        "y": rng.integers(0, 3, size).astype(np.int32),
        "weights": rng.random(size).astype(np.float32) + 0.5,
    }


def experiment(*, per_microbatch: bool = True) -> Experiment:
    return Experiment(
        loss=nnx_loss(lambda rngs: Net(rngs), score),
        optimizer=OPTIMIZER,
        batch_size=BATCH_SIZE,
        seed=SEED,
        data=Rows(),
        per_microbatch=per_microbatch,
    )


PLAN = Plan(
    replicas=(
        Replica(
            stages=(
                Stage(devices=("fast/0", "fast/1"), layers=(0, 2), lanes=2),
                Stage(devices=("slow/0", "slow/1"), layers=(2, 4), lanes=2),
            ),
            microbatches=2,
            microbatch_size=4,
            samples=8,
        ),
        Replica(
            stages=(Stage(devices=("fast/2",), layers=(0, 4)),),
            microbatches=1,
            microbatch_size=4,
            samples=4,
        ),
    ),
    batch_size=BATCH_SIZE,
)


def engine(plan: Plan) -> Engine:
    job = experiment()
    made = Engine(job, plan, trace_chain(job), cluster(), assign(cluster()))
    made.init()
    return made


def test_gradients_are_those_of_the_plain_program_over_the_same_microbatches():
    running, rows = engine(PLAN), batch()
    params, keys = running.params(), sample_keys(SEED, 0, BATCH_SIZE)
    loss = experiment().loss.variant(per_microbatch=True)
    parts = [
        part
        for (r, _), taken in sample_map(PLAN).items()
        for part in np.split(taken.index, PLAN.replicas[r].stages[0].lanes)
    ]
    assert [len(part) for part in parts] == [2, 2, 2, 2, 4]

    def plain(params: Any) -> Any:
        sums = [
            loss(
                params,
                {k: v[part] for k, v in rows.items()},
                jax.random.wrap_key_data(keys[part]),
            )
            for part in parts
        ]
        total, weight = (sum(x[i] for x in sums) for i in (0, 1))
        hits = sum(x[2]["accuracy"][0] for x in sums)
        return total / weight, hits / BATCH_SIZE

    (want, accuracy), grads = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    result = running.step(rows, 0).fetch()
    assert result["loss"] == pytest.approx(float(want), rel=1e-5)
    assert result["accuracy"] == pytest.approx(float(accuracy))
    norm = result["grad_norm"]
    for name, grad in flatten(grads).items():
        error = np.linalg.norm(running.moments_like("grads")[name] - grad)
        assert error <= 1e-5 * np.linalg.norm(grad) + 1e-7 * norm, name


def test_without_leave_it_is_refused_by_the_statistic_s_name():
    with pytest.raises(ModelError, match="Variable 'blocks/0/norm/mean', 'blocks/0/n"):
        trace_chain(experiment(per_microbatch=False))


def test_plans_that_would_show_stages_unlike_microbatches_are_refused():
    first, second = PLAN.replicas
    padded = dataclasses.replace(second, microbatch_size=5)
    with pytest.raises(PlanError, match="takes 4 samples in 1 microbatches of 5, whic"):
        engine(dataclasses.replace(PLAN, replicas=(first, padded)))
    wide = dataclasses.replace(first.stages[1], lanes=1, tensor=2)
    unlike = dataclasses.replace(first, stages=(first.stages[0], wide))
    with pytest.raises(
        PlanError, match="replica 0 have 2, 1 lanes, and with per_micro"
    ):
        engine(dataclasses.replace(PLAN, replicas=(unlike, second)))
