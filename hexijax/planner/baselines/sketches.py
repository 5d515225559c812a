"""Rough plans of a draft: one for each microbatch size and remat policy that fits.

    Draft -> Sketcher.sizes -> bounds -> settled -> (Sketch: rough seconds, ...)

A sketch's seconds are ideal 1F1B and a sum over the slowest node link: enough to tell
which plans are worth the judge's time.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from hexijax.costs.rates import HOST_CALL_S
from hexijax.layers.chain import Remat
from hexijax.planner.baselines.draft import Draft, Layers
from hexijax.planner.baselines.fits import Setting
from hexijax.planner.baselines.ground import Ground
from hexijax.planner.baselines.runs import segment_lengths
from hexijax.planner.baselines.uneven import state_shares
from hexijax.planner.baselines.ways import Classes

UNEVEN_SHARES = (0.95, 0.8, 0.65, 0.5, 0.35)
"""Of a device's memory, for all but the state: what to try where state is uneven."""

MOST_COUNTED = 4
"""Sizes of a pipeline's own that count as effort."""


BALANCED_EFFORT = 4
"""Even stages that are settled as soon as one of a balanced split."""


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
        self.spent = 0
        """Stages of unlike pipelines and sizes that were settled, known or not."""

    def key(self, draft: Draft) -> object | None:
        """Equal for drafts of equal sketches; None where nothing can come of it."""
        ground = self._ground
        if not 0 < len(draft.pipelines) <= ground.batch_size:
            return None
        classes = ground.ways.classes(draft.pipelines)
        counts = tuple((key, count) for key, (_, count) in classes.items())
        sync_s = ground.ways.sync_s(draft.pipelines)
        return counts, draft.rules, sync_s, ground.ways.crowd(draft.pipelines)

    def sizes(self, draft: Draft) -> list[tuple[float, int | None]]:
        """Microbatch sizes and the least rough seconds of a step with them.

        Ascending; none where some replica cannot hold the model.
        """
        ground, rules = self._ground, draft.rules
        classes = ground.ways.classes(draft.pipelines)
        members = len(draft.pipelines)
        for pipeline, _ in classes.values():
            if not ground.has_room(pipeline, members, stateless=rules.uneven_state):
                return []
        sizes = ground.sizes.shared(rules, classes)
        sync_s = ground.ways.sync_s(draft.pipelines)
        if sizes[0] is None:
            return [(ground.bounds.draft_s(classes) + sync_s, None)]
        owns = [ground.sizes.own(rules, classes, size) for size in sizes]
        own = {key: [sizes[key][0] for sizes in owns] for key in classes}
        bounds_s = ground.bounds.sizes_s(rules, classes, own) + sync_s
        return list(zip(bounds_s.tolist(), sizes, strict=True))

    def with_room(
        self, draft: Draft, sizes: Sequence[tuple[float, int | None]]
    ) -> Sequence[tuple[float, int | None]]:
        """Of ascending sizes those up to the largest with room: by bisection."""
        if sizes[0][1] is None:
            return sizes
        ground, rules = self._ground, draft.rules
        classes = ground.ways.classes(draft.pipelines)
        self.spent += sum(len(pipeline) for pipeline, _ in classes.values())
        members = len(draft.pipelines)
        settings = [
            ground.fits.setting(
                members, ground.options.remat, most, stateless=rules.uneven_state
            )
            for most in ground.sizes.segments(members)
        ]

        def is_full(pair: tuple[float, int | None]) -> bool:
            return not any(
                ground.has_place(rules, classes, pair[1], setting)
                for setting in settings
            )

        return sizes[: bisect.bisect_left(sizes, True, key=is_full)]

    def settled(self, draft: Draft, size: int | None) -> Iterator[Sketch]:
        """The sketch of one size; one of each policy where that is one for all."""
        ground, rules = self._ground, draft.rules
        classes = ground.ways.classes(draft.pipelines)
        sync_s = ground.ways.sync_s(draft.pipelines)
        own = ground.sizes.own(rules, classes, size)
        # Of many sizes most are told at once: known, or larger than one with no room.
        work = sum(
            len(classes[key][0]) * min(len(own[key]), MOST_COUNTED) for key in classes
        )
        if rules.layers is Layers.EVEN:
            work = -(-work // BALANCED_EFFORT)
        for policies in self._choices(draft):
            sketch = self._first(draft, classes, size, policies, sync_s, work)
            if sketch:
                yield sketch

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
        work: int,
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
            self.spent += work
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
