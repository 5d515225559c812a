"""Rough plans of a draft: one for each microbatch size and remat policy that fits.

    Draft -> Sketcher.sketches -> (Sketch: rough seconds, ...)

A sketch's seconds are ideal 1F1B and a sum over the slowest node link: enough to tell
which plans are worth the judge's time. What its bound already shows to be far behind
the best so far is never settled.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from hexijax.costs.rates import HOST_CALL_S
from hexijax.layers.chain import Remat
from hexijax.planner.baselines.draft import Draft
from hexijax.planner.baselines.fits import Setting
from hexijax.planner.baselines.ground import Ground
from hexijax.planner.baselines.runs import segment_lengths
from hexijax.planner.baselines.uneven import state_shares
from hexijax.planner.baselines.ways import Classes

UNEVEN_SHARES = (0.95, 0.8, 0.65, 0.5, 0.35)
"""Of a device's memory, for all but the state: what to try where state is uneven."""

WORTH = 1.1
"""Of the best rough seconds so far: a draft or size whose bound is beyond is left."""

WORTH_OF_OWN = 1.02
"""The same, of the draft's own best: its other sizes are much alike."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sketch:
    """A plan not yet written down."""

    step_s: float
    """Rough seconds of a step."""

    draft: Draft
    size: int | None
    """Samples of a lane's microbatch; None: each replica's own."""

    policies: tuple[Remat, ...]
    """Remat to choose from."""

    per_segment: int | None
    """Most layers of a segment."""

    share: float = 1.0
    """Of each device's memory that was left for all but uneven state."""

    def setting(self, ground: Ground, share: float = 1.0) -> Setting:
        """With a share of each device's memory."""
        return ground.fits.setting(
            len(self.draft.pipelines),
            self.policies,
            self.per_segment,
            share * self.share,
            stateless=self.draft.rules.uneven_state,
        )


class Sketcher:
    """Sketches of one baseline."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.best_s = math.inf
        """Of all its sketches so far, in rough seconds."""

    def sketches(self, draft: Draft) -> Iterator[Sketch]:
        """Those worth looking at; whoever takes them lowers ``best_s``."""
        ground, rules = self._ground, draft.rules
        members = len(draft.pipelines)
        if members > ground.batch_size or not members:
            return
        classes = ground.ways.classes(draft.pipelines)
        bound_s = ground.bounds.draft_s(rules, classes)
        if bound_s > self.best_s * WORTH:
            return
        sync_s = ground.ways.sync_s(draft.pipelines)
        if bound_s + sync_s > self.best_s * WORTH:
            return
        own_s, too_large = math.inf, math.inf
        for bound_s, size in self._by_bound(draft, classes):
            if bound_s + sync_s > min(self.best_s * WORTH, own_s * WORTH_OF_OWN):
                return
            if size is not None and size >= too_large:
                continue
            found = False
            for policies in self._choices(draft):
                sketch = self._first(draft, classes, size, policies, sync_s)
                if sketch:
                    own_s = min(own_s, sketch.step_s)
                    found = True
                    yield sketch
            if not found and size is not None:
                too_large = size

    def _by_bound(
        self, draft: Draft, classes: Classes
    ) -> list[tuple[float, int | None]]:
        """Microbatch sizes, the most promising first."""
        sizes, rules = self._ground.sizes, draft.rules
        found: list[tuple[float, int | None]] = []
        for size in sizes.shared(rules, classes):
            bound_s = 0.0
            if size is not None:
                own = sizes.own(rules, classes, size)
                bound_s = self._ground.bounds.size_s(rules, classes, own)
            found.append((bound_s, size))
        return sorted(found, key=lambda pair: pair[0])

    def _choices(self, draft: Draft) -> list[tuple[Remat, ...]]:
        policies = self._ground.options.remat
        if draft.rules.uniform_remat:
            return [(policy,) for policy in policies]
        return [policies]

    def _first(
        self,
        draft: Draft,
        classes: Classes,
        size: int | None,
        policies: tuple[Remat, ...],
        sync_s: float,
    ) -> Sketch | None:
        """The first that fits, which is the fastest: the longest segments."""
        ground = self._ground
        shares = UNEVEN_SHARES if draft.rules.uneven_state else (1.0,)
        segments = ground.sizes.segments(len(draft.pipelines))
        for share, per_segment in itertools.product(shares, segments):
            sketch = Sketch(
                step_s=math.inf,
                draft=draft,
                size=size,
                policies=policies,
                per_segment=per_segment,
                share=share,
            )
            setting = sketch.setting(ground)
            ends = ground.ends(draft.rules, classes, size, setting)
            if ends is None or (
                draft.rules.uneven_state
                and state_shares(ground, draft, size, setting) is None
            ):
                continue
            calls = 2 * sum(len(segment_lengths(n, per_segment)) for n in ends.lengths)
            crowd = ground.ways.crowd(draft.pipelines)
            dispatch_s = ends.microbatches * crowd * calls / len(ends.lengths)
            step_s = max(ends.compute_s, dispatch_s * HOST_CALL_S) + sync_s
            return dataclasses.replace(sketch, step_s=step_s)
        return None
