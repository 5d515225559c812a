"""How long a step of a plan takes, by formula: what judges candidates.

    plan, chain, cluster -> estimate -> Estimate

Ideal 1F1B (GPipe fills and drains alike): the first microbatch passes all stages, each
further one adds the slowest stage. Then what gradient sums and new parameters take
beyond the backward they travel beside. The simulator plays the Program; this is what it
costs nothing to know before.
"""

import dataclasses
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.instructions import PlanCosts, mesh_shape
from hexijax.costs.links import all_reduce_s, slowest_link
from hexijax.costs.memory import trained_groups
from hexijax.costs.rates import HOST_CALL_S
from hexijax.costs.sums import (
    GRAD_BYTES,
    MOMENTS,
    STATE_BYTES,
    shard_size,
)
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.plan.plan import Plan, stage_place
from hexijax.planner.dispatch import calls_of
from hexijax.planner.pace import pipeline_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaEstimate:
    """One replica's part of a step."""

    first_s: float
    """Until the first microbatch is through."""

    next_s: float
    """What each further microbatch adds."""

    end_s: float
    """When the last is through."""

    stage_s: tuple[float, ...]
    """Forward and backward of one microbatch in each stage."""

    link_bound: bool = False
    """A border between stages takes longer than the slowest device set."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A step in parts."""

    replicas: tuple[ReplicaEstimate, ...]
    """In the plan's order."""

    dispatch_s: float
    """What the busiest island's host needs to dispatch all calls."""

    sync_s: float
    """Gradient sums and new parameters, beyond the backward."""

    update_s: float
    """The optimizer."""

    @property
    def compute_s(self) -> float:
        """Until the last replica's last backward."""
        return max(replica.end_s for replica in self.replicas)

    @property
    def step_s(self) -> float:
        """The whole step."""
        return max(self.compute_s, self.dispatch_s) + self.sync_s + self.update_s


def estimate(
    plan: Plan, chain: Chain, cluster: Cluster, *, moments: int = MOMENTS
) -> Estimate:
    """The parts of a step."""
    costs = PlanCosts(plan, chain, cluster, moments)
    replicas = tuple(_replica(plan, costs, r) for r in range(len(plan.replicas)))
    return Estimate(
        replicas=replicas,
        dispatch_s=_dispatch_s(plan, cluster),
        sync_s=_sync_s(plan, chain, cluster, replicas),
        update_s=_update_s(plan, chain, cluster, moments),
    )


def _replica(plan: Plan, costs: PlanCosts, r: int) -> ReplicaEstimate:
    replica = plan.replicas[r]
    places = [stage_place(r, s) for s in range(len(replica.stages))]
    stage_s = [costs.stage_s(place) for place in places]
    border_s = [
        costs.border_s(places[s], places[s + 1], stage.layers[1])
        for s, stage in enumerate(replica.stages[:-1])
    ]
    num_sets = len({stage.devices for stage in replica.stages})
    first_s, next_s = pipeline_s(stage_s, border_s, num_sets)
    return ReplicaEstimate(
        first_s=first_s,
        next_s=next_s,
        end_s=first_s + (replica.microbatches - 1) * next_s,
        stage_s=tuple(stage_s),
        link_bound=next_s > max(sum(stage_s[k::num_sets]) for k in range(num_sets)),
    )


def _dispatch_s(plan: Plan, cluster: Cluster) -> float:
    calls: dict[str, int] = {}
    for replica in plan.replicas:
        for k, stage in enumerate(replica.stages):
            island = cluster.device(stage.devices[0]).island
            each = calls_of(k, len(replica.stages), len(stage.segments))
            calls[island] = calls.get(island, 0) + each * replica.microbatches
    return max(calls.values()) * HOST_CALL_S


def _sync_s(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    replicas: Sequence[ReplicaEstimate],
) -> float:
    """Lanes sum in their mesh, replicas over the links between them, both beside the
    last microbatch's backward, all but the last segment."""
    exposed_s = 0.0
    nodes: dict[str, float] = {}
    num_replicas = len(plan.replicas)
    for r, replica in enumerate(plan.replicas):
        for stage, stage_s in zip(replica.stages, replicas[r].stage_s, strict=True):
            groups = trained_groups(chain, stage.layers)
            params = sum(shard_size(group, stage.tensor) for group in groups)
            num_bytes = params * (GRAD_BYTES + ITEM_BYTES[stage.dtype])
            link = mesh_shape(cluster, stage).link
            # An all-reduce of gradients is two passes; here sums go home and parameters
            # come back, one pass each.
            sync_s = all_reduce_s(link, stage.lanes, num_bytes // 2) if link else 0.0
            exposed_s = max(exposed_s, _beside(sync_s, stage_s, len(stage.segments)))
            if num_replicas > 1:
                node = cluster.device(stage.devices[0]).node
                sent = num_bytes * stage.tensor * (num_replicas - 1) / num_replicas
                nodes[node] = nodes.get(node, 0.0) + sent
    if not nodes:
        return exposed_s
    firsts = {cluster.device(d).node: d for _, s in plan.stages() for d in s.devices}
    devices = (
        list(firsts.values()) if len(firsts) > 1 else plan.replicas[0].stages[0].devices
    )
    others = plan.replicas[-1].stages[-1].devices
    link = slowest_link(
        cluster, devices if len(devices) > 1 else [devices[0], others[0]]
    )
    assert link, "two replicas have two devices"
    between_s = max(link.transfer_s(int(num_bytes)) for num_bytes in nodes.values())
    shortest_s = min(min(replica.stage_s) for replica in replicas)
    fewest = min(len(stage.segments) for _, stage in plan.stages())
    return max(exposed_s, _beside(between_s, shortest_s, fewest))


def _beside(sync_s: float, stage_s: float, num_segments: int) -> float:
    """What is left of a sum that travels while the last backward computes."""
    backward_s = stage_s * 2 / 3
    last = 1 / num_segments
    return max(sync_s * last, sync_s - backward_s * (1 - last))


def _update_s(plan: Plan, chain: Chain, cluster: Cluster, moments: int) -> float:
    """State in and out of memory, where each device has its even part of it."""
    per_param = 2 * STATE_BYTES * (1 + moments) + GRAD_BYTES + STATE_BYTES
    longest_s = 0.0
    for _, stage in plan.stages():
        params = sum(group.size for group in trained_groups(chain, stage.layers))
        held = params / len(stage.devices) / len(plan.replicas)
        profile = cluster.device(stage.devices[0]).profile
        longest_s = max(longest_s, held * per_param / profile.memory_bytes_per_s)
    return longest_s
