"""Stages with what is best in their host's memory.

    Plan, the judge -> Placer.place -> the Plan, placed, in one or two orders
    placed Plan -> Placer.near -> Plans that are placed a little otherwise

Only stages on devices that overflow are placed; the others stay as they are, so a mixed
cluster offloads on its small cards alone. The choice knows a stage by itself and plays
it as a model of a Program; memory is judged as every plan's is, and where a promise
came out too large the stage is placed anew with so much less. A layered stage may have
room for all gradients, or for those of some passes: the later ones then wait. Which of
them and which order of updates is faster, and whether a little more or less on the host
is, the simulator says.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hexijax.cluster import Cluster
from hexijax.costs.activations import live_microbatches
from hexijax.costs.host_rates import host_side
from hexijax.costs.memory import room_bytes
from hexijax.layers.chain import Chain
from hexijax.plan.plan import (
    CHUNK_SIZE,
    Memory,
    Place,
    Plan,
    Schedule,
    Stage,
    UpdateOrder,
)
from hexijax.planner.judge import Judge
from hexijax.planner.offload.budget import Budget
from hexijax.planner.offload.choice import (
    Choice,
    Kept,
    LayerChoice,
    Profile,
    State,
    Weights,
)
from hexijax.planner.offload.counts import best_counts
from hexijax.planner.offload.emit import placed_plan
from hexijax.planner.offload.near import Allowed, near
from hexijax.planner.offload.order import Rule
from hexijax.planner.offload.profile import stage_profile
from hexijax.planner.offload.room import Room
from hexijax.planner.offload.score import QUICK, Rules
from hexijax.planner.options import PlanOptions

RULES = (Rules(), Rules(rule=Rule.FIFO, barrier=True))
"""What the two orders of a Program come to: updates that are late go by who needs them
first, or all of them stand before the next step's first forward."""

TRIES = 4
"""Times that a stage is placed, less where its device was promised too much."""

SPARE = 1.05
"""More than what was promised too much."""

LEAVE = (16, 8, 4)
"""Chunks of state that may leave a device at once, where it has the room."""

PASSES = (16, 8, 4, 2)
"""Whose gradients there may be room for at once: the most that fit."""

CHUNK_SIZES = tuple(CHUNK_SIZE >> n for n in range(4))
"""Of state that comes to a device, the next where those before have no room. With the
smallest a step is as long as starting its copies takes, and the host updates faster."""

MOST_PASSING = 1 / 3
"""Of a device, for all chunks on it: with less for them, more of the rest can stay."""

LIGHTEST = LayerChoice(weights=Weights.STREAMED, state=State.STREAMED, kept=Kept.FULL)
"""What asks for the least of a device that updates its state."""

LOOKED_AT = 4
"""Counts of the least bounds that are looked at, beside plain ones."""


class _Placed(NamedTuple):
    """Stages of one plan."""

    choices: Mapping[Place, Choice]
    grads: int
    """Passes whose gradients have room, in each of them; 0: all."""
    leaving: int = 0
    """Chunks of state that may leave each of them at once; 0: the fewest."""


class Placer:
    """Places stages of one chain on one cluster."""

    def __init__(
        self, chain: Chain, cluster: Cluster, options: PlanOptions, judge: Judge
    ) -> None:
        self._chain, self._cluster = chain, cluster
        self._options, self._judge = options, judge
        self._allowed = Allowed(
            kept=tuple(kept for kept in Kept if kept.remat in options.remat)
        )
        self.reasons: list[str] = []
        """Why stages could not be placed."""
        self._found: dict[object, tuple[Choice | None, float]] = {}
        """With the seconds that it was to stay below."""
        self._placed: dict[Plan, tuple[Plan, _Placed]] = {}

    def place(
        self, plan: Plan, below_s: float = math.inf, budget: Budget | None = None
    ) -> Iterator[Plan]:
        """The plan with its overflowing stages placed, as each rule has it and in each
        order of updates; none where they cannot be. Chunks of state are the largest
        that have the room to pass through a device.

        Args:
          plan: any.
          below_s: a stage that takes as long by itself is not wanted.
          budget: once it is spent, or would be by a look at each stage, no choice is
            searched.
        """
        budget = budget or Budget()
        layered = plan.schedule is Schedule.LAYERED
        waits = self._options.rules(plan).update_waits
        least = QUICK * self._num_passes(plan)
        few = layered and not waits
        sizes = (x for x in CHUNK_SIZES if self._may_stream(plan, x, few=few))
        plan = dataclasses.replace(plan, chunk=next(sizes, CHUNK_SIZE))
        for rules in RULES:
            for grads in (0, PASSES[-1]) if layered and not waits else (0,):
                rooms = {d.name: room_bytes(d) for d in self._cluster.devices}
                for leaving in (0, LEAVE[-1]):
                    if budget.left < least:
                        return
                    placed = self._place(
                        plan, rules, below_s, grads, leaving, rooms, budget
                    )
                    if placed is None:
                        break
                    yield from self._ordered(plan, placed)
                    if placed.leaving:
                        break

    def _may_stream(self, plan: Plan, size: int, *, few: bool) -> bool:
        """Whether its overflowing stages have the room for state to pass through in
        chunks of a size; ``few``: with the gradients of a few passes."""
        chunked = dataclasses.replace(plan, chunk=size)
        grads = PASSES[-1] if few else 0
        choices: dict[Place, Choice] = {}
        for place in self._overflowing(plan, plan):
            stage = plan.stage(place)
            usable = min(
                self._cluster.device(name).usable_memory_bytes for name in stage.devices
            )
            choices[place] = (LIGHTEST,) * stage.num_layers
            profile = self._profile(chunked, stage, place, 1, usable, grads, 0)
            if Room(profile, choices[place]).chunks_bytes > usable * MOST_PASSING:
                return False
        made = self._made(chunked, _Placed(choices, grads), UpdateOrder.FIFO)
        return not self._overflowing(made, chunked)

    def near(self, plan: Plan) -> Iterator[Plan]:
        """Plans that differ from a placed one in a count of alike stages."""
        skeleton, placed = self._placed[dataclasses.replace(plan, prediction=None)]
        choices = placed.choices
        for choice in dict.fromkeys(choices.values()):
            for other in near(choice, self._allowed):
                moved = {k: other if c == choice else c for k, c in choices.items()}
                other = self._roomiest(skeleton, placed._replace(choices=moved))
                yield self._made(skeleton, other, plan.order)

    def _num_passes(self, plan: Plan) -> int:
        """Of its overflowing stages, equal ones once."""
        found: dict[object, int] = {}
        for place in self._overflowing(plan, plan):
            stage, replica = plan.stage(place), plan.replicas[_numbers(place)[0]]
            kind = self._cluster.device(stage.devices[0]).kind
            form = dataclasses.replace(stage, devices=()), kind, replica.microbatches
            found[form] = _passes(plan, place)
        return sum(found.values())

    def _place(
        self,
        plan: Plan,
        rules: Rules,
        below_s: float,
        grads: int,
        leaving: int,
        rooms: dict[str, int],
        budget: Budget,
    ) -> _Placed | None:
        """Once with room for all, else with less where a device was promised too much:
        ``rooms`` then says so."""
        stages = dict(plan.stages())
        places = self._overflowing(plan, plan)
        choices: dict[Place, Choice] = {}
        for _ in range(TRIES):
            for place in places:
                room = min(rooms[name] for name in stages[place].devices)
                choice = self._choice(
                    plan, place, room, rules, below_s, grads, leaving, budget
                )
                if choice is None:
                    return None
                choices[place] = choice
            made = _Placed(choices, grads, leaving)
            placed = self._made(plan, made, UpdateOrder.FIFO)
            places = self._overflowing(placed, plan)
            if not places:
                full = self._judge.full_host(placed)
                if full:
                    self.reasons.append(full)
                return None if full else self._with_most(plan, made)
            memory_bytes = self._judge.memory_bytes(placed)
            for name in {d for place in places for d in stages[place].devices}:
                usable = self._cluster.device(name).usable_memory_bytes
                over = memory_bytes[name] - usable
                rooms[name] -= int(max(0, over) * SPARE)
        return None

    def _with_most(self, plan: Plan, placed: _Placed) -> _Placed:
        """With room for the gradients of as many passes as fit, then for as much to
        leave at once."""
        if placed.grads and placed.choices:
            wider = [placed._replace(grads=passes) for passes in PASSES]
            placed = self._first_that_fits(plan, wider)
        return self._roomiest(plan, placed)

    def _roomiest(self, plan: Plan, placed: _Placed) -> _Placed:
        """With room for as much as fits to leave at once, if any state does."""
        chosen = (c for choice in placed.choices.values() for c in choice)
        if all(c.state is State.DEVICE for c in chosen):
            return placed._replace(leaving=0)
        wider = [placed._replace(leaving=chunks) for chunks in (*LEAVE, 0)]
        return self._first_that_fits(plan, wider)

    def _first_that_fits(self, plan: Plan, those: Sequence[_Placed]) -> _Placed:
        """Or the last."""
        for each in those:
            if self._judge.fits(self._made(plan, each, UpdateOrder.PRIORITY)):
                return each
        return those[-1]

    def _ordered(self, plan: Plan, placed: _Placed) -> Iterator[Plan]:
        first = self._made(plan, placed, UpdateOrder.PRIORITY)
        yield first
        if any(share.memory is Memory.HOST for share in first.state):
            yield self._made(plan, placed, UpdateOrder.FIFO)

    def _made(self, plan: Plan, placed: _Placed, order: UpdateOrder) -> Plan:
        made = placed_plan(
            plan,
            self._chain,
            placed.choices,
            order=order,
            grads=placed.grads,
            leaving=placed.leaving,
        )
        self._placed[made] = plan, placed
        return made

    def _overflowing(self, plan: Plan, skeleton: Plan) -> list[Place]:
        """Stages of devices that are promised more than they can use."""
        memory_bytes = self._judge.memory_bytes(plan)
        over = {
            name
            for name, num_bytes in memory_bytes.items()
            if num_bytes > self._cluster.device(name).usable_memory_bytes
        }
        return [p for p, stage in skeleton.stages() if over & set(stage.devices)]

    def _choice(
        self,
        plan: Plan,
        place: Place,
        room: int,
        rules: Rules,
        below_s: float,
        grads: int,
        leaving: int,
        budget: Budget,
    ) -> Choice | None:
        stage = plan.stage(place)
        r, s = _numbers(place)
        replica = plan.replicas[r]
        live = live_microbatches(plan.schedule, replica)[s]
        device = self._cluster.device(stage.devices[0])
        layered = plan.schedule is Schedule.LAYERED
        key = (
            dataclasses.replace(stage, devices=()),
            (layered, self._options.rules(plan).update_waits),
            (device.kind, host_side(self._cluster, device.name)),
            replica.microbatches,
            replica.microbatch_size,
            live,
            room,
            plan.chunk,
            rules.rule,
            grads,
            leaving,
        )
        choice, looked_below_s = self._found.get(key, (None, -math.inf))
        if choice is None and looked_below_s < below_s:
            profile = self._profile(plan, stage, place, live, room, grads, leaving)
            best = None
            if profile.host.has_pinned:
                best = best_counts(
                    profile,
                    self._allowed,
                    rules,
                    most=LOOKED_AT,
                    below_s=below_s,
                    budget=budget,
                )
            if best is None and below_s == math.inf:
                self.reasons.append(refusal(profile, stage))
            choice = best.scored.choice if best else None
            self._found[key] = choice, below_s
        return choice

    def _profile(
        self,
        plan: Plan,
        stage: Stage,
        place: Place,
        live: int,
        budget: int,
        grads: int,
        leaving: int,
    ) -> Profile:
        replica = plan.replicas[_numbers(place)[0]]
        return stage_profile(
            self._chain,
            self._cluster,
            stage,
            samples=replica.microbatch_size // stage.lanes,
            microbatches=replica.microbatches,
            moments=self._options.moments,
            live=live,
            layered=plan.schedule is Schedule.LAYERED,
            grads_stay=not grads,
            early_updates=not self._options.rules(plan).update_waits,
            device_bytes=budget,
            leaving=leaving,
            chunk=plan.chunk,
            temps=self._options.temps,
        )


def _numbers(place: Place) -> tuple[int, int]:
    """Of the replica and of the stage in it."""
    r, s = map(int, place[1:].split(".s"))
    return r, s


def _passes(plan: Plan, place: Place) -> int:
    """There and back through a stage's layers, in a step; layered, once for all
    microbatches."""
    replica = plan.replicas[_numbers(place)[0]]
    turns = 1 if plan.schedule is Schedule.LAYERED else replica.microbatches
    return 2 * turns * plan.stage(place).num_layers


def refusal(profile: Profile, stage: Stage) -> str:
    """Why nothing fits, with what is needed at least and what there is."""
    where = stage.devices[0]
    if not profile.host.has_pinned:
        return (
            f"{where} has no pinned host memory that JAX can use: nothing can rest "
            "there. Use more devices, or a smaller model."
        )
    depth = len(profile.layers)
    room = Room(profile, (LIGHTEST,) * depth)
    device = room.peak_bytes(room.least_limit_bytes)
    return (
        f"With parameters and state of {depth} layers in host memory, {where} needs "
        f"{device:,} bytes of its own and has {profile.device_bytes:,}; its host needs "
        f"{room.host_bytes:,} and has {profile.host.memory_bytes:,} beside its "
        "process. Use more devices, a host with more memory, or a smaller model."
    )
