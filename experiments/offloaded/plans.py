"""Plans for one card: the planner's, in both orders, and those it is held against.

Chain, Cluster -> ours, in_order, without_host_updates, resident -> Plan
"""

import dataclasses

from experiments.offloaded.cells import DEVICE
from hexijax.cluster import Cluster
from hexijax.costs.hosts import host_bytes
from hexijax.costs.memory import plan_memory
from hexijax.costs.sums import MOMENTS, STATE_BYTES
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import (
    Memory,
    Params,
    Plan,
    Replica,
    Schedule,
    Stage,
    StateShare,
    UpdateOrder,
)
from hexijax.planner import PlanOptions, make_plan
from hexijax.program.buckets import buckets, update_site
from hexijax.program.program import Site


def ours(experiment: Experiment, chain: Chain, cluster: Cluster) -> Plan:
    """What the planner finds."""
    return make_plan(
        chain,
        cluster,
        batch_size=experiment.batch_size,
        dtype=experiment.dtype,
        options=PlanOptions(offload=True),
    )


def pinned_bytes(plan: Plan, chain: Chain, cluster: Cluster) -> int:
    """Of the host, what XLA pins: all that waits and rests there but the state that
    the host's processor updates, which is in memory of its own."""
    whole = sum(host_bytes(plan_memory(plan, chain, cluster), cluster).values())
    updated = sum(
        group.size
        for group in buckets(plan, chain)
        if update_site(plan, group) is Site.HOST
    )
    return whole - updated * STATE_BYTES * (1 + MOMENTS)


def in_order(plan: Plan, order: UpdateOrder) -> Plan:
    """The same with its updates in another order."""
    return dataclasses.replace(plan, order=order, prediction=None)


def without_host_updates(plan: Plan) -> Plan:
    """The same with all state that rests on the host updated on the card."""
    state = tuple(
        dataclasses.replace(share, update=Memory.DEVICE) for share in plan.state
    )
    return dataclasses.replace(plan, state=state, prediction=None)


def resident(
    experiment: Experiment,
    chain: Chain,
    *,
    size: int,
    params: Params = Params.KEPT,
    remat: Remat = Remat.FULL,
    streamed: int = 0,
) -> Plan:
    """Everything on the card, but parameters where ``params`` has them and the state
    of what the last ``streamed`` layers use alone; a program a layer, each layer's
    microbatches together."""
    layers = len(chain.layers)
    stage = Stage(
        devices=(DEVICE,),
        layers=(0, layers),
        dtype=experiment.dtype,
        segments=(1,) * layers,
        remat=(*[remat] * (layers - 1), Remat.NONE),
        params=(params,) * layers,
    )
    state = (StateShare(groups=("*",), shares={}),)
    if streamed:
        last = [g.name for g in chain.groups if g.layers[0] >= layers - streamed]
        host = StateShare(groups=tuple(last), shares={}, memory=Memory.HOST)
        state = (*state, host)
    replica = Replica(
        stages=(stage,),
        microbatches=experiment.batch_size // size,
        microbatch_size=size,
        samples=experiment.batch_size,
    )
    return Plan(
        replicas=(replica,),
        batch_size=experiment.batch_size,
        schedule=Schedule.LAYERED,
        state=state,
        chain=chain.fingerprint(),
    )
