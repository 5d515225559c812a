"""Checks of who computes a stage: its devices, dtype, and tensor degree."""

import collections

from hexijax.cluster import Cluster, ClusterError
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan, PlanError, Schedule, Stage, stage_place


def check_meshes(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """Stages have known devices of one kind, shared only as the schedule allows."""
    del chain
    owners: dict[str, int] = {}
    for place, stage in plan.stages():
        _check_mesh(place, stage, cluster)
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            for name in stage.devices:
                if owners.setdefault(name, r) != r:
                    raise PlanError(
                        f"Device {name} is in replica {owners[name]} and in stage "
                        f"{stage_place(r, s)}. A device works for one replica: take it "
                        "out of one of them."
                    )
        _check_repeats(plan.schedule, r, replica.stages)


def _check_mesh(place: Place, stage: Stage, cluster: Cluster) -> None:
    lanes, tensor = stage.lanes, stage.tensor
    if len(stage.devices) != lanes * tensor or lanes < 1:
        raise PlanError(
            f"Stage {place} has {len(stage.devices)} devices for {lanes} lanes x "
            f"tensor degree {tensor} = {lanes * tensor}. The numbers must be equal: "
            "change lanes, tensor or devices."
        )
    for name, count in collections.Counter(stage.devices).items():
        if count > 1:
            raise PlanError(
                f"Stage {place} names device {name} {count} times; once each, please."
            )
    try:
        devices = [cluster.device(name) for name in stage.devices]
    except ClusterError as error:
        raise PlanError(f"Stage {place}: {error}") from None
    first = devices[0]
    for device in devices:
        if device.kind != first.kind:
            raise PlanError(
                f"Stage {place} mixes kinds: {first.name} is a {first.kind} and "
                f"{device.name} a {device.kind}. One program runs on one kind; give "
                "the kinds a stage each, or a replica each."
            )
        if device.island != first.island:
            raise PlanError(
                f"Stage {place} spans islands: {first.name} is in {first.island} and "
                f"{device.name} in {device.island}. One JAX client drives a stage; "
                "give the islands a stage each, or a replica each."
            )
    native = first.profile.native_dtypes
    if stage.dtype not in native:
        raise PlanError(
            f"Stage {place} computes in {stage.dtype}, and a {first.kind} has "
            f"{', '.join(native)}. Write one of these as its dtype."
        )


def comes_again(plan: Plan) -> bool:
    """Whether some device holds several stages of a replica, which only some schedules
    can have."""
    return any(
        len({stage.devices for stage in replica.stages}) < len(replica.stages)
        for replica in plan.replicas
    )


def _check_repeats(schedule: Schedule, r: int, stages: tuple[Stage, ...]) -> None:
    """Device sets of a replica are disjoint, or come again: in the same order under
    interleaved, in any under layered."""
    sets = [frozenset(stage.devices) for stage in stages]
    period = len(set(sets))
    for s, devices in enumerate(sets):
        for t, others in enumerate(sets[:s]):
            both = sorted(devices & others)
            if both and devices != others:
                raise PlanError(
                    f"Stages {stage_place(r, t)} and {stage_place(r, s)} share "
                    f"{both[0]} but not all of their devices. Two stages of a replica "
                    "have the same devices (schedule interleaved or layered), or none "
                    "in common."
                )
    repeats = period < len(sets)
    if repeats and schedule not in (Schedule.INTERLEAVED, Schedule.LAYERED):
        raise PlanError(
            f"Replica {r} has {len(sets)} stages on {period} device sets, and the "
            f"schedule is {schedule}. A device set holds several stages only under "
            "schedule interleaved, or layered, which runs one after another."
        )
    if schedule is Schedule.INTERLEAVED:
        if not repeats and len(sets) > 1:
            raise PlanError(
                f"The schedule is interleaved, and replica {r} has {len(sets)} stages "
                "on as many device sets. Under interleaved each device set comes "
                "again: repeat the devices in order, or write schedule 1f1b."
            )
        if any(sets[s] != sets[s % period] for s in range(len(sets))):
            raise PlanError(
                f"The {len(sets)} stages of replica {r} do not go round their {period} "
                "device sets in one order (such as a, b, a, b). Under interleaved they "
                "do."
            )


def check_tensor_dims(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """Every split weight divides evenly: uneven dims would be replicated silently."""
    del cluster
    for place, stage in plan.stages():
        if stage.tensor == 1:
            continue
        names = dict.fromkeys(
            name
            for layer in chain.layers[slice(*stage.layers)]
            for name in layer.groups
        )
        for leaf in (leaf for name in names for leaf in chain.group(name).leaves):
            dim = leaf.tensor_dim
            if dim is not None and leaf.shape[dim] % stage.tensor:
                size = leaf.shape[dim]
                fits = [t for t in range(1, stage.tensor) if not size % t]
                raise PlanError(
                    f"Stage {place} splits its weights over axis `model` of size "
                    f"{stage.tensor}: dim {dim} of {leaf.id} has {size} rows, not "
                    f"divisible by tensor degree {stage.tensor}. Use a tensor degree "
                    f"that divides {size}, such as {fits[-1]}."
                )
