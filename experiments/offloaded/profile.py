"""What the card and its host do alone: products, links, updates, layers.

    python -m experiments.offloaded.profile RESULT --layers llama-3:4,8 gpt-4B:8:full

The result is written after each part.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from experiments.common import adamw
from experiments.offloaded import cells
from hexijax.costs.compute import fused_attention
from hexijax.job.intake import trace_chain
from hexijax.layers.chain import Remat
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.runtime.engine import Engine
from hexijax.runtime.links import product_flops_per_s
from hexijax.runtime.profiling import (
    even_segments,
    instruction_times,
    layer_rows,
    update_row,
)

DEPTH = 3
"""Blocks of the model whose layers are timed."""


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median, after a first call."""
    jax.block_until_ready(call())
    found: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def links(device: jax.Device, num_bytes: int) -> dict[str, float]:
    """Bytes a second into the device and out of it, alone and both at once."""
    here = SingleDeviceSharding(device)
    host = here.with_memory_kind("pinned_host")
    on_device = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), here)
    on_host = jax.block_until_ready(jax.device_put(on_device, host))

    def both() -> Any:
        return jax.device_put(on_host, here), jax.device_put(on_device, host)

    return {
        "in": num_bytes / seconds(lambda: jax.device_put(on_host, here)),
        "out": num_bytes / seconds(lambda: jax.device_put(on_device, host)),
        "both": num_bytes / seconds(both),
    }


def pieces(device: jax.Device, count: int = 40) -> dict[str, float]:
    """Seconds that each of many small arrays adds to a copy of one: until the host has
    asked for it, and until it is there, into the device and out of it."""
    here = SingleDeviceSharding(device)
    host = here.with_memory_kind("pinned_host")
    found: dict[str, float] = {}
    for way, source, target in (("in", host, here), ("out", here, host)):
        arrays = [jax.device_put(np.ones(4096, np.float32), source)] * count

        def copied(number: int, arrays: Any = arrays, target: Any = target) -> Any:
            return jax.device_put(arrays[:number], [target] * number)

        asked: list[float] = []
        for number in (1, count) * 5:
            jax.block_until_ready(copied(number))
            began = time.perf_counter()
            made = copied(number)
            asked.append(time.perf_counter() - began)
            jax.block_until_ready(made)
        one, many = (statistics.median(asked[i::2]) for i in range(2))
        found[f"{way} asked"] = (many - one) / (count - 1)
        one, many = (seconds(lambda n=n, c=copied: c(n)) for n in (1, count))
        found[f"{way} there"] = (many - one) / (count - 1)
        found[f"{way} one"] = one
    return found


def host_update(device: jax.Device, params: int) -> dict[str, float]:
    """Parameters a second that the host's cores update as a run has them: gradients in
    pinned memory, state that is overwritten, a bf16 copy. What of it is the gradient's
    hand-over alone, by NumPy and by JAX; bytes a second of the copy's way back."""
    cpu = SingleDeviceSharding(jax.devices("cpu")[0])
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    optimizer = adamw(1e-4, 100)

    def update(state: Any, grad: Any) -> Any:
        changes, moments = optimizer.update(grad, state[1], state[0])
        master = optax.apply_updates(state[0], changes)
        return (master, moments), jnp.asarray(master, jnp.bfloat16)

    with jax.default_device(jax.devices("cpu")[0]):
        master = jnp.full(params, 0.01, jnp.float32)
        state = (master, optimizer.init(master))
        step = jax.jit(update, donate_argnums=0)
    grad = jax.device_put(np.full(params, 0.01, np.float32), pinned)
    times: list[float] = []
    handed: list[float] = []
    for _ in range(6):
        began = time.perf_counter()
        here = jax.block_until_ready(jax.device_put(np.asarray(grad), cpu))
        handed.append(time.perf_counter() - began)
        state, copy = jax.block_until_ready(step(state, here))
        times.append(time.perf_counter() - began)
    there = SingleDeviceSharding(device)
    from_numpy = np.asarray(copy)
    return {
        "update": params / statistics.median(times[1:]),
        "copied": params / seconds(lambda: jax.device_put(grad, cpu)),
        "handed": params / statistics.median(handed[1:]),
        "return": 2 * params / seconds(lambda: jax.device_put(copy, there)),
        "return by NumPy": 2
        * params
        / seconds(lambda: jax.device_put(from_numpy, there)),
    }


def layers(
    name: str, samples: int, remat: Remat, *, small: bool
) -> list[dict[str, Any]]:
    """Rows of a model's layers under a policy, and of the optimizer."""
    experiment = cells.model(name)
    chain = trace_chain(experiment)
    cluster = cells.cluster(130, small=small)
    segments = even_segments(chain, 1)
    fused = fused_attention(cluster.device(cells.DEVICE).profile, experiment.dtype)
    batch = next(experiment.data.batches(3 * samples))

    def timed(cut: tuple[int, ...]) -> Any:
        stage = Stage(
            devices=(cells.DEVICE,),
            layers=(0, len(chain.layers)),
            dtype=experiment.dtype,
            segments=cut,
            remat=(*(remat,) * (len(chain.layers) - 1), Remat.NONE),
        )
        replica = Replica(
            stages=(stage,),
            microbatches=3,
            microbatch_size=samples,
            samples=3 * samples,
        )
        plan = Plan(
            replicas=(replica,), batch_size=3 * samples, chain=chain.fingerprint()
        )
        devices = {cells.DEVICE: jax.devices()[0]}
        engine = Engine(experiment, plan, chain, cluster, devices)
        engine.init()
        engine.step(batch, 0).fetch()
        return instruction_times(engine, batch, 100)

    whole = timed((len(chain.layers),))
    gc.collect()
    rows = layer_rows(
        chain.layers_under(fused_attention=fused),
        segments,
        timed(segments),
        whole,
        dtype=experiment.dtype,
        samples=samples,
        remat=remat,
    )
    gc.collect()
    return [*rows, update_row(chain, whole)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--layers", nargs="*", default=[])
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "rows": [],
    }

    def keep() -> None:
        args.result.write_text(json.dumps(found, indent=1))

    device, scale = jax.devices()[0], 1 if args.small else 256
    rows = 256 if args.small else 8192
    found["product_flops_per_s"] = product_flops_per_s(device, "bfloat16", rows)
    found["links"] = links(device, scale * 2**21)
    found["pieces"] = pieces(device)
    host = host_update(device, scale * 2**17)
    found["update_params_per_s"] = host["update"]
    found["host"] = host
    keep()
    for words in args.layers:
        name, sizes, *policies = words.split(":")
        for remat in map(Remat, policies[0].split(",") if policies else ["none"]):
            for samples in map(int, sizes.split(",")):
                found["rows"] += layers(name, samples, remat, small=args.small)
                keep()


if __name__ == "__main__":
    main()
