"""Plans for the islands that are left, or have come back: made before they are needed.

brief of the first generation -> Replanner -> islands -> those used, and their brief
"""

from collections.abc import Iterable
from typing import Any

from hexijax.cluster import Cluster
from hexijax.elastic import Asked, PlansAhead
from hexijax.islands.wire import Message
from hexijax.plan import Plan
from hexijax.plan.serial import SavedPlan, dumps
from hexijax.planner import InfeasiblePlanError, PlanOptions


class Replanner:
    """A context: its process plans for as long as it lasts."""

    def __init__(self, brief: Message, saved: SavedPlan):
        """
        Args:
          brief: of the first generation.
          saved: the plan in it.
        """
        self._brief, self._saved = brief, saved
        self._ahead = PlansAhead(
            Asked(
                chain=saved.chain,
                batch_size=saved.plan.batch_size,
                dtype=saved.training.dtype,
                options=PlanOptions.of(saved.training),
            )
        )
        self._ahead.know(saved.cluster, saved.plan)
        self._prepare(tuple(saved.cluster.islands))

    def __call__(
        self, islands: tuple[str, ...]
    ) -> tuple[tuple[str, ...], Message] | None:
        """Those of ``islands`` that a plan for them uses, and what they are told; None:
        the model does not fit there."""
        cluster = self._only(islands)
        try:
            plan = self._ahead.get(cluster).plan
        except InfeasiblePlanError:
            return None
        self._prepare(islands)
        text = dumps(plan, cluster, self._saved.chain, self._saved.training)
        return used(plan, cluster), {**self._brief, "plan": text}

    def __enter__(self) -> "Replanner":
        return self

    def __exit__(self, *_: Any) -> None:
        self._ahead.close()

    def _only(self, islands: Iterable[str]) -> Cluster:
        there, whole = set(islands), self._saved.cluster
        gone = [node.name for node in whole.nodes if node.island not in there]
        return whole.without(*gone) if gone else whole

    def _prepare(self, islands: tuple[str, ...]) -> None:
        """For the loss of each, and for all being back."""
        left = [[x for x in islands if x != name] for name in islands]
        clusters = [self._only(names) for names in left if names]
        self._ahead.prepare([*clusters, self._saved.cluster])


def used(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Islands that a plan gives something to do or to hold, in the cluster's order."""
    names = {name for _, stage in plan.stages() for name in stage.devices}
    names |= {name for share in plan.state for name in share.shares}
    return tuple(
        island
        for island, devices in cluster.islands.items()
        if not names.isdisjoint(devices)
    )
