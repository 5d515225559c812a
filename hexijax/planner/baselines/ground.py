"""What all baselines know of one problem: found by the first that asks, for all.

    chain, cluster, batch size, dtype, options -> ground -> Ground

Nothing here depends on who asked before: every figure is a function of its arguments,
so that a baseline alone and the same one after eight others give equal plans.
"""

import dataclasses
import functools
import itertools

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.planner.baselines.bounds import Bounds, held_params
from hexijax.planner.baselines.devices import Block, Pipeline, Yard
from hexijax.planner.baselines.draft import Rules
from hexijax.planner.baselines.fits import Fit, Fits, Setting
from hexijax.planner.baselines.shares import Ends, FitsByClass, ends
from hexijax.planner.baselines.sizes import Sizes
from hexijax.planner.baselines.ways import Classes, Key, Ways
from hexijax.planner.judge import Judge
from hexijax.planner.options import PlanOptions


class Ground:
    """One chain, cluster, batch and options, and what follows from them."""

    def __init__(
        self,
        chain: Chain,
        cluster: Cluster,
        batch_size: int,
        dtype: str,
        options: PlanOptions,
    ) -> None:
        self.chain, self.batch_size, self.options = chain, batch_size, options
        self.num_params = chain.num_trained
        """Those that train: what is summed, updated and stored beside its copies."""
        self.chain_hash, self.cluster_hash = chain.fingerprint(), cluster.fingerprint()
        self.yard = Yard(chain, cluster, dtype, options.tensor_degrees)
        self.ways = Ways(self.yard, self.num_params)
        self.bounds = Bounds(chain, self.ways, batch_size)
        self.sizes = Sizes(batch_size, options)
        self.fits = Fits(chain, self.ways, batch_size, options)
        self.judge = Judge(chain, cluster, options)
        self.grids: dict[tuple[Block, ...], tuple[tuple[Pipeline, ...], ...]] = {}
        """Even grids on blocks in an order, kept by whoever makes them."""
        self._ends: dict[object, Ends | None] = {}
        self._room: dict[object, bool] = {}

    def has_room(self, pipeline: Pipeline, members: int, *, stateless: bool) -> bool:
        """Whether a replica's memory is enough for parameters, gradients and state."""
        key = (self.ways.key(pipeline), members, stateless)
        if key not in self._room:
            held = sum(
                held_params(
                    mesh,
                    members,
                    moments=None if stateless else self.options.moments,
                    whole_leaves=self.options.whole_leaves,
                    trained=self.num_params / self.chain.num_params,
                )
                for mesh in pipeline
            )
            self._room[key] = held >= self.chain.num_params
        return self._room[key]

    def has_place(
        self, rules: Rules, classes: Classes, size: int | None, setting: Setting
    ) -> bool:
        """Whether all layers have a place in every pipeline: told without a split."""
        return all(
            self.fits.has_place(
                classes[key][0], sizes[0], rules.layers, rules.spans, setting
            )
            for key, sizes in self.sizes.own(rules, classes, size).items()
        )

    def by_class(
        self, rules: Rules, classes: Classes, size: int | None, setting: Setting
    ) -> FitsByClass | None:
        """Fits of the shared size, or of each class's own; None: one has none."""
        spans = rules.spans
        if spans is None and rules.is_common_split:
            assert size is not None, "a common split is made for one size"
            pipelines = [pipeline for pipeline, _ in classes.values()]
            spans = self.fits.common_spans(pipelines, size, setting)
            if spans is None:
                return None
        found: dict[Key, list[Fit]] = {}
        for key, sizes in self.sizes.own(rules, classes, size).items():
            pipeline, _ = classes[key]
            made = (
                self.fits.fit(pipeline, one, rules.layers, spans, setting)
                for one in sizes
            )
            # What is too much for one size is for every larger one.
            found[key] = [fit for fit in itertools.takewhile(bool, made) if fit]
            if not found[key]:
                return None
        return found

    def ends(
        self, rules: Rules, classes: Classes, size: int | None, setting: Setting
    ) -> Ends | None:
        """When the computing part of a step ends; None: no room."""
        counts = tuple((key, count) for key, (_, count) in classes.items())
        key = (counts, rules, size, setting)
        if key not in self._ends:
            fits = self.by_class(rules, classes, size, setting)
            self._ends[key] = (
                ends(self.batch_size, rules, classes, fits) if fits else None
            )
        return self._ends[key]


def ground(
    chain: Chain,
    cluster: Cluster,
    *,
    batch_size: int,
    dtype: str,
    options: PlanOptions,
) -> Ground:
    """The ground of a problem; that of the last one is kept."""
    return _ground(_Same(chain), _Same(cluster), batch_size, dtype, options)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Large data as a key: equal to itself alone, so that no field is compared."""

    of: object

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.of is self.of


@functools.lru_cache(maxsize=1)
def _ground(
    chain: _Same, cluster: _Same, batch_size: int, dtype: str, options: PlanOptions
) -> Ground:
    assert isinstance(chain.of, Chain)
    assert isinstance(cluster.of, Cluster)
    return Ground(chain.of, cluster.of, batch_size, dtype, options)
