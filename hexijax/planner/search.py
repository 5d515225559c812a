"""The search for a plan: judge a few dozen layouts, keep the fastest that fits.

    layouts (grouping) -> stages (fit) -> batch split -> Plan -> estimate -> the best

Layouts are guesses; what follows each is exact under the cost model: layers, remat and
microbatch counts. Nothing here depends on time or chance: equal input, equal plan.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.compute import missing_times
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain
from hexijax.plan.checks import check_batch, check_layers
from hexijax.plan.meshes import check_meshes, check_tensor_dims
from hexijax.plan.plan import Plan, PlanError, Prediction, Replica
from hexijax.planner.batches import split_batch
from hexijax.planner.estimate import estimate
from hexijax.planner.fit import Fitted, Fitter, Setting, stages
from hexijax.planner.grouping import Layout, Mesh, layouts
from hexijax.planner.infeasible import InfeasiblePlanError, explain_infeasible
from hexijax.planner.options import PlanOptions
from hexijax.planner.segments import layers_per_segment, shorter

BUDGET_SHARES = (1.0, 0.93, 0.85)
"""Of usable memory, tried in turn: a finished plan counts rows and small leaves
exactly, which the layer-by-layer bound inside the search does not."""


def make_plan(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str = "float32",
    options: PlanOptions | None = None,
) -> Plan:
    """The fastest plan the search finds, with its predicted time and memory.

    Args:
      chain: the model.
      cluster: the devices.
      batch_size: samples of one optimizer step, exact.
      dtype: compute dtype; a kind that lacks it computes in the next it has.
      options: what else is asked for.

    Raises:
      InfeasiblePlanError: the model fits nowhere, or not as asked.
      PlanError: something asked for is unknown or contradicts itself.
    """
    options = options or PlanOptions()
    check_request(chain, batch_size, options)
    best: Plan | None = None
    reasons: list[str] = []
    fitter = Fitter(chain, cluster, options)
    sizes = lane_sizes(batch_size, options)
    for _, layout in layouts(cluster, dtype, options):
        if best and fitter.bound_s(layout, sizes) * batch_size >= _seconds(best):
            continue  # not even with all devices busy all the time
        try:
            plan = _plan(layout, fitter, chain, cluster, batch_size, options)
        except PlanError as error:
            reasons.append(str(error))
            continue
        if plan and (best is None or _seconds(plan) < _seconds(best)):
            best = plan
    if best is None:
        raise InfeasiblePlanError(
            explain_infeasible(chain, cluster, batch_size, dtype, options, reasons)
        )
    return dataclasses.replace(
        best, chain=chain.fingerprint(), cluster=cluster.fingerprint()
    )


def check_request(chain: Chain, batch_size: int, options: PlanOptions) -> None:
    """Refuses what no plan can fulfil."""
    if batch_size < 1:
        raise PlanError(
            f"A global batch of {batch_size} was asked for; it is at least 1."
        )
    cap = options.max_microbatch_size
    if cap is not None and cap < 1:
        raise PlanError(f"max_microbatch_size is {cap}; a microbatch is at least 1.")
    for split in options.layers_per_stage or ():
        if sum(split) != len(chain.layers) or min(split, default=0) < 1:
            raise PlanError(
                f"The split {'+'.join(map(str, split))} was asked for: {sum(split)} "
                f"layers, and {chain.name} has {len(chain.layers)}. Stages have at "
                "least one layer each and hold every layer once: make the split sum to "
                f"{len(chain.layers)}."
            )


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_s if plan.prediction else math.inf


def _plan(
    layout: Layout,
    fitter: Fitter,
    chain: Chain,
    cluster: Cluster,
    batch_size: int,
    options: PlanOptions,
) -> Plan | None:
    """The best plan of one layout, or None where it cannot be."""
    splits = _own_splits(layout, options, fitter)
    if splits is None or not _possible(layout, chain, fitter):
        return None
    wanted = layers_per_segment(len(layout), options.layers_per_segment)
    for per_segment in shorter(wanted, options.layers_per_segment):
        for budget_share in BUDGET_SHARES:
            setting = Setting(
                batch_size=batch_size,
                state_devices=sum(
                    min(mesh.shape.num_devices for mesh in meshes) for meshes in layout
                ),
                members=len(layout),
                per_segment=per_segment,
                budget_share=budget_share,
            )
            composed = _compose(layout, fitter, setting, options, splits)
            if composed is None:
                break  # nor would it fit in less
            plan = predicted(composed, chain, cluster, options)
            if plan:
                for rule in (
                    check_layers,
                    check_meshes,
                    check_tensor_dims,
                    check_batch,
                ):
                    rule(plan, chain, cluster)
                return plan
    return None


def _compose(
    layout: Layout,
    fitter: Fitter,
    setting: Setting,
    options: PlanOptions,
    splits: Sequence[tuple[int, ...] | None],
) -> Plan | None:
    """Layers, remat and batch shares of every replica, or None if one does not fit."""
    fitted = _fit_all(layout, fitter, setting, options, splits)
    shares = split_batch(setting.batch_size, [[f.option for f in x] for x in fitted])
    if shares is None:
        return None
    return Plan(
        replicas=tuple(
            Replica(
                stages=stages(meshes, fits[share.option], setting.per_segment),
                microbatches=share.microbatches,
                microbatch_size=fits[share.option].option.size,
                samples=share.samples,
            )
            for meshes, fits, share in zip(layout, fitted, shares, strict=True)
        ),
        batch_size=setting.batch_size,
        schedule=options.schedule,
        reductions=options.reductions,
    )


def predicted(
    plan: Plan, chain: Chain, cluster: Cluster, options: PlanOptions
) -> Plan | None:
    """The plan with its prediction, or None if a device would overflow."""
    memory = plan_memory(
        plan, chain, moments=options.moments, whole_leaves=options.whole_leaves
    )
    promised = {name: parts.total_bytes for name, parts in memory.items()}
    for name, num_bytes in promised.items():
        if num_bytes > cluster.device(name).usable_memory_bytes:
            return None
    step_s = estimate(plan, chain, cluster, moments=options.moments).step_s
    return dataclasses.replace(
        plan, prediction=Prediction(step_s=step_s, memory_bytes=promised)
    )


def _own_splits(
    layout: Layout, options: PlanOptions, fitter: Fitter
) -> list[tuple[int, ...] | None] | None:
    """The user's split of each replica; None if the layout is of another form."""
    asked = options.layers_per_stage
    if asked is None:
        return [None] * len(layout)
    if len(asked) not in (1, len(layout)):
        return None
    splits = list(asked) * (len(layout) if len(asked) == 1 else 1)
    for split, meshes in zip(splits, layout, strict=True):
        if len(split) != len(meshes) * fitter.rounds(meshes):
            return None
    return [*splits]


def _possible(layout: Layout, chain: Chain, fitter: Fitter) -> bool:
    """Whether every stage can have a layer, a price, and evenly split weights."""
    tensor_dims = [
        leaf.shape[leaf.tensor_dim]
        for leaf in chain.leaves()
        if leaf.tensor_dim is not None
    ]
    shapes = {mesh.shape for replica in layout for mesh in replica}
    degrees = {shape.tensor for shape in shapes}
    return (
        all(len(m) * fitter.rounds(m) <= len(chain.layers) for m in layout)
        and all(size % degree == 0 for size in tensor_dims for degree in degrees)
        and not any(missing_times(chain, shape) for shape in shapes)
    )


def _fit_all(
    layout: Layout,
    fitter: Fitter,
    setting: Setting,
    options: PlanOptions,
    splits: Sequence[tuple[int, ...] | None],
) -> list[list[Fitted]]:
    """Every microbatch size that fits, of every replica."""
    return [
        [
            fitted
            for size in microbatch_sizes(meshes, setting.batch_size, options)
            if (fitted := fitter.fit(meshes, size, setting, split))
        ]
        for meshes, split in zip(layout, splits, strict=True)
    ]


def lane_sizes(batch_size: int, options: PlanOptions) -> list[int]:
    """Samples of one lane's microbatch: doubling, up to the batch and the cap."""
    most = min(batch_size, options.max_microbatch_size or batch_size)
    return [2**k for k in range(most.bit_length())]


def microbatch_sizes(
    meshes: Sequence[Mesh], batch_size: int, options: PlanOptions
) -> Iterator[int]:
    """Sizes that all lanes divide, doubling, up to the batch and the cap."""
    lanes = [mesh.shape.lanes for mesh in meshes]
    step = math.lcm(*lanes)
    size, cap = step, options.max_microbatch_size
    while size < batch_size + step and (cap is None or size // min(lanes) <= cap):
        yield size
        size *= 2
