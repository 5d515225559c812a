"""Plans of the islands' benchmark, run by one process or by islands."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.bench_llama import measure
from experiments.islanded import settings
from experiments.islanded.here import Here
from hexijax.islands.transfer import TransferChannel
from hexijax.job.intake import trace_chain
from hexijax.job.machine import make_machine
from hexijax.layers.names import flatten
from hexijax.program.program import Site
from hexijax.runtime.layer_timing import layer_rows
from hexijax.runtime.plain import PlainEngine
from hexijax.runtime.update_timing import update

FIRST = "one/0"
"""The device whose layers are timed."""


def pipeline(
    here: Here, *, small: bool, slow: bool = False, bytes_per_s: float | None = None
) -> dict[str, Any]:
    """Seconds a step of the two-stage pipeline."""
    setting = settings.small() if small else settings.large()
    chain = trace_chain(setting.experiment)
    plan = settings.pipeline(setting, chain, slow=slow)
    began = time.perf_counter()
    channel = here.channel(bytes_per_s=bytes_per_s)
    made = make_machine(
        setting.experiment,
        here.cluster,
        chain,
        plan,
        world=here.world,
        channel=channel,
    )
    compile_s = time.perf_counter() - began
    if here.world is not None:
        here.all("compiled")
    made.engine.init()
    batches = setting.experiment.data.batches(plan.batch_size)

    def step(i: int) -> Callable[[], Any]:
        return made.engine.step(next(batches), i).fetch

    steps = setting.steps if bytes_per_s is None else max(2, setting.steps // 2)
    found: dict[str, Any] = measure(step, steps)
    tokens = plan.batch_size * setting.experiment.tokens_per_sample
    found |= {"compile_s": compile_s, "tokens_per_s": tokens / found["step_s"]}
    return found | _traffic(channel)


def _traffic(channel: TransferChannel | None) -> dict[str, Any]:
    if channel is None:
        return {}
    came = channel.traffic.values()
    return {
        "came_bytes": sum(each.num_bytes for each in came),
        "messages": sum(each.messages for each in came),
        "waited_s": sum(each.waited_s for each in came),
    }


def profile(here: Here, *, small: bool) -> dict[str, Any]:
    """Times of the layers on the first device, under the pipeline's microbatch."""
    setting = settings.small() if small else settings.large()
    chain = trace_chain(setting.experiment)
    like = settings.pipeline(setting, chain).replicas[0]
    policies = dict.fromkeys(policy for stage in like.stages for policy in stage.remat)
    given = (setting.experiment, chain)
    devices, dtype = {FIRST: jax.devices()[0]}, setting.experiment.dtype
    rows: list[dict[str, Any]] = []
    for remat in policies:
        rows += layer_rows(
            *(*given, here.cluster, devices, [FIRST]),
            dtype=dtype,
            samples=setting.microbatch,
            remat=remat,
        )
    found = update(*given, devices, FIRST, dtype=dtype, site=Site.DEVICE)
    rows.append({"update_params": found.params, "update_s": found.seconds})
    return {"rows": rows}


def mixed(here: Here) -> dict[str, Any]:
    """Losses of some steps and gradients of the first, beside the plain program's.

    The first island runs the plain program too, on its own device.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    experiment = settings.mixed()
    chain = trace_chain(experiment)
    plan = settings.mixed_plan(chain)
    assert here.world is not None
    made = make_machine(
        experiment,
        here.cluster,
        chain,
        plan,
        world=here.world,
        channel=here.channel(),
    )
    engine: Any = made.engine
    here.all("compiled")
    engine.init()
    start = engine.params()
    batch = next(experiment.data.batches(experiment.batch_size))
    losses = [engine.step(batch, 0).fetch()["loss"]]
    grads = engine.moments_like("grads")
    losses += [
        engine.step(batch, i).fetch()["loss"] for i in range(1, settings.MIXED_STEPS)
    ]
    found = {"losses": losses, "device": jax.devices()[0].device_kind}
    if here.world.name != here.world.islands[0]:
        return found | {"layers": settings.MIXED_ON_CPU}
    plain = PlainEngine(experiment, device=jax.devices()[0])
    plain.set_params(start)
    want = [plain.step(batch, 0).fetch()["loss"]]
    wanted = flatten(plain.moments()["grads"])
    want += [
        plain.step(batch, i).fetch()["loss"] for i in range(1, settings.MIXED_STEPS)
    ]
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in wanted.values()))
    worst = max(
        float(np.linalg.norm(grads[k] - g) / (1e-5 * np.linalg.norm(g) + 1e-7 * norm))
        for k, g in wanted.items()
    )
    loss = max(abs(a / b - 1) for a, b in zip(losses, want, strict=True))
    return found | {
        "plain_losses": want,
        "worst_error_over_limit": worst,
        "worst_loss_error": loss,
    }
