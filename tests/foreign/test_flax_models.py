"""Models such as Flax's own examples are cut, and trained as one device would."""

from typing import Any

import jax
import numpy as np
import pytest

from hexijax.experiment import Experiment
from hexijax.job.intake import trace_chain
from hexijax.layers import samples
from hexijax.layers.names import flatten
from hexijax.layers.trace import trace_model
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.runtime.batches import sample_keys, sample_map
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from tests.foreign.flax_models import EXAMPLES
from tests.laws.cases import OPTIMIZER, cluster

BATCH_SIZE, SEED = 12, 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_a_sum_over_samples_and_cut_where_it_should_be(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    example = EXAMPLES[name]()
    if not example.probed:
        monkeypatch.setattr(samples, "probe", None)
    traced = trace_model(
        example.loss,
        example.loss.abstract_params(),
        example.batch(2),
        microbatch_size=2,
        per_microbatch=example.per_microbatch,
    )
    assert traced.layering.names == example.layers


def plan(layers: int) -> Plan:
    """Two lanes first, then one device, in another place for each replica."""
    cut = max(1, layers // 2)
    first = (
        Stage(devices=("fast/0", "fast/1"), layers=(0, cut), lanes=2),
        Stage(devices=("slow/0", "slow/1"), layers=(cut, layers), lanes=2),
    )
    whole = Stage(devices=("fast/2", "fast/3"), layers=(0, layers), tensor=2)
    return Plan(
        replicas=(
            Replica(
                stages=first[: min(2, layers)]
                if layers > 1
                else (Stage(devices=("fast/0", "fast/1"), layers=(0, 1), lanes=2),),
                microbatches=2,
                microbatch_size=4,
                samples=8,
            ),
            Replica(stages=(whole,), microbatches=1, microbatch_size=4, samples=4),
        ),
        batch_size=BATCH_SIZE,
    )


def named_metrics(returned: tuple[Any, ...]) -> dict[str, tuple[Any, Any]]:
    """A loss's metrics as pairs of sums and weights."""
    _, weight, *rest = returned
    metrics = rest[0] if rest else {}
    return {k: v if isinstance(v, tuple) else (v, weight) for k, v in metrics.items()}


@pytest.mark.laws
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_plan_gives_the_plain_program_s_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    example = EXAMPLES[name]()
    batch = example.batch(BATCH_SIZE)

    class Rows:
        def batches(self, batch_size: int) -> Any:
            return iter([example.batch(batch_size)])

    job = Experiment(
        loss=example.loss,
        optimizer=OPTIMIZER,
        batch_size=BATCH_SIZE,
        seed=SEED,
        data=Rows(),
        per_microbatch=example.per_microbatch,
    )
    chain = trace_chain(job)
    made = plan(len(chain.layers))
    engine = Engine(job, made, chain, cluster(), assign(cluster()))
    engine.init()
    params, keys = engine.params(), sample_keys(SEED, 0, BATCH_SIZE)
    parts = [np.arange(BATCH_SIZE)]
    if example.per_microbatch:
        parts = [
            part
            for (r, _), rows in sample_map(made).items()
            for part in np.split(rows.index, made.replicas[r].stages[0].lanes)
        ]
    loss = example.loss.variant(per_microbatch=example.per_microbatch)

    def plain(params: Any) -> Any:
        outputs = [
            loss(
                params,
                {k: v[part] for k, v in batch.items()},
                jax.random.wrap_key_data(keys[part]),
            )
            for part in parts
        ]
        total, weight = (sum(x[i].sum() for x in outputs) for i in (0, 1))
        pairs = [named_metrics(x) for x in outputs]
        means = {
            name: sum(p[name][0].sum() for p in pairs)
            / sum(p[name][1].sum() for p in pairs)
            for name in pairs[0]
        }
        return total / weight, means

    (want, means), grads = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    got = engine.step(batch, 0).fetch()
    assert got["loss"] == pytest.approx(float(want), rel=2e-5)
    for metric, mean in means.items():
        assert got[metric] == pytest.approx(float(mean), rel=2e-5), metric
    norm = got["grad_norm"]
    for leaf, grad in flatten(grads).items():
        error = np.linalg.norm(engine.moments_like("grads")[leaf] - grad)
        assert error <= 1e-5 * np.linalg.norm(grad) + 1e-7 * norm, leaf
