"""An engine for a plan: the devices that stand for the cluster's, compiled on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.job.intake import training_facts
from hexijax.job.pinned import check_host
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.planner.mesh import compute_dtype
from hexijax.report.summary import peak_flops_per_s, product_flops_per_s

if TYPE_CHECKING:
    import jax

    from hexijax.runtime.engine import Engine
    from hexijax.runtime.plain import PlainEngine

Progress = Callable[[str, int, int], None]
"""What is being compiled, how many programs are done, and of how many."""


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
    experiment: Experiment,
    cluster: Cluster,
    chain: Chain,
    plan: Plan | None,
    *,
    emulate: bool = False,
    devices: "Mapping[str, jax.Device] | None" = None,
    progress: Progress | None = None,
) -> Machine:
    """Compiles a plan; None: the plain program on one device.

    Args:
        experiment: what is trained.
        cluster: whose devices the plan names.
        chain: the experiment's model.
        plan: who does what.
        emulate: let any device stand for any other.
        devices: which JAX device is which of the cluster's, where that is known.
        progress: told (what, done, total) while compiling.
    """
    from hexijax.runtime.devices import assign
    from hexijax.runtime.engine import Engine
    from hexijax.runtime.form import BatchForm
    from hexijax.runtime.plain import PlainEngine

    if plan is not None:
        check_host(plan, chain, cluster, training_facts(experiment), emulate=emulate)
    if devices is None:
        devices = assign(cluster, emulate=emulate)
    if plan is None:
        name, device = next(iter(devices.items()))
        form = BatchForm(size=experiment.batch_size, arrays=chain.batch)
        dtype = compute_dtype(experiment.dtype, cluster.device(name))
        used = [name]
        engine = PlainEngine(experiment, device=device, form=form, dtype=dtype)
        peak = product_flops_per_s(cluster.device(name).profile, dtype)
    else:
        used = sorted({name for _, stage in plan.stages() for name in stage.devices})
        peak = peak_flops_per_s(plan, cluster)
        engine = Engine(experiment, plan, chain, cluster, devices, progress=progress)
    flops = sum(layer.forward_flops + layer.backward_flops for layer in chain.layers)
    return Machine(
        engine=engine,
        devices={name: _describe(devices[name]) for name in used},
        peak_flops_per_s=None if emulate else peak,
        flops_per_step=flops * experiment.batch_size,
    )


def _describe(device: "jax.Device") -> str:
    return f"{device.platform}:{device.id} {device.device_kind}"
