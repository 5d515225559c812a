"""What runs of layers cost on the meshes of a replica, with memory and without.

    meshes, sizes -> Tables.unlimited -> SpanTable, one a stage, for many settings
    spans, Setting -> Tables.fits ; where they do not -> Tables.limited -> SpanTable

A split that is best where memory is no limit, and fits, is best. So most settings share
their tables, and those with limits are made only where something does not fit.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from hexijax.costs.activations import (
    Waiting,
    handed_microbatches,
    live_microbatches,
    makes_room,
)
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Replica, Schedule, Stage
from hexijax.planner.arrays import LayerArrays, ShapeArrays
from hexijax.planner.layers import Span
from hexijax.planner.mesh import Mesh
from hexijax.planner.options import PlanOptions
from hexijax.planner.regime import Regime
from hexijax.planner.spans import SpanTable, span_tables, unlimited_tables
from hexijax.planner.terms import Asked, Chosen, Held, Load, has_room, is_joined

MOST_TABLE_BYTES = 2**30
"""Tables that are kept; a search of hundreds of devices and a hundred layers would make
twenty times as many, of which few are asked for twice."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the replicas of one layout have in common."""

    batch_size: int
    """Of the whole step."""

    elsewhere: float
    """Devices over which each parameter's state is spread, beside a stage's own."""

    members: int
    """Stages over which each gradient is summed, one a replica."""

    per_segment: int | None
    """Most layers of a segment."""

    budget_share: float = 1.0
    """Of usable memory; below 1 where a first plan promised too much, infinite where
    memory is no limit."""

    @property
    def unlimited(self) -> "Setting":
        """What is left of it where memory is no limit."""
        return dataclasses.replace(
            self, elsewhere=0.0, members=1, budget_share=math.inf
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Layers over the stages of a replica."""

    spans: tuple[Span, ...]
    """Layers of each stage."""

    chosen: tuple[Chosen, ...]
    """Remat of each stage's layers."""


FreeKey = tuple[int, int, int | None, bool]
"""Of a table without limits: shape of the mesh, samples of a lane, most layers of a
segment, whether the loss's runs both ways at once."""

LimitedKey = tuple[int, int, bool, int, Setting, Held, Regime]
"""Of one with: shape of the mesh, samples of a lane, whether the stage is all of its
replica, stages that share its devices."""

Key = TypeVar("Key", FreeKey, LimitedKey)


class Known:
    """Arrays and tables that were made, for all schedules and regimes of a search."""

    def __init__(self, chain: Chain, options: PlanOptions) -> None:
        self._chain, self._remat = chain, options.remat
        self._arrays: dict[tuple[int, int], LayerArrays] = {}
        self._shapes: dict[int, ShapeArrays] = {}
        self.unlimited: dict[FreeKey, SpanTable] = {}
        self.limited: dict[LimitedKey, SpanTable] = {}
        self._num_bytes = 0

    def arrays(self, mesh: Mesh, samples: int) -> LayerArrays:
        """Of a mesh's shape and samples of a lane."""
        key = (mesh.shape_id, samples)
        if key not in self._arrays:
            shape = self._shapes.get(mesh.shape_id)
            if shape is None:
                shape = ShapeArrays(self._chain, mesh.shape)
                self._shapes[mesh.shape_id] = shape
            made = LayerArrays(self._chain, mesh.shape, samples, self._remat, shape)
            self._arrays[key] = made
        return self._arrays[key]

    def make_unlimited(self, missing: Mapping[FreeKey, Mesh]) -> None:
        """Together: equally cut into segments."""
        ((*_, per_segment, _), *_) = missing
        made = unlimited_tables(
            [self.arrays(mesh, key[1]) for key, mesh in missing.items()],
            [key[3] for key in missing],
            per_segment,
            self._remat,
        )
        self._keep(self.unlimited, missing, made)

    def make_limited(self, load: Load, missing: Mapping[LimitedKey, Asked]) -> None:
        """Together, under one load."""
        self._keep(self.limited, missing, span_tables(load, [*missing.values()]))

    def _keep(
        self, kept: dict[Key, SpanTable], keys: Iterable[Key], made: list[SpanTable]
    ) -> None:
        kept.update(zip(keys, made, strict=True))
        self._num_bytes += sum(table.num_bytes for table in made)

    def forget(self) -> None:
        """All tables, where they are too many; layouts that follow make theirs anew."""
        if self._num_bytes <= MOST_TABLE_BYTES:
            return
        self.unlimited.clear()
        self.limited.clear()
        for arrays in self._arrays.values():
            arrays.known.clear()
        self._num_bytes = 0


class Tables:
    """Tables under one schedule and regime."""

    def __init__(
        self, known: Known, options: PlanOptions, schedule: Schedule, regime: Regime
    ) -> None:
        self.known = known
        self._options, self._schedule, self._regime = options, schedule, regime
        self._helds: dict[tuple[int, int, int], list[Held]] = {}

    def free_keys(
        self, meshes: Sequence[Mesh], size: int, setting: Setting
    ) -> tuple[FreeKey, ...]:
        """Of each stage's table without limits."""
        return tuple(
            (shape_id, samples, setting.per_segment, is_joined(held, self._regime))
            for shape_id, samples, *_, held, _ in self._keys(meshes, size, setting)
        )

    def unlimited(
        self, meshes: Sequence[Mesh], sizes: Sequence[int], setting: Setting
    ) -> list[SpanTable]:
        """Of each stage, for the first of some sizes; those of all are made at once."""
        self.known.forget()
        found = self.known.unlimited
        every = [self.free_keys(meshes, size, setting) for size in sizes]
        wanted = {
            key: mesh
            for keys in every
            for key, mesh in zip(keys, meshes, strict=True)
            if key not in found
        }
        if wanted:
            self.known.make_unlimited(wanted)
        return [found[key] for key in every[0]]

    def fits(
        self,
        meshes: Sequence[Mesh],
        size: int,
        setting: Setting,
        split: Split,
    ) -> bool:
        """Whether all stages have room for what is best where memory is no limit."""
        if setting.budget_share == math.inf:
            return True
        load = self._load(setting)
        return all(
            has_room(self._asked(key, mesh), load, span, chosen)
            for key, mesh, span, chosen in zip(
                self._keys(meshes, size, setting),
                meshes,
                split.spans,
                split.chosen,
                strict=True,
            )
        )

    def limited(
        self, meshes: Sequence[Mesh], sizes: Sequence[int], setting: Setting
    ) -> list[SpanTable]:
        """As ``unlimited``, under the memory there is."""
        self.known.forget()
        found = self.known.limited
        every = [tuple(self._keys(meshes, size, setting)) for size in sizes]
        wanted = {
            key: mesh
            for keys in every
            for key, mesh in zip(keys, meshes, strict=True)
            if key not in found
        }
        if wanted:
            asked = {key: self._asked(key, mesh) for key, mesh in wanted.items()}
            self.known.make_limited(self._load(setting), asked)
        return [found[key] for key in every[0]]

    def _load(self, setting: Setting) -> Load:
        return Load(
            members=setting.members,
            moments=self._options.moments,
            per_segment=setting.per_segment,
            remat=self._options.remat,
            regime=self._regime,
        )

    def _keys(
        self, meshes: Sequence[Mesh], size: int, setting: Setting
    ) -> Iterator[LimitedKey]:
        """Of each stage's table."""
        most = -(-setting.batch_size // size)
        sharing = len(meshes) // len({mesh.devices for mesh in meshes})
        for mesh, held in zip(meshes, self._held(meshes, most, sharing), strict=True):
            samples = size // mesh.shape.lanes
            alone = len(meshes) == 1
            yield (mesh.shape_id, samples, alone, sharing, setting, held, self._regime)

    def _asked(self, key: LimitedKey, mesh: Mesh) -> Asked:
        """The table of a key."""
        _, samples, alone, sharing, setting, held, regime = key
        usable_bytes = mesh.shape.usable_memory_bytes
        return Asked(
            arrays=self.known.arrays(mesh, samples),
            state_devices=mesh.shape.num_devices + setting.elsewhere,
            budget_bytes=int(usable_bytes * setting.budget_share / sharing),
            held=held,
            sharing=sharing if regime.layered else 1,
            whole=alone,
        )

    def _held(self, meshes: Sequence[Mesh], asked: int, sharing: int) -> list[Held]:
        """What waits in each stage, were all the batch this replica's."""
        most = min(asked, 4 * len(meshes))  # only these two have more alive at once
        if self._schedule in (Schedule.GPIPE, Schedule.LAYERED):
            most = asked
        key = (len(meshes), most, sharing)
        if key not in self._helds:
            replica = Replica(
                stages=tuple(Stage(devices=m.devices, layers=(0, 1)) for m in meshes),
                microbatches=most,
                microbatch_size=1,
                samples=most,
            )
            live = live_microbatches(self._schedule, replica)
            late = handed_microbatches(self._schedule, replica)
            alive = list(map(_rounded, live))
            self._helds[key] = [
                Held(
                    live=alive[s],
                    handed=late[s],
                    waiting=self._waiting(replica, alive, s),
                )
                for s in range(len(alive))
            ]
        return self._helds[key]

    def _waiting(self, replica: Replica, alive: Sequence[int], s: int) -> Waiting:
        """Where another stage makes room for cotangents, none: borders are alike."""
        waiting = Waiting.of(alive, s)
        if makes_room(self._schedule, replica, s) is None:
            return waiting
        return dataclasses.replace(waiting, right=0)


def _rounded(live: int) -> int:
    """Up to an eighth more, so that the stages of long pipelines share tables."""
    step = 1 << max(0, live.bit_length() - 4)
    return -(-live // step) * step
