"""What each node's stages take in a step, measured, and what they should.

A measured step waits for each instruction, so a time holds nothing of its neighbours;
it overlaps nothing, and is done once in many steps.
"""

import collections
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hexijax.cluster import Cluster
from hexijax.costs import PlanCosts
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.plan.plan import Place
from hexijax.program.program import Backward, Forward, Instruction

if TYPE_CHECKING:
    from hexijax.runtime.engine import Engine
    from hexijax.runtime.results import StepResult


def measured_step(
    engine: "Engine", batch: Mapping[str, Any], step: int
) -> "tuple[StepResult, dict[str, float]]":
    """A step, and the seconds of compute by node."""
    import jax

    spent_s: dict[str, float] = collections.defaultdict(float)
    began_s = time.perf_counter()

    def then(instruction: Instruction, written: Sequence[Any]) -> None:
        nonlocal began_s
        jax.block_until_ready(written)
        now_s = time.perf_counter()
        if isinstance(instruction, Forward | Backward):
            spent_s[_node(engine.plan, instruction.place)] += now_s - began_s
        began_s = now_s

    result = engine.watched_step(batch, step, then)
    return result, dict(spent_s)


def expected_s(plan: Plan, chain: Chain, cluster: Cluster) -> dict[str, float]:
    """The same as the costs have it.

    Args:
      plan: whose stages they are.
      chain: the model.
      cluster: with the plan's devices, at the speeds of their kinds.
    """
    costs = PlanCosts(plan, chain, cluster)
    found: dict[str, float] = collections.defaultdict(float)
    for place, _ in plan.stages():
        replica = plan.replicas[int(place[1:].split(".")[0])]
        found[_node(plan, place)] += costs.stage_s(place) * replica.microbatches
    return dict(found)


def nodes_of(plan: Plan) -> frozenset[str]:
    """Nodes that a plan computes on, or keeps state on."""
    devices = {name for _, stage in plan.stages() for name in stage.devices}
    stages = {place for place, _ in plan.stages()}
    homes = {place for share in plan.state for place in share.shares} - stages
    return frozenset(name.rpartition("/")[0] for name in devices | homes)


def _node(plan: Plan, place: Place) -> str:
    return plan.stage(place).devices[0].rpartition("/")[0]
