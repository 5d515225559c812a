"""A Program's body as tasks over queues: what is played, instruction by instruction.

    Program, PlanCosts -> tasks -> (Task, ...) in the order of dispatch

A queue serves in the order of dispatch, as the runtime's streams do: one for each
device's programs, one for each island's host. A program keeps its devices until it
ends, and one that waits for a message holds up what is dispatched behind it. A copy
waits for the programs dispatched before it on its source. A way out of or into a device
or a node (``costs.ways``) carries what is ready first, and is kept only while the bytes
need it.

Sums and new parameters are one task a member and one a home, whatever the number of
copies: those that leave hold the ways out, those that arrive the ways in, from when the
last of their senders has begun, and end no sooner than any of these.

What needs no work is no task: a Recv whose arrays are ready as they come, a move to the
same devices, a Free, a Load (it runs ahead). A stage that stands for several counts
each of its host's calls as often as they share that host.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hexijax.cluster import Cluster
from hexijax.costs.borders import OURS
from hexijax.costs.exchange import Exchange
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.rates import CALL_S
from hexijax.costs.ways import NO_LOAD, Load
from hexijax.errors import UserError
from hexijax.plan.plan import Place
from hexijax.program import names
from hexijax.program import program as ops
from hexijax.program.fuse import fused_pairs
from hexijax.program.program import PIECES, Buffer, Instruction, Kind, Program
from hexijax.program.waiting import held_back
from hexijax.simulator.passes import Passes
from hexijax.simulator.uses import Hosts, Task, Use, What

CROSSING = (Kind.ACT, Kind.COT)

IN_FLIGHT = 32
"""Calls of one device that are dispatched and not ended: XLA's client takes no more."""

LOOKED = 8
"""A host looks after so many calls of a device: each look costs the simulator time."""


def tasks(
    program: Program,
    costs: PlanCosts,
    cluster: Cluster,
    skips_s: Mapping[Place, float] | None = None,
) -> list[Task]:
    """The body's tasks.

    Args:
      program: what is done in which order.
      costs: how long it takes.
      cluster: whose hosts dispatch it.
      skips_s: for each stage, how much later all that it does begins, for microbatches
        that the Program leaves out.
    """
    writer = _Writer(program, costs, cluster, skips_s or {})
    for instruction in program.body:
        make = writer.makers.get(type(instruction))
        if make is None:
            raise UserError(
                f"{type(instruction).__name__} is not simulated by this version: "
                "the plan asks for host offload. Keep parameters, state and "
                "activations on the device."
            )
        make(instruction)
    return writer.finished()


class Road(NamedTuple):
    """What a message uses before it has arrived, and after."""

    out: Sequence[Use]
    into: Sequence[Use]


class _Writer:
    """Turns instructions into tasks and remembers which task made which buffer."""

    def __init__(
        self,
        program: Program,
        costs: PlanCosts,
        cluster: Cluster,
        skips_s: Mapping[Place, float],
    ) -> None:
        self._costs, self._cluster = costs, cluster
        self._pairs = fused_pairs(program)
        self._tasks: list[Task] = []
        self._made: dict[Buffer, int] = {}
        self._carried: list[tuple[int, Buffer]] = []
        self._late: list[tuple[int, Buffer]] = []
        """Tasks, and what they read of the step before under its names of this step."""
        self._has: set[Buffer] = set()
        self._back: set[Buffer] = set()
        """Residuals that have been on the host."""
        held = held_back(program.body, dict(program.leaving))
        self._held = {id(program.body[at]): copy for at, copy in held.items()}
        """Copies to the host that forwards and other copies wait for."""
        self._last_back: dict[str, int] = {}
        """By replica, its backward dispatched last."""
        self._held_back: list[tuple[int, Place]] = []
        self._leaving: dict[str, dict[Place, int]] = {}
        self._passes: dict[tuple[str, ...], Passes] = {}
        self._parts: dict[Buffer, tuple[int, int]] = {}
        """Of Pieces of which a part came by a collective: its path and its task."""
        self._runs: dict[object, Use] = {}
        self._roads: dict[object, Road] = {}
        self._hosts = functools.cache(self._find_hosts)
        self._skips_s = skips_s
        skips = {costs.devices(place): s for place, s in skips_s.items() if s}
        for devices, seconds in skips.items():
            self._add(Use(What.SKIP, seconds, devices), ops.Free())
        self.makers: dict[type[Instruction], Callable[[Any], None]] = {
            ops.Load: self._nothing,
            ops.Free: self._nothing,
            ops.Forward: self._forward,
            ops.Backward: self._backward,
            ops.Send: self._send,
            ops.Recv: self._recv,
            ops.Reduce: self._reduce,
            ops.Sum: self._sum,
            ops.Gather: self._gather,
            ops.Join: self._join,
            ops.Agree: self._agree,
            ops.Update: self._update,
            ops.Prefetch: self._host_copy,
            ops.WriteBack: self._host_copy,
        }

    def finished(self) -> list[Task]:
        """All tasks; what a step reads of the one before is known now."""
        next_step = {
            (b.kind, b.place, b.subject, b.memory): task
            for b, task in self._made.items()
            if b.step == 1
        }
        before: dict[int, list[tuple[int, float]]] = {}
        for task, place in self._held_back:
            last = self._last_back.get(place.split(".")[0])
            if last is not None:
                before[task] = [(last, self._skips_s.get(place, 0.0))]
        for task, buffer in self._carried:
            maker = next_step.get(
                (buffer.kind, buffer.place, buffer.subject, buffer.memory)
            )
            if maker is not None:
                skip_s = self._skips_s.get(buffer.place, 0.0)
                before.setdefault(task, []).append((maker, skip_s))
        for task, buffer in self._late:
            maker = self._made.get(buffer)
            if maker is not None:
                skip_s = self._skips_s.get(buffer.place, 0.0)
                before.setdefault(task, []).append((maker, skip_s))
        for task, makers in before.items():
            self._tasks[task].before = makers
        if self._costs.carriage == OURS:
            self._bound()
        return self._tasks

    def _bound(self) -> None:
        """A host waits where a device has as many calls before it as it takes."""
        before: dict[str, list[int]] = {}
        for at, task in enumerate(self._tasks):
            for device in task.use.devices if task.use.hosts else ():
                calls = before.setdefault(device, [])
                if len(calls) >= IN_FLIGHT and len(calls) % LOOKED == 0:
                    task.held = (*task.held, calls[-IN_FLIGHT])
                calls.append(at)

    # Compute

    def _run(
        self, i: ops.Forward | ops.Backward, pair: ops.Backward | None = None
    ) -> Use:
        """What a segment's every run is, alone or with its backward."""
        count = self._costs.microbatches(i)
        part = i.part if isinstance(i, ops.Backward) else pair is None
        key = (i.place, i.segment, count, part)
        run = self._runs.get(key)
        if run is None:
            what = What.BACKWARD if isinstance(i, ops.Backward) else What.FORWARD
            seconds = self._costs.duration_s(i)
            if pair is not None:
                what = What.BOTH
                seconds += self._costs.duration_s(pair) - CALL_S * count
            devices = self._costs.devices(i.place)
            first, stop = i.microbatches
            calls = count / (stop - first)
            hosts = tuple((host, n * calls) for host, n in self._hosts(i.place))
            run = Use(what, seconds, devices, hosts=hosts)
            self._runs[key] = run
        return run

    def _forward(self, i: ops.Forward) -> None:
        after = self._inputs(i)
        pair = self._pairs.get((i.place, i.segment, i.microbatches))
        if pair is not None:  # one program does both, and needs what both read
            after += [*self._inputs(pair), *self._room(pair)]
        replica = i.place.split(".")[0]
        if not i.grad:  # it runs ahead no further than it was dispatched
            if replica in self._last_back:
                after.append(self._last_back[replica])
            else:
                self._held_back.append((len(self._tasks), i.place))
        made = self._add(self._run(i, pair), i, after, held=self._holders(i))
        if pair is not None:
            self._last_back[replica] = made
        for buffer in i.writes if pair is None else (*i.writes, *pair.writes):
            self._made[buffer] = made

    def _backward(self, i: ops.Backward) -> None:
        if self._pairs.get((i.place, i.segment, i.microbatches)) is not i:
            after = [*self._inputs(i), *self._room(i)]
            made = self._add(self._run(i), i, after)
            self._last_back[i.place.split(".")[0]] = made
            for buffer in i.writes:
                self._made[buffer] = made

    def _room(self, i: ops.Backward) -> list[int]:
        """Under ``layered``, the sums that must have left before a pass begins: its
        accumulators take the memory of theirs (``program.window``)."""
        grads = [b for b in i.writes if b.kind is Kind.GRAD]
        if not grads or not self._costs.layered:
            return []
        devices = self._costs.devices(i.place)
        passes = self._passes.setdefault(devices, Passes())
        due = passes.begin((i.place, i.segment))
        passes.of |= {(b.place, b.subject): passes.number for b in grads}
        return due

    def _inputs(self, i: ops.Forward | ops.Backward) -> list[int]:
        """Tasks that a run waits for; its own devices' order sees to all others.

        Parameters are waited for by the first that reads them.
        """
        after: list[int] = []
        for buffer, _ in i.reads:
            kind = buffer.kind
            if kind in CROSSING:
                maker = self._made.get(buffer)
                if maker is not None:
                    after.append(maker)
            elif kind is Kind.RES and buffer in self._back:
                after.append(self._made[buffer])
            elif kind is Kind.PARAM and buffer not in self._has:
                self._has.add(buffer)
                if buffer in self._made:  # for this pass, or late
                    after.append(self._made[buffer])
                else:
                    self._carried.append((len(self._tasks), buffer))
        return after

    # Borders

    def _send(self, i: ops.Send) -> None:
        read = i.reads[0].buffer
        key = (i.source, i.target, read.subject, read.kind)
        road = self._roads.get(key)
        if road is None:
            road = self._roads[key] = self._road(i)
        made = self._made[read]
        for use in road.out:
            made = self._add(use, i, (made,))
        self._made[i.writes[0]] = made

    def _recv(self, i: ops.Recv) -> None:
        written = i.writes[0]
        made = self._made[i.reads[0].buffer]
        road = self._roads[i.source, i.target, written.subject, written.kind]
        for use in road.into:
            made = self._add(use, i, (made,))
        self._made[written] = made

    def _road(self, i: ops.Send) -> Road:
        """From a stage to another, for all messages alike."""
        crossing = self._costs.message(i)
        load, split_s, merge_s = crossing.load, crossing.split_s, crossing.merge_s
        devices, hosts = self._costs.devices(i.source), self._hosts(i.source)
        out = [
            Use(What.MOVE, split_s, devices, hosts=hosts),
            Use(What.MOVE, load.seconds, (), load, hosts, devices),
        ]
        devices, hosts = self._costs.devices(i.target), self._hosts(i.target)
        into = [Use(What.MOVE, merge_s, devices, hosts=hosts)]
        return Road(
            out=[u for u, some in zip(out, (split_s, load.ways), strict=True) if some],
            into=into if merge_s else (),
        )

    def _host_copy(self, i: ops.Prefetch | ops.WriteBack) -> None:
        """Behind what its devices were given to do before, beside what comes after."""
        place = i.buffer.place
        load, devices = self._costs.host_copy(i), self._costs.devices(place)
        use = Use(What.MOVE, load.seconds, (), load, self._hosts(place), devices)
        read = i.reads[0].buffer
        if read not in self._made:  # it rests there since the step before
            self._carried.append((len(self._tasks), read))
            self._of_before(i)
        after = [self._made[read]] if read in self._made else []
        self._made[i.writes[0]] = self._add(use, i, after, held=self._holders(i))
        if i.buffer.kind is Kind.RES:
            self._back.add(i.buffer)

    # Sums and new parameters

    def _reduce(self, i: ops.Reduce) -> None:
        exchange = self._costs.exchange(i.group)
        if exchange.alone:
            self._made[i.writes[0]] = self._made[i.reads[0].buffer]
            return
        cut: dict[Place, int] = {}
        left: dict[Place, int] = {}
        path = i.path
        for member, read in zip(i.members, i.reads, strict=True):
            partial = exchange.partial(member)
            made = [self._made[read.buffer]]
            cut[member] = self._program(
                i, What.SYNC, member, partial.seconds, made, partial.ways
            )
            load = exchange.leave(member, path)
            left[member] = self._leave(i, member, load, [cut[member]])
            passes = self._passes.get(self._costs.devices(member))
            if passes and left[member] >= 0:
                passes.left(passes.of[member, i.group], left[member])
        ready = max(cut.values())
        if path:
            ready = self._ring(i, i.members, [*cut.values()])
        for home, written in zip(i.homes, i.writes, strict=True):
            along = self._senders(left, home)
            arrived = self._arrive(i, exchange.arrive(home, path), along)
            # Without a way it is there when the last on its own devices was cut.
            self._made[written] = arrived if arrived >= 0 else ready
            if path:
                self._parts[written] = path, ready

    def _sum(self, i: ops.Sum) -> None:
        pieces = i.reads[0].buffer
        path, ready = self._parts.get(pieces, (PIECES, self._made[pieces]))
        add = self._costs.exchange(i.group).add(i.home, path)
        after = [self._made[pieces], ready]
        task = self._program(i, What.SYNC, i.home, add.seconds, after, add.ways)
        for buffer in i.writes:
            self._made[buffer] = task

    def _of_before(self, i: Instruction) -> None:
        """The next task is late: it reads what the step before left."""
        for buffer, _ in i.reads:
            if buffer.step < 0:
                at = len(self._tasks)
                self._late.append((at, buffer._replace(step=buffer.step + 1)))

    def _update(self, i: ops.Update) -> None:
        self._of_before(i)
        after = [self._made[r.buffer] for r in i.reads if r.buffer in self._made]
        seconds = self._costs.duration_s(i)
        if i.site is ops.Site.HOST:
            task = self._host_update(i, seconds, after)
        else:
            task = self._program(i, What.UPDATE, i.home, seconds, after)
        for buffer in i.writes:
            self._made[buffer] = task

    def _host_update(self, i: ops.Update, seconds: float, after: Sequence[int]) -> int:
        """By the processor of the home's node, which keeps no device; then what is new
        comes to the devices."""
        node = self._cluster.device(self._costs.devices(i.home)[0]).node
        work = Load(seconds, (f"{node} cpu",), (seconds,), (0,))
        task = self._add(Use(What.UPDATE, seconds, (), work), i, after)
        if not any(b.kind is Kind.PARAM for b in i.writes):
            return task
        copy = self._costs.slice_copy(i.home, i.group)
        hosts = self._hosts(i.home)
        return self._add(Use(What.SYNC, copy.seconds, (), copy, hosts), i, (task,))

    def _gather(self, i: ops.Gather) -> None:
        exchange = self._costs.exchange(i.group)
        if names.is_freed(i.writes[0]):
            self._gather_for_pass(i, exchange)
            return
        made = {r.buffer.place: self._made[r.buffer] for r in i.reads}
        if i.path:
            self._gather_together(i, exchange, made)
            return
        (place,) = i.places
        left = self._leaving.get(i.group)
        if left is None:  # the first of the bucket's users: all copies go out now
            left = self._leaving[i.group] = {
                home: self._leave(i, home, exchange.spread_out(home), [made[home]], ())
                for home in i.homes
            }
        along = self._senders(left, place)
        hosts = self._hosts(place)
        arrived = self._arrive(i, exchange.spread_in(place), along, hosts)
        self._made[i.writes[0]] = arrived if arrived >= 0 else max(made.values())

    def _gather_together(
        self, i: ops.Gather, exchange: Exchange, made: Mapping[Place, int]
    ) -> None:
        """Boxes are packed; a part of them goes by a collective, the rest as copies."""
        collective = self._costs.collective(i.group)
        assert collective, "costs that chose a collective know it"
        packed: dict[Place, int] = {}
        left: dict[Place, int] = {}
        for home in i.homes:
            seconds = collective.pack(home).seconds
            after = [made[home]]
            packed[home] = self._program(i, What.SYNC, home, seconds, after)
            load = exchange.spread_out(home, i.path)
            left[home] = self._leave(i, home, load, [packed[home]])
        ready = self._ring(i, i.places, [*packed.values()])
        for place, written in zip(i.places, i.writes, strict=True):
            along = self._senders(left, place)
            arrived = self._arrive(i, exchange.spread_in(place, i.path), along)
            self._made[written] = arrived if arrived >= 0 else ready
            self._parts[written] = i.path, ready

    def _ring(
        self,
        i: ops.Reduce | ops.Gather,
        places: Sequence[Place],
        after: Sequence[int],
    ) -> int:
        """A collective: it keeps all its devices, and is one call."""
        devices = tuple(d for place in places for d in self._costs.devices(place))
        ring, hosts = self._costs.ring(i), self._hosts(places[0])
        use = Use(What.SYNC, ring.seconds, devices, ring.ways, hosts)
        return self._add(use, i, after)

    def _gather_for_pass(self, i: ops.Gather, exchange: Exchange) -> None:
        """From the state that the step before left; it waits for what the place was
        given to do before."""
        left: dict[Place, int] = {}
        (place,) = i.places
        own: list[int] = []
        for home, read in zip(i.homes, i.reads, strict=True):
            cast, first = exchange.cast(home), len(self._tasks)
            after: list[int] = []
            copy = self._costs.master_copy(home, i.group)
            if copy.ways:
                behind = self._costs.devices(home)
                use = Use(What.SYNC, copy.seconds, (), copy, (), behind)
                after = [self._add(use, i)]
            if cast:
                after = [self._program(i, What.SYNC, home, cast.seconds, after)]
            own += after if home == place else ()
            load = exchange.spread_to(home, place)
            left[home] = self._leave(i, home, load, after, ())
            if len(self._tasks) > first:
                self._carried.append((first, read.buffer))
        load, behind = exchange.spread_in(place), self._costs.devices(place)
        use = Use(What.SYNC, load.seconds, (), load, self._hosts(place), behind)
        along = self._senders(left, place)
        self._made[i.writes[0]] = self._add(use, i, own, along)

    def _join(self, i: ops.Join) -> None:
        pieces = i.reads[0].buffer
        path, ready = self._parts.get(pieces, (PIECES, self._made[pieces]))
        join = self._costs.exchange(i.group).join(i.place, path)
        task = self._made[pieces]
        if join is not None:
            after = [task, ready]
            task = self._program(i, What.SYNC, i.place, join.seconds, after, join.ways)
        self._made[i.writes[0]] = task

    def _leave(
        self,
        i: Instruction,
        place: Place,
        load: Load,
        after: Sequence[int],
        hosts: Hosts | None = None,
    ) -> int:
        """Copies out of a place; -1: there are none."""
        if not load.ways:
            return -1
        hosts = self._hosts(place) if hosts is None else hosts
        behind = self._costs.devices(place)
        return self._add(
            Use(What.SYNC, load.seconds, (), load, hosts, behind), i, after
        )

    def _senders(self, left: Mapping[Place, int], place: Place) -> list[int]:
        """Tasks of those that send to a place: all but itself, and its own copies."""
        copies = self._costs.copies
        return [
            task
            for sender, task in left.items()
            if task >= 0 and (sender != place or copies(sender) > 1)
        ]

    def _arrive(
        self,
        i: Instruction,
        load: Load,
        along: Sequence[int],
        hosts: Hosts = (),
    ) -> int:
        """Copies into a place; -1: there are none."""
        if not load.ways:
            return -1
        use = Use(What.SYNC, load.seconds, (), load, hosts)
        return self._add(use, i, along=along)

    def _agree(self, i: ops.Agree) -> None:
        if i.name != "norm" or len(i.members) < 2:  # the host looks when it likes
            return
        after = [self._made[r.buffer] for r in i.reads if r.buffer in self._made]
        seconds = self._costs.duration_s(i)
        task = self._add(Use(What.SYNC, seconds, ()), i, after)
        for buffer in i.writes:
            devices = self._costs.devices(buffer.place)
            self._made[buffer] = (
                self._program(i, What.SYNC, buffer.place, 0.0, [task])
                if devices
                else task
            )

    # Parts

    def _add(
        self,
        use: Use,
        i: Instruction,
        after: Sequence[int] = (),
        along: Sequence[int] = (),
        held: Sequence[int] = (),
    ) -> int:
        self._tasks.append(Task(use, i, after, along, held=held))
        return len(self._tasks) - 1

    def _holders(self, i: Instruction) -> Sequence[int]:
        """The copy that is to have left before one is dispatched."""
        return (self._made[self._held[id(i)]],) if id(i) in self._held else ()

    def _program(
        self,
        i: Instruction,
        what: What,
        place: Place,
        seconds: float,
        after: Sequence[int],
        load: Load = NO_LOAD,
    ) -> int:
        """A program call on a place's devices."""
        devices = self._costs.devices(place)
        return self._add(
            Use(what, seconds, devices, load, self._hosts(place)), i, after
        )

    def _nothing(self, i: Instruction) -> None:
        """No task."""

    def _find_hosts(self, place: Place) -> Hosts:
        devices = self._costs.devices(place)
        islands = dict.fromkeys(self._cluster.device(d).island for d in devices)
        twin = {self._cluster.device(d).island for d in self._costs.twin(place)}
        return tuple(
            (island, self._costs.copies(place) if island in twin else 1)
            for island in islands
        )
