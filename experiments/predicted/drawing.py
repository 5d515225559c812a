"""Plans for two cards, drawn at random by kind: what a planner could have chosen.

seed, chain, cluster -> Drawing -> plans by kind

Remat, segments, batches, splits and what lies in host memory are drawn for each; a plan
is kept if its promise fits the cards. No search: two dozen take seconds.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.predicted.cells import Cell
from experiments.predicted.listing import known_sizes
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import (
    Memory,
    Plan,
    Replica,
    Schedule,
    Stage,
    UpdateOrder,
    stage_place,
)
from hexijax.planner.offload.choice import Kept, LayerChoice, State, Weights
from hexijax.planner.offload.emit import placed_plan
from hexijax.report.judged import Judged, judge
from hexijax.runtime.profiling import even_segments

KINDS = {
    "one card": 8,
    "uneven batches": 3,
    "pipeline": 5,
    "tensor": 2,
    "lanes": 1,
    "offloaded": 2,
}
"""How many of each are drawn."""

SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE, Schedule.INTERLEAVED)
"""Of pipelines, in turn."""

FULLEST = 0.95
"""Part of a card's usable memory that a promise may take."""

CAPS = (0.4, 0.55, 0.7, 0.85)
"""Parts of what one card's plan takes with all of it resident: the memory that an
offloaded plan is made for."""

LONGEST_S = 1.2
"""A predicted step; a longer one costs machine time and tells no more."""

TRIES = 200
"""After which a kind is said not to fit."""

TRIES_UNDER_A_CAP = 20
"""After which an offloaded plan is given a tenth more."""

WHOLE = 0.4
"""Part of the stages that are compiled as one."""

A_SEGMENT = 4
"""Layers that are compiled as one where a stage is not."""


class Drawing:
    """Random plans of one model on two cards."""

    def __init__(self, cell: Cell, chain: Chain, cluster: Cluster, seed: int):
        self._cell, self._chain, self._cluster = cell, chain, cluster
        self._rng = random.Random(seed)
        self._names = tuple(device.name for device in cluster.devices)
        self._caps = self._shuffled(CAPS)
        self._last = len(chain.layers)

    def all(self, kinds: Mapping[str, int]) -> Iterator[tuple[str, Judged]]:
        """Plans with their predictions, each with its kind and number.

        Raises:
          UserError: no plan of a kind fits the cards.
        """
        draws: Mapping[str, Callable[[int], Plan]] = {
            "one card": lambda i: self._one_card(),
            "uneven batches": lambda i: self._uneven_batches(),
            "pipeline": lambda i: self._pipeline(SCHEDULES[i % len(SCHEDULES)]),
            "tensor": lambda i: self._wide(tensor=2),
            "lanes": lambda i: self._wide(tensor=1),
            "offloaded": self._offloaded,
        }
        seen: list[Plan] = []
        for kind, count in kinds.items():
            for i in range(count):
                judged = self._fitting(kind, lambda i=i, of=draws[kind]: of(i), seen)
                seen.append(dataclasses.replace(judged.plan, prediction=None))
                yield f"{kind} {i + 1}", judged

    def _fitting(
        self, kind: str, draw: Callable[[], Plan], seen: Sequence[Plan]
    ) -> Judged:
        for _ in range(TRIES):
            plan = draw()
            judged = self.judged(plan)
            full = any(
                parts.total_bytes
                > FULLEST * self._cluster.device(name).usable_memory_bytes
                for name, parts in judged.memory.items()
            )
            if not full and judged.step_s <= LONGEST_S and plan not in seen:
                return judged
        raise UserError(
            f"None of {TRIES} drawn plans of kind {kind!r} was new, fitted "
            f"{FULLEST:.0%} of the cards' memory and had a step of {LONGEST_S:g} s or "
            "less. Draw fewer of that kind, or smaller microbatches."
        )

    def judged(self, plan: Plan) -> Judged:
        """A plan and what it promises."""
        problem = self._cell.problem(
            self._chain, self._cluster, plan.batch_size, clip=True
        )
        return judge("drawn", plan, problem)

    # Kinds.

    def _one_card(self) -> Plan:
        return self._plan(
            [self._replica([self._stage((self._rng.choice(self._names),))])]
        )

    def _uneven_batches(self) -> Plan:
        """A replica a card, of unlike batches."""
        while True:
            replicas = [self._replica([self._stage((name,))]) for name in self._names]
            if len({replica.samples for replica in replicas}) > 1:
                return self._plan(replicas)

    def _pipeline(self, schedule: Schedule) -> Plan:
        """Unlike stages; two of each card under ``interleaved``."""
        count = 4 if schedule is Schedule.INTERLEAVED else 2
        cuts = [0, *self._cuts(count), self._last]
        remat = self._rng.choice(list(Remat))
        stages = [
            self._stage((self._names[i % 2],), (cuts[i], cuts[i + 1]), remat)
            for i in range(count)
        ]
        size = self._rng.choice(self._cell.sizes[:-1])
        fewest = 2 * len(self._names)
        replica = self._replica(stages, size, fewest=fewest, cards=2)
        return self._plan([replica], schedule)

    def _wide(self, *, tensor: int) -> Plan:
        """One stage on both cards, of a microbatch whose times are known."""
        lanes = len(self._names) // tensor
        stage = dataclasses.replace(
            self._stage(self._names), tensor=tensor, lanes=lanes
        )
        sizes = known_sizes(self._chain, self._cluster, stage, max(self._cell.sizes))
        size = self._rng.choice(sizes or self._cell.sizes) * lanes
        return self._plan([self._replica([stage], size, cards=2)])

    def _offloaded(self, number: int) -> Plan:
        """One card of which a part may be used, some layers' state, parameters and
        activations in host memory; for the first larger part that a draw fits."""
        name = self._names[number % len(self._names)]
        least = self._plan([self._replica([self._stage((name,), remat=Remat.FULL)], 1)])
        cap = self._peak_bytes(least) * self._caps[number % len(self._caps)]
        while True:
            for _ in range(TRIES_UNDER_A_CAP):
                plan = self._placed(name)
                if self._peak_bytes(plan) <= cap:
                    return plan
            cap *= 1.1

    def _placed(self, name: str) -> Plan:
        """Each layer's microbatches together, and layers placed at random."""
        rng, last = self._rng, self._last
        kept = rng.choice([Kept.DOTS, Kept.FULL, Kept.HOST])
        state = rng.choice([State.STREAMED, State.HOST])
        on_host, streamed = sorted(rng.sample(range(last + 1), 2), reverse=True)
        choices = tuple(
            LayerChoice(
                weights=Weights.STREAMED if i < streamed else Weights.KEPT,
                state=state if i < on_host else State.DEVICE,
                kept=kept if i < last - 1 else Kept.NONE,
            )
            for i in range(last)
        )
        stage = dataclasses.replace(
            self._stage((name,)),
            segments=(last,),
            waits=(rng.choice(list(Memory)),),
        )
        low, high = self._cell.samples
        size = rng.choice(self._cell.sizes)
        count = rng.randint(max(1, low // size), max(1, (low + high) // 2 // size))
        replica = Replica(
            stages=(stage,),
            microbatches=count,
            microbatch_size=size,
            samples=count * size,
        )
        return placed_plan(
            self._plan([replica], Schedule.LAYERED),
            self._chain,
            {stage_place(0, 0): choices},
            order=rng.choice(list(UpdateOrder)),
        )

    def _peak_bytes(self, plan: Plan) -> int:
        memory = self.judged(plan).memory.values()
        return max(parts.total_bytes for parts in memory)

    # Parts of them.

    @property
    def _dtype(self) -> str:
        return self._cell.make().dtype

    def _plan(
        self, replicas: Sequence[Replica], schedule: Schedule = Schedule.ONE_F_ONE_B
    ) -> Plan:
        samples = sum(replica.samples for replica in replicas)
        return Plan(replicas=tuple(replicas), batch_size=samples, schedule=schedule)

    def _replica(
        self,
        stages: Sequence[Stage],
        size: int = 0,
        *,
        fewest: int = 1,
        cards: int = 1,
    ) -> Replica:
        """Microbatches of ``size`` (0: drawn), the last perhaps not full."""
        size = size or self._rng.choice(self._cell.sizes)
        low, high = (bound * cards for bound in self._cell.samples)
        samples = self._rng.randint(max(low, fewest * size), max(high, fewest * size))
        if self._rng.random() < 0.75:
            samples = max(fewest, samples // size) * size
        return Replica(
            stages=tuple(stages),
            microbatches=-(-samples // size),
            microbatch_size=size,
            samples=samples,
        )

    def _stage(
        self,
        devices: tuple[str, ...],
        layers: tuple[int, int] | None = None,
        remat: Remat | None = None,
    ) -> Stage:
        start, stop = layers or (0, self._last)
        policies = [remat] * 2 if remat else self._rng.choices(list(Remat), k=2)
        changed = self._rng.randint(start, stop)
        return Stage(
            devices=devices,
            layers=(start, stop),
            dtype=self._dtype,
            segments=self._segments(start, stop),
            remat=tuple(policies[i >= changed] for i in range(start, stop)),
        )

    def _segments(self, start: int, stop: int) -> tuple[int, ...]:
        """The whole stage, or runs of few layers."""
        if self._rng.random() < WHOLE:
            return (stop - start,)
        ends: list[int] = []
        end = 0
        for count in even_segments(self._chain, A_SEGMENT):
            end += count
            ends.append(min(max(end, start), stop))
        spans = (b - a for a, b in itertools.pairwise([start, *ends]))
        return tuple(span for span in spans if span)

    def _cuts(self, count: int) -> list[int]:
        """Where unlike stages end, none less than half an equal part."""
        least = self._last // count // 2
        while True:
            cuts = sorted(self._rng.sample(range(1, self._last), count - 1))
            spans = [b - a for a, b in itertools.pairwise([0, *cuts, self._last])]
            if min(spans) >= least and len(set(spans)) > 1:
                return cuts

    def _shuffled(self, of: Sequence[float]) -> list[float]:
        return self._rng.sample(of, len(of))
