"""How long hosts take to dispatch the calls of a step: no step is shorter.

    layout, layers, microbatches -> dispatch_s -> seconds of the busiest island's host

Each microbatch's passes over a segment are calls, and what it sends to stages beside
its own; once a step, what sums gradients and brings new parameters, for each run of
layers that no replica cuts. So many stages in one node, or replicas of unlike segments,
keep its host busy.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.rates import HOST_CALL_S
from hexijax.planner.batches import BatchShare
from hexijax.planner.fit import Fitted
from hexijax.planner.mesh import Layout
from hexijax.planner.segments import segments

SUM_CALLS, SENT_CALLS, OWN_CALLS = 6, 3, 2
"""Of a run's gradients: cut, sent, added up, updated, fetched, joined; where its state
may be elsewhere, cut, sent, joined; where there is one replica, added up, updated."""


def dispatch_s(
    layout: Layout,
    fitted: Sequence[Fitted],
    shares: Sequence[BatchShare],
    per_segment: int | None,
    cluster: Cluster,
    *,
    at_home: bool = True,
) -> float:
    """Seconds a step; a stage's calls are its first device's island's.

    Args:
      at_home: each stage has a part of its layers' state; else that is not known, and
        calls are the fewest.
    """
    spans = {
        span for fit in {id(fit): fit for fit in fitted}.values() for span in fit.spans
    }
    cuts = {span: segments(span[1] - span[0], per_segment) for span in spans}
    edges = sorted(
        {
            edge
            for (at, _), cut in cuts.items()
            for edge in itertools.accumulate(cut, initial=at)
        }
    )
    several = SUM_CALLS if at_home else SENT_CALLS
    once = several if len(layout) > 1 else OWN_CALLS
    runs = {
        (first, stop): once * (bisect_left(edges, stop) - bisect_left(edges, first))
        for first, stop in spans
    }
    calls: dict[str, int] = {}
    for meshes, fit, share in zip(layout, fitted, shares, strict=True):
        stages = len(fit.spans)
        for k, span in enumerate(fit.spans):
            island = cluster.device(meshes[k % len(meshes)].devices[0]).island
            each = calls_of(k, stages, len(cuts[span]))
            made = share.microbatches * each + runs[span]
            calls[island] = calls.get(island, 0) + made
    return max(calls.values()) * HOST_CALL_S


def calls_of(stage: int, stages: int, num_segments: int = 1) -> int:
    """A host's calls of a microbatch at one of some stages: passes, of which the last
    forward does its backward, too, and a send to each stage beside it."""
    return 2 * num_segments + (stage > 0) + (stage < stages - 1) - (stage == stages - 1)


def paces_s(layout: Layout, cluster: Cluster) -> list[float]:
    """Of each replica, seconds a microbatch of its busiest host, were all replicas' as
    many: less it cannot take, however fast its devices are."""
    calls: dict[str, int] = {}
    islands: list[set[str]] = []
    for meshes in layout:
        found = [cluster.device(mesh.devices[0]).island for mesh in meshes]
        islands.append(set(found))
        for k, island in enumerate(found):
            calls[island] = calls.get(island, 0) + calls_of(k, len(meshes))
    return [HOST_CALL_S * max(calls[island] for island in own) for own in islands]
