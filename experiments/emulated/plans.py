"""Plans for the emulated cards: the planner's, and those it is held against.

Setting, Chain, Cluster -> ours, even_batch, best_even, best_pipeline, ... -> Plan
"""

import dataclasses
from collections.abc import Iterator, Sequence

from experiments.emulated.cards import Setting
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Memory, Params, Plan, Replica, Schedule, Stage
from hexijax.planner import Grouping, PlanOptions, make_plan
from hexijax.planner.baselines.baseline import Baseline, from_drafts
from hexijax.planner.baselines.composer import Composer
from hexijax.planner.baselines.devices import Block
from hexijax.planner.baselines.draft import Draft
from hexijax.planner.baselines.fsdp import fsdp_style
from hexijax.planner.baselines.megatron import drafts as megatron_drafts
from hexijax.runtime.profiling import even_segments

A_SEGMENT = 4
"""Layers that are gathered, and freed, as one."""


def ours(
    setting: Setting, chain: Chain, cluster: Cluster, *, even_state: bool = False
) -> Plan:
    """What the planner finds, layers recomputed in part or in full as they were when
    cards were alone."""
    options = dataclasses.replace(
        _options(setting), grouping=Grouping.MESH, even_state=even_state
    )
    return make_plan(
        chain,
        cluster,
        batch_size=setting.batch_size,
        dtype=setting.size.dtype,
        options=options,
    )


def _options(setting: Setting) -> PlanOptions:
    """What every search may do."""
    sizes = [size for card in setting.cards for size in card.sizes]
    return PlanOptions(max_microbatch_size=max(sizes), remat=(Remat.DOTS, Remat.FULL))


def even_batch(setting: Setting, chain: Chain) -> Plan:
    """Data parallelism that knows nothing of speed: equal batches, equal state."""
    each = setting.batch_size // len(setting.cards)
    replicas = tuple(
        Replica(
            stages=(
                Stage(
                    devices=(name,),
                    layers=(0, len(chain.layers)),
                    dtype=setting.size.dtype,
                    remat=(Remat.DOTS,) * len(chain.layers),
                ),
            ),
            microbatches=each // size,
            microbatch_size=size,
            samples=each,
        )
        for name, size in zip(setting.devices, setting.even, strict=True)
    )
    return Plan(
        replicas=replicas, batch_size=setting.batch_size, chain=chain.fingerprint()
    )


def best_even(setting: Setting, chain: Chain, cluster: Cluster) -> Plan:
    """The best data parallelism with equal batches, state in equal parts; it may leave
    cards out."""
    return _best(fsdp_style, setting, chain, cluster)


def best_pipeline(setting: Setting, chain: Chain, cluster: Cluster) -> Plan:
    """The best of even pipelines: equal stages and batches, of two cards or more each;
    they may leave cards out."""
    return _best(_pipelines, setting, chain, cluster)


def _best(baseline: Baseline, setting: Setting, chain: Chain, cluster: Cluster) -> Plan:
    found = baseline(
        chain,
        cluster,
        batch_size=setting.batch_size,
        dtype=setting.size.dtype,
        options=_options(setting),
    )
    if found is None:
        raise RuntimeError("no plan of that form fits")
    return found


def _pipeline_drafts(composer: Composer, pool: Sequence[Block]) -> Iterator[Draft]:
    """Megatron's grids of more than one stage."""
    for draft in megatron_drafts(composer, pool):
        if all(len(pipeline) > 1 for pipeline in draft.pipelines):
            yield draft


_pipelines = from_drafts(_pipeline_drafts)


def layered(chain: Chain, like: Plan) -> Plan:
    """The batches of a plan under layered accumulation: a segment's parameters are
    gathered twice a step, whatever its microbatches, its gradient is summed once, and
    the backward computes activations again. They wait on the device."""
    return _gathered(chain, like, Schedule.LAYERED)


def plain_order(chain: Chain, like: Plan) -> Plan:
    """The same without it: a segment is gathered for every microbatch, twice."""
    return _gathered(chain, like, Schedule.ONE_F_ONE_B)


def _gathered(
    chain: Chain,
    like: Plan,
    schedule: Schedule,
    waits: Memory = Memory.DEVICE,
    most: int = A_SEGMENT,
) -> Plan:
    segments = even_segments(chain, most)
    replicas = tuple(
        dataclasses.replace(
            replica,
            stages=tuple(
                dataclasses.replace(
                    stage,
                    segments=segments,
                    remat=(Remat.FULL,) * stage.num_layers,
                    params=(Params.FREED,) * len(segments),
                    waits=(waits,) * len(segments),
                )
                for stage in replica.stages
            ),
        )
        for replica in like.replicas
    )
    return Plan(
        replicas=replicas,
        batch_size=like.batch_size,
        schedule=schedule,
        chain=chain.fingerprint(),
    )


def on_one(
    setting: Setting,
    chain: Chain,
    device: str,
    *,
    size: int,
    microbatches: int,
    segments: tuple[int, ...] = (),
    remat: Remat = Remat.NONE,
) -> Plan:
    """The whole model on one device; the last layer keeps all it has."""
    before = len(chain.layers) - 1
    stage = Stage(
        devices=(device,),
        layers=(0, before + 1),
        dtype=setting.size.dtype,
        segments=segments,
        remat=(*[remat] * before, Remat.NONE),
    )
    samples = size * microbatches
    replica = Replica(
        stages=(stage,),
        microbatches=microbatches,
        microbatch_size=size,
        samples=samples,
    )
    return Plan(replicas=(replica,), batch_size=samples, chain=chain.fingerprint())


def flat(setting: Setting, chain: Chain, device: str, microbatches: int) -> Plan:
    """Layered accumulation on one device, of ``microbatches`` of two sequences.

    Every layer's activations wait in host memory: of a longer segment those inside it
    would wait on the device.
    """
    like = on_one(setting, chain, device, size=2, microbatches=microbatches)
    return _gathered(chain, like, Schedule.LAYERED, Memory.HOST, 1)
