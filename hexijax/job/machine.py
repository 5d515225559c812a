"""An engine for a plan: the devices that stand for the cluster's, compiled on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.islands.world import World
from hexijax.job.intake import training_facts
from hexijax.job.pinned import check_host
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.planner.mesh import compute_dtype
from hexijax.report.summary import peak_flops_per_s, product_flops_per_s

if TYPE_CHECKING:
    import jax

    from hexijax.islands.transfer import TransferChannel
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """A job under one plan."""

    machine: Machine
    """Its engine."""

    plan: Plan | None
    """None: the plain program."""

    cluster: Cluster
    """Where."""

    @property
    def engine(self) -> "Engine | PlainEngine":
        """The machine's."""
        return self.machine.engine


def make_machine(
    experiment: Experiment,
    cluster: Cluster,
    chain: Chain,
    plan: Plan | None,
    *,
    emulate: bool = False,
    devices: "Mapping[str, jax.Device] | None" = None,
    progress: Progress | None = None,
    world: World | None = None,
    channel: "TransferChannel | None" = None,
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
        world: the job that this process is an island of; None: it is all of it.
        channel: the island's, of the same world.
    """
    from hexijax.islands.carrier import IslandCarrier
    from hexijax.runtime.carrying import ONE_PROCESS, Carrier
    from hexijax.runtime.devices import assign
    from hexijax.runtime.engine import Engine
    from hexijax.runtime.form import BatchForm
    from hexijax.runtime.plain import PlainEngine

    if plan is not None:
        check_host(plan, chain, cluster, training_facts(experiment), emulate=emulate)
    island = world.name if world else None
    if devices is None:
        devices = assign(cluster, emulate=emulate, island=island)
    carrier: Carrier = ONE_PROCESS
    if world is not None:
        if plan is None:
            raise UserError(
                "The plain program runs on one device, and this process is island "
                f"{island!r} of {len(world.islands)}. Give a plan."
            )
        assert channel is not None, "an island has a channel"
        homes = {device: cluster.device(d).island for d, device in devices.items()}
        carrier = IslandCarrier(world, channel, homes, channel.next_engine())
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
        engine = Engine(
            experiment,
            plan,
            chain,
            cluster,
            devices,
            progress=progress,
            carrier=carrier,
        )
    flops = sum(layer.forward_flops + layer.backward_flops for layer in chain.layers)
    return Machine(
        engine=engine,
        devices={
            name: _describe(devices[name])
            if carrier.here(devices[name])
            else f"island {cluster.device(name).island}"
            for name in used
        },
        peak_flops_per_s=None if emulate else peak,
        flops_per_step=flops * experiment.batch_size,
    )


def _describe(device: "jax.Device") -> str:
    return f"{device.platform}:{device.id} {device.device_kind}"
