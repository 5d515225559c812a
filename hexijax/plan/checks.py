"""Holds a plan against its chain and its cluster, before anything is compiled.

    plan, chain, cluster -> check -> nothing, or a PlanError a person can act on

One function a rule, in an order in which each may rely on those before it. Every
message says what was asked, where, both numbers, the rule, and a way out.
"""

import dataclasses
import math
from collections.abc import Callable

from hexijax.cluster import Cluster
from hexijax.errors import did_you_mean
from hexijax.layers.chain import Chain
from hexijax.plan.meshes import check_meshes, check_tensor_dims
from hexijax.plan.plan import (
    CHUNK_SIZE,
    Memory,
    Plan,
    PlanError,
    Replica,
    Schedule,
    stage_place,
)

Check = Callable[[Plan, Chain, Cluster], None]


def check(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """Checks that the plan can run.

    Raises:
      PlanError: the first rule that is broken.
    """
    for rule in _RULES:
        rule(plan, chain, cluster)


def check_whole(plan: Plan) -> None:
    """All stages see the same samples together, for losses that are no sum over them.

    Raises:
      PlanError: a microbatch holds padding, or is cut into lanes in unlike ways.
    """
    for r, replica in enumerate(plan.replicas):
        lanes = [stage.lanes for stage in replica.stages]
        if len(set(lanes)) > 1:
            raise PlanError(
                f"The stages of replica {r} have {', '.join(map(str, lanes))} lanes, "
                "and with per_microbatch=True the samples of a lane are a microbatch "
                "of their own: the stages would see unlike ones. Give all stages of a "
                "replica the same number of lanes."
            )
        count, size = replica.microbatches, replica.microbatch_size
        if replica.samples != count * size:
            raise PlanError(
                f"Replica {r} takes {replica.samples} samples in {count} microbatches "
                f"of {size}, which hold {count * size}: the rest is padding, and with "
                "per_microbatch=True it would count in the loss of its microbatch. "
                f"Write samples {count * size}, with the batch to match, or a size "
                f"that divides {replica.samples}; or plan again with another "
                "batch_size or max_microbatch_size."
            )


def adopt(plan: Plan, chain: Chain, cluster: Cluster) -> Plan:
    """The plan, checked, with the fingerprints that a person may leave out."""
    check(plan, chain, cluster)
    return dataclasses.replace(
        plan, chain=chain.fingerprint(), cluster=cluster.fingerprint()
    )


def check_owner(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """The plan was made for this model and cluster; a blank fingerprint fits any."""
    for what, theirs, ours, name in (
        ("model", plan.chain, chain.fingerprint(), chain.name),
        ("cluster", plan.cluster, cluster.fingerprint(), cluster.name),
    ):
        if theirs and theirs != ours:
            key = "chain" if what == "model" else "cluster"
            raise PlanError(
                f"This plan belongs to another {what}: it was made for {theirs}, and "
                f"{name} is {ours}. A plan is used only with the {what} it was made "
                "for. Plan again with `hexijax plan`, or, if you know it fits, take "
                f"the line '{key} {theirs}' out of plan.txt."
            )


def check_layers(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """Every layer sits in exactly one stage of each replica, in order."""
    del cluster
    total = len(chain.layers)
    if not plan.replicas:
        raise PlanError("The plan has no replicas; it needs at least one.")
    for r, replica in enumerate(plan.replicas):
        if not replica.stages:
            raise PlanError(f"Replica {r} has no stages; it needs at least one.")
        if len(replica.stages) > total:
            raise PlanError(
                f"Replica {r} has {len(replica.stages)} stages for {total} layers: "
                f"some would be empty. Use at most {total} stages."
            )
        expected = 0
        for s, stage in enumerate(replica.stages):
            place, (start, stop) = stage_place(r, s), stage.layers
            if stop <= start:
                raise PlanError(
                    f"Stage {place} is empty: its layers start at {start} and end "
                    f"before {stop}. Every stage has at least one layer; take the "
                    "stage out."
                )
            if start != expected:
                fault = (
                    f"layers {expected}-{start - 1} are in no stage"
                    if start > expected
                    else f"layers {start}-{expected - 1} are in two stages"
                )
                raise PlanError(
                    f"Stage {place} starts at layer {start}, but the layers before it "
                    f"end at {expected - 1}: {fault} of replica {r}. Start it at "
                    f"{expected}."
                )
            expected = stop
        if expected != total:
            raise PlanError(
                f"The stages of replica {r} hold {expected} layers and {chain.name} "
                f"has {total}. Every layer sits in exactly one stage: end the last "
                f"stage at layer {total - 1}."
            )


def check_stage_parts(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """Segments and remat policies cover the stage's layers."""
    del chain, cluster
    for place, stage in plan.stages():
        if sum(stage.segments) != stage.num_layers or min(stage.segments) < 1:
            raise PlanError(
                f"The segments of stage {place} are "
                f"{'+'.join(map(str, stage.segments))} = {sum(stage.segments)} layers, "
                f"and the stage has {stage.num_layers}. Segments have at least one "
                "layer each and sum to the stage's."
            )
        if len(stage.remat) != stage.num_layers:
            raise PlanError(
                f"Stage {place} names a remat policy for {len(stage.remat)} layers and "
                f"has {stage.num_layers}. Name one policy for all, or one a layer."
            )
        for what, name, choices in (
            ("how long parameters stay", "params", stage.params),
            ("where borders wait", "waits", stage.waits),
            ("where residuals wait", "residuals", stage.residuals),
        ):
            if choices and len(choices) != len(stage.segments):
                raise PlanError(
                    f"Stage {place} says {what} for {len(choices)} segments and has "
                    f"{len(stage.segments)}. Write '{name}' once for all, or once a "
                    "segment."
                )
        if stage.grads and plan.schedule is not Schedule.LAYERED:
            raise PlanError(
                f"Stage {place} has gradients of {stage.grads} passes at once, and "
                f"under {plan.schedule} they are complete with the last microbatch. "
                "Write 'schedule layered', or leave 'grads' out."
            )


def check_batch(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """The replicas take the global batch exactly, and lanes their share of it."""
    del chain, cluster
    for r, replica in enumerate(plan.replicas):
        _check_samples(r, replica)
        for s, stage in enumerate(replica.stages):
            size, lanes = replica.microbatch_size, stage.lanes
            if size % lanes:
                raise PlanError(
                    f"Stage {stage_place(r, s)} has {lanes} lanes for microbatches of "
                    f"{size} samples: {size} is not divisible by {lanes}. Write size "
                    f"{_padded(replica)}: the samples beyond {replica.samples} are "
                    "padding of weight zero, and the result stays exact."
                )
    samples = [replica.samples for replica in plan.replicas]
    if sum(samples) != plan.batch_size:
        raise PlanError(
            f"The replicas take {' + '.join(map(str, samples))} = {sum(samples)} "
            f"samples and the global batch has {plan.batch_size}. They must be equal: "
            f"change the last replica's samples to "
            f"{max(1, samples[-1] + plan.batch_size - sum(samples))}, or the batch."
        )


def _padded(replica: Replica) -> int:
    """The next microbatch size that all the replica's lanes divide."""
    lanes = math.lcm(*(stage.lanes for stage in replica.stages))
    return -(-replica.microbatch_size // lanes) * lanes


def _check_samples(r: int, replica: Replica) -> None:
    count, size, samples = (
        replica.microbatches,
        replica.microbatch_size,
        replica.samples,
    )
    if min(count, size, samples) < 1:
        raise PlanError(
            f"Replica {r} has {count} microbatches of {size} samples for {samples} "
            "samples; each is at least 1. Take a replica without work out of the plan."
        )
    if samples > count * size:
        raise PlanError(
            f"Replica {r} takes {samples} samples in {count} microbatches of {size}, "
            f"which hold {count * size}. Write microbatches {-(-samples // size)}."
        )
    if samples <= (count - 1) * size:
        raise PlanError(
            f"Replica {r} takes {samples} samples in {count} microbatches of {size}: "
            f"{-(-samples // size)} hold them, and the rest would be padding. Write "
            f"microbatches {-(-samples // size)}."
        )


def check_state(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """State shares name known groups and places, and divide something."""
    groups = {group.name for group in chain.groups}
    places = {place for place, _ in plan.stages()} | {d.name for d in cluster.devices}
    named: set[str] = set()
    if plan.chunk < 1:
        raise PlanError(
            f"State comes from host memory in chunks of {plan.chunk} parameters; a "
            "chunk has one at least. Leave 'chunk' out of the plan for the usual "
            f"{CHUNK_SIZE:,}."
        )
    for share in plan.state:
        label = ",".join(share.groups)
        for group in share.groups:
            if group not in groups and group != "*":
                raise PlanError(
                    f"The state of group {group!r} is shared out, and {chain.name} has "
                    f"no such parameter group.{did_you_mean(group, groups)} Groups are "
                    f"named after layers: {', '.join(sorted(groups)[:6])}, ..."
                )
            if group in named:
                raise PlanError(
                    f"The state of group {group!r} is shared out twice. Name it in one "
                    "'state' line only."
                )
            named.add(group)
        for place, part in share.shares.items():
            if place not in places:
                raise PlanError(
                    f"The state of {label} is shared to {place!r}, which is no stage "
                    f"of this plan and no device of {cluster.name}."
                    f"{did_you_mean(place, places)}"
                )
            if not 0 <= part < math.inf:
                raise PlanError(
                    f"The state share of {place} in {label} is {part}. A share is a "
                    "number from 0."
                )
        if share.update is Memory.HOST and share.memory is Memory.DEVICE:
            raise PlanError(
                f"The state of {label} rests on the device and is updated by the host: "
                "all of it would cross twice a step. Write 'memory host' as well, or "
                "leave the update to the device."
            )
        if share.shares and not any(share.shares.values()):
            raise PlanError(
                f"All state shares of {label} are 0, so its state would lie nowhere. "
                "Give one place a share above 0, or write 'even'."
            )


def check_memory(plan: Plan, chain: Chain, cluster: Cluster) -> None:
    """What the plan promises fits what each device has."""
    del chain
    known = {device.name for device in cluster.devices}
    promises = plan.prediction.memory_bytes if plan.prediction else {}
    for name, promised in promises.items():
        if name not in known:
            raise PlanError(
                f"The plan predicts the memory of {name!r}, which is no device of "
                f"{cluster.name}.{did_you_mean(name, known)}"
            )
        usable = cluster.device(name).usable_memory_bytes
        if promised > usable:
            raise PlanError(
                f"The plan promises a peak of {promised:,} bytes on {name}, which has "
                f"{usable:,} usable. Give it fewer layers, a smaller microbatch, or "
                "remat."
            )


_RULES: tuple[Check, ...] = (
    check_owner,
    check_layers,
    check_stage_parts,
    check_meshes,
    check_tensor_dims,
    check_batch,
    check_state,
    check_memory,
)
