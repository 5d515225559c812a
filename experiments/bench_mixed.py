"""A CUDA card and the CPU train one model in one process; gradients beside one's.

Run:     python -m experiments.bench_mixed
Needs:   one card (without one, two CPU devices show that it works)
Expect:  worst_error_over_limit below 1: every leaf's gradient within 1e-5 of its norm
         plus 1e-7 of the global norm, fp32 with the highest matmul precision
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.layers.loss import nnx_loss
from hexijax.layers.names import flatten
from hexijax.layers.trace import trace_model
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.runtime.engine import Engine
from hexijax.runtime.intake import abstract_params
from hexijax.runtime.plain import PlainEngine
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss

CLUSTER = """
format = 1
name = "card-and-cpu"
[kinds.host-cpu]
vendor = "cpu"
memory_gib = 16
peak_tflops = { float32 = 0.5 }
memory_gb_per_s = 50
host_link_gb_per_s = 50
source = "declared"
[[nodes]]
name = "card"
devices = [{ kind = "h100-80g-sxm", count = 1 }]
host_memory_gib = 64
host_cores = 8
[[nodes]]
name = "host"
devices = [{ kind = "host-cpu", count = 1 }]
host_memory_gib = 64
host_cores = 8
[links]
between_nodes = { latency_us = 50, bandwidth_gb_per_s = 8 }
"""


def remembering(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner``, with the gradient it was given kept in its state."""

    def init(params: Any) -> Any:
        return {
            "inner": inner.init(params),
            "grads": jax.tree.map(jnp.zeros_like, params),
        }

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        changes, new = inner.update(updates, state["inner"], params)
        return changes, {"inner": new, "grads": updates}

    return optax.GradientTransformation(init, update)


def gradient_error() -> dict[str, float]:
    """Largest error over its limit among all leaves, and both losses."""
    jax.config.update("jax_default_matmul_precision", "highest")
    config = LlamaConfig(
        vocab_size=512, width=256, depth=6, num_heads=4, num_kv_heads=4, ff_width=512
    )

    def score(model: Any, batch: Any) -> Any:
        return next_token_loss(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    experiment = Experiment(
        loss=nnx_loss(lambda rngs: Llama(config, rngs=rngs), score),
        optimizer=remembering(optax.adamw(1e-3)),
        batch_size=16,
    )
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 512, (16, 129)).astype(np.int32)}
    traced = trace_model(
        experiment.loss, abstract_params(experiment), batch, microbatch_size=4
    )
    layers = len(traced.chain.layers)
    plan = Plan(
        replicas=(
            Replica(
                stages=(
                    Stage(devices=("card/0",), layers=(0, layers - 3)),
                    Stage(devices=("host/0",), layers=(layers - 3, layers)),
                ),
                microbatches=4,
                microbatch_size=4,
                samples=16,
            ),
        ),
        batch_size=16,
        chain=traced.chain.fingerprint(),
    )
    cpu = jax.devices("cpu")[-1]
    devices = {"card/0": jax.devices()[0], "host/0": cpu}
    engine = Engine(experiment, plan, traced.chain, Cluster.from_toml(CLUSTER), devices)
    engine.init()
    plain = PlainEngine(experiment, device=cpu)
    plain.set_params(engine.params())
    got = engine.step(batch, 0).fetch()
    want = plain.step(batch, 0).fetch()
    reference = flatten(plain.moments()["grads"])
    grads = engine.moments_like("grads")
    norm = float(
        np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in reference.values()))
    )
    worst = max(
        float(np.linalg.norm(grads[k] - g) / (1e-5 * np.linalg.norm(g) + 1e-7 * norm))
        for k, g in reference.items()
    )
    return {
        "worst_error_over_limit": worst,
        "loss": got["loss"],
        "plain_loss": want["loss"],
        "layers_on_cpu": 3,
    }


if __name__ == "__main__":
    print(json.dumps(gradient_error()))
