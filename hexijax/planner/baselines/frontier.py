"""Which drafts are settled, in which order, and how many: the best bound first.

    drafts -> Frontier.add -> bounds -> Frontier.settle -> (Sketch, ...)

A bound costs a sum, a settled draft its layers and memory. So all drafts have bounds,
and of each pool a counted number of stages is settled: what is tried does not depend on
the clock, nor on what others have found before.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator

from hexijax.planner.baselines.draft import Draft
from hexijax.planner.baselines.sketches import Sketch, Sketcher

WORTH = 1.1
"""Of the best rough seconds so far: what has its bound beyond is left."""

WORTH_OF_OWN = 1.02
"""The same, of the draft's own best: its other sizes are much alike."""


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """A draft of which some microbatch sizes are not settled yet."""

    draft: Draft
    sizes: list[tuple[float, int | None]]
    """With their bounds: ascending at first, by bound and the best last then."""

    is_sorted: bool = False
    """Those that are too large are gone."""

    own_s: float = math.inf
    """Of its sketches so far."""


class Frontier:
    """Drafts of one baseline that wait for their turn."""

    def __init__(self, sketcher: Sketcher) -> None:
        self._sketcher = sketcher
        self._heap: list[tuple[float, int, _Open]] = []
        self._order = itertools.count()
        self._seen: set[object] = set()

    def add(self, drafts: Iterable[Draft]) -> None:
        """Takes those worth it; of drafts that cost the same, the first."""
        for draft in drafts:
            key = self._sketcher.key(draft)
            if key is None or key in self._seen:
                continue
            self._seen.add(key)
            sizes = self._sketcher.sizes(draft)
            if sizes:
                self._push(
                    min(bound_s for bound_s, _ in sizes),
                    _Open(draft=draft, sizes=sizes),
                )

    def settle(self, effort: int) -> Iterator[Sketch]:
        """Of the most promising; whoever takes them lowers the sketcher's best.

        Args:
          effort: stages that are settled, about.
        """
        sketcher, end = self._sketcher, self._sketcher.spent + effort
        while self._heap and sketcher.spent < end:
            bound_s, _, waits = heapq.heappop(self._heap)
            if bound_s > sketcher.best_s * WORTH:
                self._heap.clear()
                return
            if waits.is_sorted:
                yield from self._next_size(waits)
            else:
                sizes = sketcher.with_room(waits.draft, waits.sizes)
                waits.sizes = sorted(sizes, key=lambda pair: -pair[0])
                waits.is_sorted = True
            if waits.sizes and waits.sizes[-1][0] <= waits.own_s * WORTH_OF_OWN:
                self._push(waits.sizes[-1][0], waits)

    def _next_size(self, waits: _Open) -> Iterator[Sketch]:
        _, size = waits.sizes.pop()
        for sketch in self._sketcher.settled(waits.draft, size):
            waits.own_s = min(waits.own_s, sketch.step_s)
            yield sketch

    def _push(self, bound_s: float, waits: _Open) -> None:
        if bound_s <= self._sketcher.best_s * WORTH:
            heapq.heappush(self._heap, (bound_s, next(self._order), waits))
