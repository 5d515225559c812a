"""What published systems would keep in host memory, as Plans that run.

    chain, cluster, batch -> offload_plans -> {"zero-offload-like": Plan, ...}

One stage on one card, or on the equal cards of a host with parts of state on each. What
a system can choose is a ladder of placements, each with more on the device than the one
before: it stands on the highest step that fits, with activations kept or recomputed, in
every size of microbatches, and the simulator takes the fastest. Updates are in FIFO
order; see ``LATE_UPDATES`` for two that begin sooner here than in their own systems.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.host_rates import host_side
from hexijax.layers.chain import Chain
from hexijax.plan.checks import check
from hexijax.plan.plan import (
    Memory,
    Plan,
    PlanError,
    Replica,
    Stage,
    UpdateOrder,
    stage_place,
)
from hexijax.planner.baselines.baseline import Baseline
from hexijax.planner.judge import Judge
from hexijax.planner.mesh import compute_dtype
from hexijax.planner.offload.choice import (
    Choice,
    Kept,
    LayerChoice,
    State,
    Weights,
)
from hexijax.planner.offload.emit import placed_plan
from hexijax.planner.options import PlanOptions

SIZES = 3
"""Microbatch sizes that are simulated under each way of keeping activations, from the
largest that fits: smaller ones stream more often."""

MOST_MICROBATCHES = 64
"""Of a step: what streams parameters for each has lost long before."""

CHECKPOINTS = (Kept.NONE, Kept.FULL)
"""What PyTorch's systems do with activations: the same for all blocks."""

Ladder = Callable[[int, Kept], Sequence[Choice]]
"""Of so many layers, and a way of keeping activations: placements, each with more on
the device than the one before."""


def zero_offload(depth: int, kept: Kept) -> Sequence[Choice]:
    """ZeRO-Offload (arXiv 2101.06840): all state on the host, updated there."""
    return [(_hosted(kept),) * depth]


def patrickstar(depth: int, kept: Kept) -> Sequence[Choice]:
    """PatrickStar (arXiv 2108.05818): chunks where a warm-up leaves room, parameters'
    first, then state's."""
    here, hosted, away = LayerChoice(kept=kept), _hosted(kept), _away(kept)
    stay = [(hosted,) * n + (away,) * (depth - n) for n in range(depth)]
    return [*stay, *((here,) * n + (hosted,) * (depth - n) for n in range(depth + 1))]


def stronghold(depth: int, kept: Kept) -> Sequence[Choice]:
    """StrongHold (SC 2022): a window of layers stays, the others come and go."""
    here, away = LayerChoice(kept=kept), _away(kept)
    return [(here,) * n + (away,) * (depth - n) for n in range(depth + 1)]


def all_on_device(depth: int, kept: Kept) -> Sequence[Choice]:
    """Nothing on the host; as many layers as may keep more than the others."""
    less, more = LayerChoice(kept=kept), LayerChoice(kept=MORE[kept])
    return [(less,) * (depth - n) + (more,) * n for n in range(depth + 1)]


MORE = {Kept.FULL: Kept.DOTS, Kept.NONE: Kept.NONE}
"""What some layers keep where all keep so much at least."""


def _hosted(kept: Kept) -> LayerChoice:
    return LayerChoice(state=State.HOST, kept=kept)


def _away(kept: Kept) -> LayerChoice:
    return LayerChoice(weights=Weights.STREAMED, state=State.HOST, kept=kept)


LADDERS: Mapping[str, Ladder] = {
    "zero-offload-like": zero_offload,
    "patrickstar-like": patrickstar,
    "stronghold-like": stronghold,
    "all-on-device": all_on_device,
}

LATE_UPDATES = ("zero-offload-like", "patrickstar-like")
"""Systems that update when the backward has ended. In Programs an update begins when
its gradient is there, but where gradients are clipped: a clip_norm that is never
reached gives these plans their own order."""


def offload_baselines() -> Mapping[str, Baseline]:
    """Each system by the name under which tables print it."""
    return {name: functools.partial(_best, ladder) for name, ladder in LADDERS.items()}


def offload_plans(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str = "bfloat16",
    options: PlanOptions | None = None,
) -> dict[str, Plan | None]:
    """Each system's plan with its prediction; None where nothing of its form fits."""
    return {
        name: baseline(
            chain,
            cluster,
            batch_size=batch_size,
            dtype=dtype,
            options=options or PlanOptions(),
        )
        for name, baseline in offload_baselines().items()
    }


def rests_on_host(plan: Plan) -> bool:
    """Whether parameters, state or residuals of a plan rest in host memory."""
    return any(share.memory is Memory.HOST for share in plan.state) or any(
        stage.streams(g) or stage.keeps_on_host(g)
        for _, stage in plan.stages()
        for g in range(len(stage.segments))
    )


def _best(
    ladder: Ladder,
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str,
    options: PlanOptions,
) -> Plan | None:
    judge = Judge(chain, cluster, options)
    found: list[Plan] = []
    for blocks, kept in itertools.product(_blocks(cluster), CHECKPOINTS):
        steps = ladder(len(chain.layers), kept)
        hosts = [host_side(cluster, names[0]) for names in blocks]
        if ladder is not all_on_device and not all(x.has_pinned for x in hosts):
            continue
        skeletons = _skeletons(chain, cluster, blocks, batch_size, options, dtype)
        plans = (_highest(steps, skeleton, judge) for skeleton in skeletons)
        predicted = (judge.predicted(plan) for plan in plans if plan)
        found += itertools.islice(filter(None, predicted), SIZES)
    return min(found, key=judge.cost, default=None)


def _blocks(cluster: Cluster) -> Iterator[list[tuple[str, ...]]]:
    """Equal devices of a host, a replica each: every such set alone, and where all are
    alike all together."""
    sets: dict[tuple[str, str, int], list[str]] = {}
    for device in cluster.devices:
        key = (device.node, device.kind, device.usable_memory_bytes)
        sets.setdefault(key, []).append(device.name)
    forms = {(kind, usable, len(names)) for (_, kind, usable), names in sets.items()}
    blocks = [*map(tuple, sets.values())]
    if len(forms) == 1 and len(blocks) > 1:
        yield blocks
    seen: set[tuple[str, int, int]] = set()
    for (_, kind, usable), names in sets.items():
        if (kind, usable, len(names)) not in seen:
            seen.add((kind, usable, len(names)))
            yield [tuple(names)]


def _skeletons(
    chain: Chain,
    cluster: Cluster,
    blocks: Sequence[tuple[str, ...]],
    batch_size: int,
    options: PlanOptions,
    dtype: str,
) -> Iterator[Plan]:
    """A stage on each block, in microbatches from the largest to the smallest."""
    lanes = len(blocks[0])
    samples, left = divmod(batch_size, len(blocks))
    if left:
        return
    size = -(-samples // lanes)
    if options.max_microbatch_size is not None:
        size = min(size, options.max_microbatch_size)
    while size:
        microbatches = -(-samples // (size * lanes))
        if microbatches > MOST_MICROBATCHES:
            return
        whole = microbatches * size * lanes == samples
        if whole or not options.per_microbatch:
            yield Plan(
                replicas=tuple(
                    Replica(
                        stages=(
                            Stage(
                                devices=names,
                                lanes=lanes,
                                layers=(0, len(chain.layers)),
                                dtype=compute_dtype(dtype, cluster.device(names[0])),
                            ),
                        ),
                        microbatches=microbatches,
                        microbatch_size=size * lanes,
                        samples=samples,
                    )
                    for names in blocks
                ),
                batch_size=batch_size,
                chain=chain.fingerprint(),
                cluster=cluster.fingerprint(),
            )
        size //= 2


def _highest(steps: Sequence[Choice], skeleton: Plan, judge: Judge) -> Plan | None:
    """The highest step of a ladder that fits."""
    places = [stage_place(r, 0) for r in range(len(skeleton.replicas))]

    def plan(step: int) -> Plan:
        choices = dict.fromkeys(places, steps[step])
        return placed_plan(skeleton, judge.chain, choices, order=UpdateOrder.FIFO)

    try:
        check(plan(0), judge.chain, judge.cluster)
    except PlanError:
        return None
    if not judge.fits(plan(0)):
        return None
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if judge.fits(plan(middle)):
            low = middle
        else:
            high = middle - 1
    return plan(low)
