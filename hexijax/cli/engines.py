"""An engine for a plan: the devices that stand for the cluster's, compiled on."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hexijax.cli.screen import Screen
from hexijax.cli.session import Session
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.report.summary import peak_flops_per_s

if TYPE_CHECKING:
    import jax

    from hexijax.runtime.engine import Engine
    from hexijax.runtime.plain import PlainEngine


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """An engine, and what its speed is measured against."""

    engine: "Engine | PlainEngine"
    """Compiled; ``init`` has not been called."""

    devices: Mapping[str, str]
    """What JAX calls the device behind each name of the plan."""

    peak_flops_per_s: float | None
    """Peaks of these devices together; None: unknown."""

    flops_per_step: float
    """Of the model, without recomputation."""


def make_machine(
    session: Session,
    chain: Chain,
    plan: Plan | None,
    screen: Screen,
    *,
    emulate: bool = False,
) -> Machine:
    """Compiles a plan, telling the screen; None: the plain program on one device."""
    from hexijax.runtime.devices import assign
    from hexijax.runtime.engine import Engine
    from hexijax.runtime.plain import PlainEngine

    experiment, cluster = session.experiment, session.cluster
    devices = assign(cluster, emulate=emulate)
    if plan is None:
        name, device = next(iter(devices.items()))
        used, engine = [name], PlainEngine(experiment, device=device)
        peaks = cluster.device(name).profile.dense_flops_per_s
        peak = peaks.get(experiment.dtype)
    else:
        used = sorted({name for _, stage in plan.stages() for name in stage.devices})
        peak = peak_flops_per_s(plan, cluster)
        engine = Engine(
            experiment, plan, chain, cluster, devices, progress=screen.compiling
        )
    flops = sum(layer.forward_flops + layer.backward_flops for layer in chain.layers)
    return Machine(
        engine=engine,
        devices={name: _describe(devices[name]) for name in used},
        peak_flops_per_s=None if emulate else peak,
        flops_per_step=flops * experiment.batch_size,
    )


def check_gpu() -> None:
    """Raises a ``UserError`` where a GPU is present that JAX cannot see."""
    from hexijax.cli.doctor import missing_gpu_message

    if message := missing_gpu_message():
        raise UserError(message)


def _describe(device: "jax.Device") -> str:
    return f"{device.platform}:{device.id} {device.device_kind}"
