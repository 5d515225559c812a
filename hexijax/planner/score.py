"""What a layout is worth: layers, remat, microbatches and batch shares, then seconds.

    Layout -> Scorer.score -> Scored -> Scorer.plan -> Plan

A formula, for thousands of layouts; the few best are played by the simulator. All that
follows the layout is exact under it: dynamic programming for layers, whole numbers for
the batch.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan, Replica, Schedule
from hexijax.planner.after import After
from hexijax.planner.batches import BatchOption, BatchShare, end_s, split_batch
from hexijax.planner.bound import sizes_up_to
from hexijax.planner.crossing import crossing_s
from hexijax.planner.dispatch import dispatch_s, paces_s
from hexijax.planner.fit import MOST_EVEN, PACE, Fitted, Fitter, stages
from hexijax.planner.mesh import Layout
from hexijax.planner.objective import Goal, Objective
from hexijax.planner.options import PlanOptions
from hexijax.planner.regime import PLAIN, Regime
from hexijax.planner.segments import OVERLAPPED, layers_per_segment, shorter
from hexijax.planner.tables import Known, Setting
from hexijax.planner.whole_batches import split_whole

ROOMY = 1.1
"""Of a batch in proportion to a replica's speed, for which it is to have room."""

EVENLY = 4 * MOST_EVEN
"""Samples of a lane's share up to which it is cut evenly, too: other sizes are powers
of two, and of few microbatches the last is mostly padding."""

FINE_DEVICES = 4
"""Up to so many devices every microbatch size is scored."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A layout with all that was decided for it."""

    layout: Layout
    """Meshes of each replica."""

    fitted: tuple[Fitted, ...]
    """Stages of each replica."""

    shares: tuple[BatchShare, ...]
    """What each replica takes of the batch."""

    setting: Setting
    """What they have in common."""

    step_s: float
    """By formula."""

    late_s: float
    """Of it, what comes after the last backward."""

    cost: float
    """What the objective counts; the step's seconds as a rule."""


class Scorer:
    """Scores layouts of one chain on one cluster."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        batch_size: int,
        options: PlanOptions,
        *,
        stateless: bool = False,
        regime: Regime = PLAIN,
        known: Known | None = None,
    ) -> None:
        """``stateless``: no state counts; where it goes is settled afterwards."""
        coarse = len(cluster.devices) > FINE_DEVICES
        options = regime.options(options)
        self.fitter = Fitter(
            chain, cluster, options, coarse=coarse, regime=regime, known=known
        )
        self.regime = regime
        self.count = 0
        self._chain = chain
        self._cluster = cluster
        self._batch_size = batch_size
        self._options = options
        self.stateless = stateless
        self._split = split_whole if options.per_microbatch else split_batch
        self._goal = Goal(cluster, options.objective, options.usd_per_hour)
        self._seen: dict[object, Scored | None] = {}
        self._network = self.fitter.network
        self._after = After(chain, self._network, options.moments)

    def under(
        self,
        options: PlanOptions,
        *,
        stateless: bool = False,
        regime: Regime = PLAIN,
    ) -> "Scorer":
        """The same under options that differ in schedule or segments only."""
        return Scorer(
            self._chain,
            self._cluster,
            self._batch_size,
            options,
            stateless=stateless,
            regime=regime,
            known=self.fitter.known,
        )

    def score(
        self, layout: Layout, budget_share: float = 1.0, most_samples: int | None = None
    ) -> Scored | None:
        """The layout at its best, or None where it cannot be.

        Args:
          layout: meshes of each replica.
          budget_share: of usable memory.
          most_samples: of a microbatch; None: as many as are fastest by the formula.
        """
        meshes_key = tuple(tuple(map(id, meshes)) for meshes in layout)
        key = (meshes_key, budget_share, most_samples)
        if key not in self._seen:
            self.count += 1
            self._seen[key] = self._score(layout, budget_share, most_samples)
        return self._seen[key]

    def _score(
        self, layout: Layout, budget_share: float, most_samples: int | None
    ) -> Scored | None:
        if not self.possible(layout):
            return None
        splits = self._own_splits(layout)
        if splits is None:
            return None
        for lengths in self._lengths(layout):
            made = (
                self._with_segments(
                    layout, splits, per_segment, budget_share, most_samples
                )
                for per_segment in lengths
            )
            found = min(filter(None, made), key=_cost, default=None)
            if found:
                return found
        return None

    def _lengths(self, layout: Layout) -> list[tuple[int | None, ...]]:
        """Most layers of a segment, what is wanted first; of some together the best.

        Where each stage has the loss, whole ones are one program both ways, that keeps
        nothing between them; shorter ones hide sums, and have more room.
        """
        asked = self._options.layers_per_segment
        if self.regime.layered:
            return [(self.regime.per_segment if asked is None else asked,)]
        lengths = shorter(layers_per_segment(len(layout), asked), asked)
        if asked is None and all(len(meshes) == 1 for meshes in layout):
            return [(None, OVERLAPPED), (1,)]
        return [(length,) for length in lengths]

    def _with_segments(
        self,
        layout: Layout,
        splits: Sequence[tuple[int, ...] | None],
        per_segment: int | None,
        budget_share: float,
        most_samples: int | None,
    ) -> Scored | None:
        setting = Setting(
            batch_size=self._batch_size,
            elsewhere=0.0,
            members=_above(len(layout)),
            per_segment=per_segment,
            budget_share=budget_share,
        )
        fits = self._fits(layout, splits, setting, most_samples)
        if fits is None:
            return None
        unlike: dict[tuple[int, float], list[BatchOption]] = {}
        options: list[list[BatchOption]] = []
        for found, pace_s in zip(fits, paces_s(layout, self._cluster), strict=True):
            key = (id(found), pace_s)
            if key not in unlike:
                unlike[key] = [fitted.option.no_faster(pace_s) for fitted in found]
            options.append(unlike[key])
        shares = self._split(self._batch_size, options)
        if shares is None:
            return None
        fitted = tuple(
            found[share.option] for found, share in zip(fits, shares, strict=True)
        )
        step_s = max(
            end_s(shares, options), crossing_s(layout, fitted, shares, self._network)
        )
        counts = None
        if self.regime.layered:
            counts = [share.microbatches for share in shares]
        late_s = self._after.late_s(
            layout, fitted, per_segment, counts, freed=self.regime.freed
        )
        calls_s = dispatch_s(
            layout,
            fitted,
            shares,
            per_segment,
            self._cluster,
            at_home=not self.stateless,
        )
        step_s = max(step_s + late_s, calls_s)
        return Scored(
            layout=layout,
            fitted=fitted,
            shares=shares,
            setting=setting,
            step_s=step_s,
            late_s=late_s,
            cost=self._cost(layout, fitted, shares, step_s),
        )

    def _fits(
        self,
        layout: Layout,
        splits: Sequence[tuple[int, ...] | None],
        setting: Setting,
        most_samples: int | None,
    ) -> list[tuple[Fitted, ...]] | None:
        """Of each replica what fits, one a microbatch size; None where one has none."""
        widths = [sum(m.shape.num_devices for m in x) / len(x) for x in layout]
        batches = self._batches(layout)
        settings = {
            (width, batch): dataclasses.replace(
                setting,
                batch_size=batch,
                elsewhere=math.inf if self.stateless else _below(sum(widths) - width),
            )
            for width, batch in set(zip(widths, batches, strict=True))
        }
        unlike: dict[object, tuple[Fitted, ...]] = {}
        fits: list[tuple[Fitted, ...]] = []
        for meshes, split, width, batch, share in zip(
            layout, splits, widths, batches, self._even(layout), strict=True
        ):
            key = (self.fitter.form(meshes), width, batch, split, share)
            if key not in unlike:
                found = self.fitter.fits(
                    meshes, settings[width, batch], split, share=share
                )
                if most_samples is not None:
                    found = tuple(f for f in found if f.option.size <= most_samples)
                if not found:
                    return None
                unlike[key] = found
            fits.append(unlike[key])
        return fits

    def _batches(self, layout: Layout) -> list[int]:
        """Samples that each replica takes at most.

        Where borders of all of its microbatches wait, about what it will take.
        """
        whole = self._batch_size
        if not self.regime.layered:
            return [whole] * len(layout)
        return [
            min(whole, math.ceil(ROOMY * share)) if share else whole
            for share in self._in_proportion(layout)
        ]

    def _in_proportion(self, layout: Layout) -> list[float]:
        """Samples of each replica, were the batch split by how fast they compute."""
        sizes = sizes_up_to(self._batch_size)
        rates = [self.fitter.rate(meshes, sizes) for meshes in layout]
        total = sum(rates) or 1
        return [self._batch_size * rate / total for rate in rates]

    def _even(self, layout: Layout) -> list[int]:
        """Samples of each replica that are to be cut evenly; 0 where none are."""
        lanes = [min(mesh.shape.lanes for mesh in meshes) for meshes in layout]
        few = self._batch_size <= 2 * EVENLY * sum(lanes)
        if not few or not self.fitter.coarse:
            return [0] * len(layout)
        shares = map(math.ceil, self._in_proportion(layout))
        return [
            share if share <= EVENLY * width else 0
            for share, width in zip(shares, lanes, strict=True)
        ]

    def least_s(self, layout: Layout) -> float:
        """What a layout's step takes at least, were memory no limit and sums free."""
        splits = self._own_splits(layout) if self.possible(layout) else None
        if splits is None:
            return math.inf
        setting = Setting(
            batch_size=self._batch_size,
            elsewhere=0.0,
            members=1,
            per_segment=self._lengths(layout)[0][0],
        ).unlimited
        unlike: dict[int, list[BatchOption]] = {}
        options: list[list[BatchOption]] = []
        for meshes, split in zip(layout, splits, strict=True):
            found = self.fitter.fits(meshes, setting, split, slacks=PACE)
            each = unlike.setdefault(id(found), [f.option for f in found])
            options.append(each)
        shares = self._split(self._batch_size, options)
        if not shares:
            return math.inf
        sized = [(s, x[s.option]) for s, x in zip(shares, options, strict=True)]
        # Padding is left out: a size that has less of it may be found.
        return max(
            option.end_s(s.microbatches) * s.samples / (s.microbatches * option.size)
            for s, option in sized
        )

    def early_cost(self, scored: Scored) -> float:
        """About what a layout scored under 1F1B costs under eager 1F1B.

        Were there room for what it keeps more; it costs no look at any span of layers.
        """
        splits = self._own_splits(scored.layout)
        assert splits is not None, "it was scored"
        fits = self._fits(scored.layout, splits, scored.setting, None)
        assert fits, "it was scored"
        unlike = {id(found): [f.early for f in found] for found in fits}
        shares = self._split(self._batch_size, options := [unlike[id(x)] for x in fits])
        assert shares, "it was scored"
        plain_s = max(
            fitted.option.end_s(share.microbatches)
            for fitted, share in zip(scored.fitted, scored.shares, strict=True)
        )
        shared_s = crossing_s(
            scored.layout, scored.fitted, scored.shares, self._network
        )
        early_s = max(shared_s, end_s(shares, options))
        gained_s = max(0.0, plain_s - early_s)
        return scored.cost * (1 - gained_s / scored.step_s)

    def _cost(
        self,
        layout: Layout,
        fitted: Sequence[Fitted],
        shares: Sequence[BatchShare],
        step_s: float,
    ) -> float:
        if self._goal.objective is Objective.STEP:
            return step_s
        busy_s: dict[str, float] = {}
        for meshes, fit, share in zip(layout, fitted, shares, strict=True):
            for mesh, stage_s in zip(
                itertools.cycle(meshes), fit.stage_s, strict=False
            ):
                for name in mesh.devices:
                    own_s = busy_s.get(name, 0.0)
                    busy_s[name] = own_s + share.microbatches * stage_s
        return self._goal.cost(step_s, busy_s)

    def form(self, scored: Scored) -> object:
        """Equal for layouts that differ in which of equal devices they name only."""
        return tuple(
            sorted(
                (
                    tuple(mesh.shape_id for mesh in meshes),
                    fit.spans,
                    share.samples,
                    tuple(a.node == b.node for a, b in itertools.pairwise(meshes)),
                )
                for meshes, fit, share in zip(
                    scored.layout, scored.fitted, scored.shares, strict=True
                )
            )
        )

    def plan(self, scored: Scored) -> Plan:
        """The plan, not judged yet."""
        return Plan(
            replicas=tuple(
                Replica(
                    stages=stages(
                        meshes, fitted, scored.setting.per_segment, self.regime
                    ),
                    microbatches=share.microbatches,
                    microbatch_size=fitted.option.size,
                    samples=share.samples,
                )
                for meshes, fitted, share in zip(
                    scored.layout, scored.fitted, scored.shares, strict=True
                )
            ),
            batch_size=self._batch_size,
            schedule=self._options.schedule or Schedule.ONE_F_ONE_B,
            reductions=self._options.reductions,
        )

    def possible(self, layout: Layout) -> bool:
        """Whether every stage can have a layer and every replica a sample."""
        num_layers = len(self._chain.layers)
        if self._options.per_microbatch and any(
            len({mesh.shape.lanes for mesh in meshes}) > 1 for meshes in layout
        ):
            return False
        return 0 < len(layout) <= self._batch_size and all(
            len(meshes) * self.fitter.rounds(meshes) <= num_layers for meshes in layout
        )

    def _own_splits(self, layout: Layout) -> list[tuple[int, ...] | None] | None:
        """The user's split of each replica; None if the layout is of another form."""
        asked = self._options.layers_per_stage
        if asked is None:
            return [None] * len(layout)
        if len(asked) not in (1, len(layout)):
            return None
        splits = list(asked) * (len(layout) if len(asked) == 1 else 1)
        for split, meshes in zip(splits, layout, strict=True):
            if len(split) != len(meshes) * self.fitter.rounds(meshes):
                return None
        return [*splits]


def _cost(scored: Scored) -> float:
    return scored.cost


def _below(count: float) -> float:
    """Four to a doubling: settings are few, and state is hardly promised too little."""
    if count < 1:
        return 0.0
    step = 2.0 ** (math.floor(math.log2(count)) - 2)
    return count // step * step


def _above(count: int) -> int:
    return 1 << (count - 1).bit_length()
