"""Layers, remat and pace of one replica's meshes, for every microbatch size.

    meshes, Setting -> Fitter.fits -> (Fitted, ...), one or more a size that fits

Replicas of equal shape are fitted once, and so are equal stages of unlike replicas.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from hexijax.cluster import Cluster
from hexijax.costs.activations import enter_bytes
from hexijax.costs.compute import layer_times, missing_times
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Schedule, Stage
from hexijax.planner.batches import BatchOption
from hexijax.planner.border import Border, Borders
from hexijax.planner.layers import Span, splits
from hexijax.planner.mesh import Layout, Mesh
from hexijax.planner.network import Network
from hexijax.planner.options import PlanOptions
from hexijax.planner.pace import pipeline_s
from hexijax.planner.regime import PLAIN, Regime
from hexijax.planner.segments import segments
from hexijax.planner.sizes import lane_sizes
from hexijax.planner.spans import SpanTable, remat_of
from hexijax.planner.tables import Known, Setting, Split, Tables

SLACKS = (0.0, 0.1, 0.3)
"""How much slower than its best pace a pipeline of unlike stages may be, to fill
sooner."""

PACE = SLACKS[:1]
"""Where that does not matter, or stages are alike."""

AHEAD: Mapping[Schedule, int | None] = {
    Schedule.GPIPE: None,
    Schedule.LAYERED: None,
    Schedule.EAGER: 2,
}
"""Microbatches a stage has more in flight than the next; one where it is not said."""

NO_GAIN, REMAT = 0.01, 0.03
"""Microbatches stop growing where two doublings made samples cheaper by less; and where
memory limits what would make them cheaper by less without, as remat takes more."""


MOST_EVEN = 64
"""Samples of a lane's microbatch, of a share that is cut evenly."""

TOGETHER = 2
"""Sizes whose tables are made at once."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fitted(Split):
    """Stages of a replica, and how long its microbatches take."""

    policies: tuple[Remat, ...]
    """Those to choose from."""

    stage_s: tuple[float, ...]
    """Forward and backward of one microbatch in each stage."""

    params: tuple[float, ...]
    """Parameters of each stage on one device."""

    sent_bytes: tuple[tuple[int, int], ...]
    """Of one microbatch across each border between stages, there and back."""

    option: BatchOption
    """The microbatch size, and its pace."""

    borders_s: tuple[float, ...]
    """Of one microbatch across each border."""

    way_s: float
    """What a microbatch takes of the way that most borders share."""

    @property
    def remat(self) -> tuple[tuple[Remat, ...], ...]:
        """Policies of each stage."""
        return tuple(
            remat_of(self.policies, chosen, stop - first)
            for chosen, (first, stop) in zip(self.chosen, self.spans, strict=True)
        )

    @functools.cached_property
    def early(self) -> BatchOption:
        """Its pace under eager 1F1B, were there room and devices for each stage."""
        first_s, next_s = pipeline_s(
            self.stage_s,
            self.borders_s,
            len(self.stage_s),
            ahead=AHEAD[Schedule.EAGER],
            way_s=self.way_s,
        )
        return BatchOption(size=self.option.size, first_s=first_s, next_s=next_s)


class Fitter:
    """Fits replicas of one chain to meshes of one cluster."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        options: PlanOptions,
        *,
        coarse: bool = False,
        regime: Regime = PLAIN,
        known: Known | None = None,
    ) -> None:
        self.coarse, self._regime = coarse, regime
        self._chain = chain
        self._cluster = cluster
        self._options = options
        self._schedule = options.schedule or Schedule.ONE_F_ONE_B
        self.network = Network(cluster)
        self._crossings = Borders(cluster, self.network)
        self.known = known or Known(chain, options)
        """What another may share, whatever its schedule."""
        self._tables = Tables(self.known, options, self._schedule, regime)
        self._bounds: dict[object, float] = {}
        self._rates: dict[int, float] = {}
        self._forms: dict[object, int] = {}
        self._form_of: dict[tuple[int, ...], int] = {}
        self._fits: dict[object, tuple[Fitted, ...]] = {}
        self._free: dict[object, tuple[Fitted, ...]] = {}
        """Those that memory does not limit, whatever the setting."""
        self._priced: dict[int, bool] = {}
        self._borders: dict[object, Border] = {}
        self._links: dict[object, int] = {}
        self._link_of: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}

    def fits(
        self,
        meshes: Sequence[Mesh],
        setting: Setting,
        own_split: tuple[int, ...] | None = None,
        *,
        slacks: tuple[float, ...] = SLACKS,
        share: int = 0,
    ) -> tuple[Fitted, ...]:
        """Every microbatch size worth trying; none where nothing fits.

        Args:
          meshes: of the replica.
          setting: what it has in common with the others.
          own_split: layers of each stage, where they are given.
          slacks: splits of layers by how much slower they may be than the fastest.
          share: samples that are cut evenly, too; 0: none.
        """
        if not _unlike(meshes):
            slacks = PACE
        key = (self.form(meshes), setting, own_split, slacks, share)
        if key not in self._fits:
            if not all(map(self.priced, meshes)):
                return ()
            if share:
                found = self.fits(meshes, setting, own_split, slacks=slacks)
                more = self._even(meshes, setting, own_split, slacks, share, found)
                self._fits[key] = (*found, *more)
            else:
                self._fits[key] = tuple(self._sizes(meshes, setting, own_split, slacks))
        return self._fits[key]

    def _even(
        self,
        meshes: Sequence[Mesh],
        setting: Setting,
        own_split: tuple[int, ...] | None,
        slacks: tuple[float, ...],
        share: int,
        found: Sequence[Fitted],
    ) -> tuple[Fitted, ...]:
        """A share in as few equal microbatches as may be, and one more, unless such a
        size was found or is much above those."""
        step = math.lcm(*(mesh.shape.lanes for mesh in meshes))
        known = [fitted.option.size for fitted in found]
        if not known:
            return ()
        least = min(mesh.shape.lanes for mesh in meshes)
        most = 2 * max(known)
        if (cap := self._options.max_microbatch_size) is not None:
            most = min(most, cap * least)
        fewest = -(-share // (MOST_EVEN * least))
        wanted = [-(-share // (count * step)) * step for count in (fewest, fewest + 1)]
        sizes = [x for x in dict.fromkeys(wanted) if x not in known and x <= most]
        if not sizes:
            return ()
        stages = [*meshes] * self.rounds(meshes)
        each = [sizes[i:] for i in range(len(sizes))]
        return tuple(
            fitted
            for x in each
            for fitted in self._of_size(stages, x, setting, own_split, slacks)[0]
        )

    def form(self, meshes: Sequence[Mesh]) -> int:
        """Equal for meshes and links that are equal but for their names."""
        key = tuple(map(id, meshes))
        if key not in self._form_of:
            links = tuple(self._link(a, b) for a, b in itertools.pairwise(meshes))
            form = (tuple(m.shape_id for m in meshes), links)
            self._form_of[key] = self._forms.setdefault(form, len(self._forms))
        return self._form_of[key]

    def priced(self, mesh: Mesh) -> bool:
        """Whether its kind's measurements, where there are some, cover the mesh."""
        if mesh.shape_id not in self._priced:
            missing = missing_times(self._chain, mesh.shape)
            self._priced[mesh.shape_id] = not missing
        return self._priced[mesh.shape_id]

    def _sizes(
        self,
        meshes: Sequence[Mesh],
        setting: Setting,
        own_split: tuple[int, ...] | None,
        slacks: tuple[float, ...],
    ) -> Iterator[Fitted]:
        step = math.lcm(*(mesh.shape.lanes for mesh in meshes))
        least = min(mesh.shape.lanes for mesh in meshes)
        cheapest_s, idle = math.inf, 0
        most = -(-setting.batch_size // step)
        cap = self._options.max_microbatch_size
        counts = lane_sizes(most, self._options, coarse=self.coarse)
        if cap is not None:
            counts = [c for c in counts if c * step // least <= cap]
        stages = [*meshes] * self.rounds(meshes)
        for i, count in enumerate(counts):
            size, until = count * step, i - i % TOGETHER + TOGETHER
            sizes = [c * step for c in counts[i:until]]
            worth_s = cheapest_s * (1 - NO_GAIN) * size
            most_s = cheapest_s * (1 - REMAT) if self.coarse else math.inf
            found, roomy = self._of_size(
                stages, sizes, setting, own_split, slacks, most_s
            )
            if not found:
                break  # nor would a larger one
            yield from found
            least_s = min(f.option.next_s for f in found)
            idle = idle + 1 if least_s > worth_s else 0
            cheapest_s = min(least_s / size, cheapest_s)
            limited = not roomy or setting.budget_share == math.inf
            if idle and self.coarse and limited:
                break
            if idle > (1 if self.coarse else 2) and len(meshes) > 1:
                break

    def _of_size(
        self,
        stages: Sequence[Mesh],
        sizes: Sequence[int],
        setting: Setting,
        own_split: tuple[int, ...] | None,
        slacks: tuple[float, ...],
        most_s: float = math.inf,
    ) -> tuple[tuple[Fitted, ...], bool]:
        """The best stages for the first of some sizes; whether memory is no limit.

        No stages where nothing fits, nor where memory is one and a sample costs more
        than ``most_s`` seconds without it.
        """
        found = self._unlimited(stages, sizes, setting, own_split, slacks)
        if all(self._tables.fits(stages, sizes[0], setting, f) for f in found):
            return found, True
        if min(f.option.next_s for f in found) / sizes[0] > most_s:
            return (), False
        tables = self._tables.limited(stages, sizes[:2], setting)
        return self._split(stages, tables, sizes[0], own_split, slacks), False

    def _unlimited(
        self,
        meshes: Sequence[Mesh],
        sizes: Sequence[int],
        setting: Setting,
        own_split: tuple[int, ...] | None,
        slacks: tuple[float, ...],
    ) -> tuple[Fitted, ...]:
        """The best stages for the first of some sizes, were memory no limit.

        Tables of all sizes are made at once.
        """
        free_keys = self._tables.free_keys(meshes, sizes[0], setting)
        key = (free_keys, self.form(meshes), own_split, slacks)
        if key not in self._free:
            tables = self._tables.unlimited(meshes, sizes, setting)
            self._free[key] = self._split(meshes, tables, sizes[0], own_split, slacks)
        return self._free[key]

    def _split(
        self,
        meshes: Sequence[Mesh],
        tables: Sequence[SpanTable],
        size: int,
        own_split: tuple[int, ...] | None,
        slacks: Sequence[float],
    ) -> tuple[Fitted, ...]:
        """The layers split over stages by tables of theirs; none where none fits."""
        spans: list[tuple[Span, ...]] = []
        if own_split is not None:
            edges = [sum(own_split[:k]) for k in range(len(own_split) + 1)]
            spans = [tuple(itertools.pairwise(edges))]
        elif len(meshes) == 1:
            spans = [((0, len(self._chain.layers)),)]
        else:
            costs = [table.seconds_FS for table in tables]
            spans = splits(costs, slacks)
        return tuple(
            self._fitted(meshes, tables, each, size)
            for each in dict.fromkeys(spans)
            if all(t.seconds(*x) < math.inf for t, x in zip(tables, each, strict=True))
        )

    def _fitted(
        self,
        meshes: Sequence[Mesh],
        tables: Sequence[SpanTable],
        spans: tuple[Span, ...],
        size: int,
    ) -> Fitted:
        stage_s = [t.seconds(*span) for t, span in zip(tables, spans, strict=True)]
        num_sets = len({mesh.devices for mesh in meshes})
        borders = [
            self._border(a, b, enter_bytes(self._chain, stop, a.shape.dtype, size))
            for (a, b), (_, stop) in zip(
                itertools.pairwise(meshes), spans, strict=False
            )
        ]
        for k, border in enumerate(borders):
            stage_s[k] += border.programs_s[0]
            stage_s[k + 1] += border.programs_s[1]
        borders_s, way_s = _ways(meshes, borders)
        ahead = AHEAD.get(self._schedule, 1)
        first_s, next_s = pipeline_s(
            stage_s, borders_s, num_sets, ahead=ahead, way_s=way_s
        )
        return Fitted(
            spans=spans,
            policies=self._options.remat,
            chosen=tuple(
                t.chosen(*span) for t, span in zip(tables, spans, strict=True)
            ),
            stage_s=tuple(stage_s),
            params=tuple(
                t.params(*span) for t, span in zip(tables, spans, strict=True)
            ),
            sent_bytes=tuple(x.sent_bytes for x in borders),
            option=BatchOption(size=size, first_s=first_s, next_s=next_s),
            borders_s=tuple(borders_s),
            way_s=way_s,
        )

    def bound_s(self, layout: Layout, samples: Sequence[int]) -> float:
        """Seconds a sample that no plan of the layout can beat.

        Every device computes all the time, at the best of some microbatch sizes.
        """
        rate = sum(self.rate(meshes, samples) for meshes in layout)
        return 1 / rate if rate else math.inf

    def rate(self, meshes: Sequence[Mesh], samples: Sequence[int]) -> float:
        """Samples a second of a replica whose devices compute all the time."""
        form = self.form(meshes)
        if form not in self._rates:
            self._rates[form] = sum(
                mesh.shape.lanes / self.sample_s(mesh, samples) for mesh in meshes
            )
        return self._rates[form]

    def sample_s(self, mesh: Mesh, samples: Sequence[int]) -> float:
        """Seconds of one sample through all layers, remat and calls left out."""
        if not self.priced(mesh):
            return math.inf
        if mesh.shape_id not in self._bounds:
            self._bounds[mesh.shape_id] = min(
                sum(t.total_s() for t in layer_times(self._chain, mesh.shape, count))
                / count
                for count in samples
            )
        return self._bounds[mesh.shape_id]

    def rounds(self, meshes: Sequence[Mesh]) -> int:
        """Stages each mesh holds."""
        if len(meshes) == 1:
            return 1
        interleaved = self._schedule is Schedule.INTERLEAVED
        return self._options.rounds if interleaved else self._regime.rounds

    def _border(self, a: Mesh, b: Mesh, num_bytes: int) -> Border:
        """Where two stages meet, equal ones once."""
        key = (self._link(a, b), a.shape_id, b.shape_id, num_bytes)
        if key not in self._borders:
            self._borders[key] = self._crossings.border(a, b, num_bytes)
        return self._borders[key]

    def _link(self, a: Mesh, b: Mesh) -> int:
        """Equal for pairs of meshes whose borders take equally long."""
        key = (a.devices, b.devices)
        if key not in self._link_of:
            link = None
            if a.devices != b.devices:
                link = self._cluster.link(a.devices[0], b.devices[0])
            cards = tuple(self._cluster.node(mesh.node).nic for mesh in (a, b))
            kind = (link, a.node == b.node, cards)
            self._link_of[key] = self._links.setdefault(kind, len(self._links))
        return self._link_of[key]


def _unlike(meshes: Sequence[Mesh]) -> bool:
    return len({mesh.shape_id for mesh in meshes}) > 1


def _ways(
    meshes: Sequence[Mesh], borders: Sequence[Border]
) -> tuple[list[float], float]:
    """How long a message of each border takes, and a microbatch the busiest way out.

    A mesh's devices send activations on and cotangents back the same way; a node's
    meshes share one. Stages work in step, so that a message finds it taken.
    """
    ways_s: dict[object, float] = {}
    taken: list[list[tuple[object, float]]] = []
    for (a, b), border in zip(itertools.pairwise(meshes), borders, strict=True):
        ways = [mesh.devices if a.node == b.node else mesh.node for mesh in (a, b)]
        taken.append(list(zip(ways, border.kept_s, strict=True)))
        for way, kept_s in taken[-1]:
            ways_s[way] = ways_s.get(way, 0.0) + kept_s
    borders_s = [
        border.seconds + sum(ways_s[way] - kept_s for way, kept_s in ways) / 2
        for border, ways in zip(borders, taken, strict=True)
    ]
    return borders_s, max(ways_s.values(), default=0.0)


def stages(
    meshes: Sequence[Mesh],
    fitted: Fitted,
    per_segment: int | None,
    regime: Regime = PLAIN,
) -> tuple[Stage, ...]:
    """The fitted stages, as the plan has them."""
    rounds = len(fitted.spans) // len(meshes)
    return tuple(
        Stage(
            devices=mesh.devices,
            layers=span,
            lanes=mesh.shape.lanes,
            tensor=mesh.shape.tensor,
            dtype=mesh.shape.dtype,
            segments=(cut := segments(span[1] - span[0], per_segment)),
            remat=remat,
            params=regime.params(len(cut)),
            waits=regime.memory(len(cut)),
        )
        for mesh, span, remat in zip(
            [*meshes] * rounds, fitted.spans, fitted.remat, strict=True
        )
    )
