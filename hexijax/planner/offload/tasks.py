"""A step of an offloaded stage as tasks on four queues and the network.

    Profile, Choice -> step_tasks -> Work

Compute runs microbatch by microbatch, forwards up and backwards down; updates and
copies hang on it. What the next step waits for is an edge with a lag of one step.
"""

import dataclasses
import enum

from hexijax.planner.offload.choice import (
    CHUNK_SLOTS,
    RESIDUAL_SLOTS,
    WEIGHT_SLOTS,
    Choice,
    Kept,
    LayerChoice,
    Profile,
    State,
    Weights,
)

PIECES = 2
"""Into which a layer's streamed update is cut here: one comes while another leaves. The
runtime's chunks are finer, which shortens the ends of a chain only."""


class Queue(enum.IntEnum):
    """What works on one thing at a time."""

    COMPUTE = 0
    IN = 1
    OUT = 2
    HOST = 3
    NET = 4


@dataclasses.dataclass(slots=True)
class Task:
    """One thing that a queue does in a step."""

    name: str
    """``F3.0``, ``B3.0``, ``update3``, ...: for people and tests."""

    queue: Queue
    """Who does it."""

    seconds: float
    """How long it takes."""

    due: int
    """Position among the forwards and backwards, the next step's behind this one's, of
    what waits for it; what is needed first goes first."""

    ready: int
    """Position of what it waits for: with nothing else to go by, first come."""

    after: list[tuple[int, int]]
    """Tasks that end before it starts, and how many steps earlier they are."""

    layer: int = -1
    """Whose it is."""

    frees: bool = False
    """Its end lets go of the layer's gradient."""

    takes: str = ""
    """A pool of which it holds a slot until the task ``until`` ends."""

    until: int = -1
    """See ``takes``."""

    along: int = -1
    """A task that it does not start before."""

    takes_grads: tuple[int, ...] = ()
    """Layers whose gradients begin with it."""

    compute: int = -1
    """Position of a forward or backward; -1: it is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The tasks of one step, and what they hold."""

    tasks: list[Task]
    """Each stands behind all it waits for in the same step."""

    length: int
    """Forwards and backwards of a step."""

    slots: dict[str, int]
    """Size of each pool."""


def step_tasks(
    profile: Profile,
    choice: Choice,
    *,
    barrier: bool = False,
    on_demand: bool = False,
) -> Work:
    """The tasks of one step.

    Args:
      profile: times and bytes.
      choice: one a layer.
      barrier: the next step begins when all of this one has ended.
      on_demand: streamed parameters are asked for when their pass would begin.
    """
    return _Builder(profile, choice, barrier, on_demand).build()


class _Builder:
    def __init__(
        self, profile: Profile, choice: Choice, barrier: bool, on_demand: bool
    ) -> None:
        assert len(choice) == len(profile.layers), "one choice a layer"
        self._profile, self._choice, self._barrier = profile, choice, barrier
        self._on_demand = on_demand
        self._host = profile.host
        self._depth = len(choice)
        self._length = 2 * self._depth * profile.microbatches
        self._begins: dict[int, tuple[int, ...]] = {}
        for j, own in enumerate(profile.layers):
            if own.trains:
                user = j if own.last_user is None else own.last_user
                self._begins[user] = (*self._begins.get(user, ()), j)
        self.tasks: list[Task] = []
        self._forward: dict[tuple[int, int], int] = {}
        self._backward: dict[tuple[int, int], int] = {}
        self._fetches: list[tuple[int, list[tuple[int, int, bool]]]] = []
        self._feeds: dict[tuple[int, int, bool], int] = {}
        """Of each use of streamed parameters, the task that brings them."""
        self._fetched: list[int] = []
        self._left: dict[tuple[int, int], int] = {}
        """Of each microbatch's residuals, the task that takes them to the host."""
        self._came: list[int] = []
        """The task that brought residuals last."""

    def build(self) -> Work:
        """All tasks."""
        self._plan_fetches()
        previous: int | None = None
        for m in range(self._profile.microbatches):
            for j in range(self._depth):
                previous = self._pass(m, j, True, previous)
            for j in reversed(range(self._depth)):
                previous = self._pass(m, j, False, previous)
                if self._profile.early_updates and self._is_last(m):
                    self._update(j)
        if not self._profile.early_updates:
            for j in reversed(range(self._depth)):
                self._update(j)
        self._wrap()
        slots = {
            "weights": WEIGHT_SLOTS,
            "state": CHUNK_SLOTS,
            "leaving": RESIDUAL_SLOTS,
            "coming": RESIDUAL_SLOTS,
        }
        return Work(self.tasks, self._length, slots)

    def _is_last(self, m: int) -> bool:
        return m == self._profile.microbatches - 1

    def _at(self, m: int, j: int, forward: bool) -> int:
        """Position of a pass among all of a step."""
        behind = j if forward else 2 * self._depth - 1 - j
        return 2 * self._depth * m + behind

    def _add(
        self,
        name: str,
        queue: Queue,
        seconds: float,
        due: int,
        ready: int,
        after: list[int],
        layer: int,
    ) -> int:
        lagged = [(task, 0) for task in after]
        self.tasks.append(Task(name, queue, seconds, due, ready, lagged, layer))
        return len(self.tasks) - 1

    # Forwards and backwards.

    def _plan_fetches(self) -> None:
        """Which uses of streamed parameters share one fetch: those between which no
        other layers take the slots."""
        uses = [
            (m, j, forward)
            for m in range(self._profile.microbatches)
            for forward in (True, False)
            for j in (range(self._depth) if forward else reversed(range(self._depth)))
            if self._choice[j].weights is Weights.STREAMED
        ]
        held: list[int] = []
        for use in uses:
            j = use[1]
            if j in held:
                entry = next(e for e in reversed(self._fetches) if e[0] == j)
                entry[1].append(use)
                held.remove(j)
            else:
                self._fetches.append((j, [use]))
            held = [*held, j][-WEIGHT_SLOTS:]

    def _weights_s(self, j: int) -> float:
        """To bring a layer's streamed parameters."""
        own = self._profile.layers[j]
        if self._choice[j].state is State.HOST:
            return own.weights_bytes / self._host.return_bytes_per_s
        return self._profile.in_s(own.weights_bytes, own.weights_pieces)

    def _fetch(self, use: tuple[int, int, bool]) -> int | None:
        """The task that brings what a pass reads, made where it comes first."""
        m, j, forward = use
        if self._choice[j].weights is Weights.KEPT:
            return None
        if use not in self._feeds:
            layer, uses = self._fetches[len(self._fetched)]
            assert layer == j, "fetches go in the order of uses"
            at = self._at(m, j, forward)
            task = self._add(
                f"fetch{j}@{at}",
                Queue.IN,
                self._weights_s(j),
                at,
                at,
                self._fetched[-1:],
                j,
            )
            self._fetched.append(task)
            self.tasks[task].takes = "weights"
            for each in uses:
                self._feeds[each] = task
        return self._feeds[use]

    def _pass(self, m: int, j: int, forward: bool, previous: int | None) -> int:
        own, chosen = self._profile.layers[j], self._choice[j]
        policy, at = chosen.kept.remat, self._at(m, j, forward)
        after: list[int] = [] if previous is None else [previous]
        known = len(self._fetched)
        fetch = self._fetch((m, j, forward))
        if fetch is not None:
            if self._on_demand and len(self._fetched) > known:
                self.tasks[fetch].after += [(task, 0) for task in after]
            after.append(fetch)
        on_host = chosen.kept is Kept.HOST
        if not forward and on_host:
            back_s = self._profile.in_s(own.kept_bytes[policy], own.kept_pieces)
            # In the order of uses: the slots are few.
            before = [self._left[m, j], *self._came]
            back = self._add(f"coming{j}.{m}", Queue.IN, back_s, at, at, before, j)
            self.tasks[back].takes = "coming"
            self._came = [back]
            after.append(back)
        seconds = own.forward_s[policy] if forward else own.backward_s[policy]
        task = self._add(
            f"{'F' if forward else 'B'}{j}.{m}",
            Queue.COMPUTE,
            seconds,
            at,
            at,
            after,
            j,
        )
        self.tasks[task].compute = at
        if not forward and self._is_last(m):
            self.tasks[task].takes_grads = self._begins.get(j, ())
        if fetch is not None:
            self.tasks[fetch].until = task
        if not forward and on_host:
            self.tasks[after[-1]].until = task
        if forward and on_host:
            out_s = self._profile.out_s(own.kept_bytes[policy], own.kept_pieces)
            out = self._add(f"leaving{j}.{m}", Queue.OUT, out_s, at, at, [task], j)
            self.tasks[task].takes, self.tasks[task].until = "leaving", out
            self._left[m, j] = out
        (self._forward if forward else self._backward)[m, j] = task
        return task

    # Updates.

    def _update(self, j: int) -> None:
        """What follows a layer's last backward, to the next step's first forward."""
        own, chosen, host = self._profile.layers[j], self._choice[j], self._host
        if not own.trains:
            return
        m = self._profile.microbatches - 1
        ready = self._backward[m, j if self._profile.early_updates else 0]
        at = self.tasks[ready].compute
        due = self._length + j
        made = [self._backward[m, j]]
        if own.reduce_s:
            made = [self._add(f"reduce{j}", Queue.NET, own.reduce_s, due, at, made, j)]
        grads = [*made, ready]
        streamed = chosen.weights is Weights.STREAMED
        share = own.homed_params / own.num_params
        store_s = 0.0
        if streamed:
            store_s = self._profile.out_s(own.weights_bytes * share, own.weights_pieces)
        match chosen.state:
            case State.DEVICE:
                last = self._add(
                    f"update{j}",
                    Queue.COMPUTE,
                    own.resident_update_s,
                    due,
                    at,
                    grads,
                    j,
                )
                self.tasks[last].frees = True
                if streamed:
                    last = self._add(
                        f"store{j}", Queue.OUT, store_s, due, at, [last], j
                    )
            case State.STREAMED:
                last = self._streamed(j, due, at, ready, grads, store_s)
            case State.HOST:
                out_s = self._profile.grads_s(j)
                out = self._add(f"grads{j}", Queue.OUT, out_s, due, at, made, j)
                self.tasks[out].frees = True
                update_s = own.homed_params / host.update_params_per_s
                last = self._add(
                    f"update{j}", Queue.HOST, update_s, due, at, [out, ready], j
                )
                if not streamed:
                    back_s = own.weights_bytes * share / host.return_bytes_per_s
                    last = self._add(f"new{j}", Queue.IN, back_s, due, at, [last], j)
        if own.gather_s:
            last = self._add(f"gather{j}", Queue.NET, own.gather_s, due, at, [last], j)
        first = self._feeds.get((0, j, True), self._forward[0, j])
        self.tasks[first].after.append((last, 1))

    def _streamed(
        self,
        j: int,
        due: int,
        at: int,
        ready: int,
        grads: list[int],
        store_s: float,
    ) -> int:
        """State through the device in pieces; the last task the parameters wait for."""
        own = self._profile.layers[j]
        in_s, out_s = (seconds / PIECES for seconds in self._profile.state_s(j))
        out_s += store_s / PIECES
        update, out = -1, -1
        for piece in range(PIECES):
            come = self._add(f"state{j}.{piece}", Queue.IN, in_s, due, at, [], j)
            self.tasks[come].along = ready
            update = self._add(
                f"update{j}.{piece}",
                Queue.COMPUTE,
                own.resident_update_s / PIECES,
                due,
                at,
                [*grads, come],
                j,
            )
            out = self._add(f"back{j}.{piece}", Queue.OUT, out_s, due, at, [update], j)
            self.tasks[come].takes, self.tasks[come].until = "state", out
            self.tasks[come].after.append((out, 1))
        self.tasks[update].frees = True
        return out if store_s else update

    def _wrap(self) -> None:
        """Edges from one step to the next that are not an update's."""
        passes = [i for i, task in enumerate(self.tasks) if task.compute >= 0]
        self.tasks[passes[0]].after.append((passes[-1], 1))
        if self._fetched:
            self.tasks[self._fetched[0]].after.append((self._fetched[-1], 1))
        if self._barrier:
            for first in {passes[0], *self._fetched[:1]}:
                ends = (i for i in range(len(self.tasks)) if i != first)
                self.tasks[first].after += [(i, 1) for i in ends]


def uniform(depth: int, chosen: LayerChoice) -> Choice:
    """The same for all layers."""
    return (chosen,) * depth
