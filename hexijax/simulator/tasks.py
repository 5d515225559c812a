"""A Program's body as tasks over queues: what is played, instruction by instruction.

    Program, Plan, Chain, Cluster -> tasks -> (Task, ...) in the order of dispatch

A queue does one thing at a time, in the order of dispatch, as the runtime's streams do:
one for each device's programs, one for each direction of a device's or a node's link,
one for each island's host. All devices of a node share its way out and its way in. A
program that waits for a message holds up what is dispatched behind it on its devices; a
copy waits for the programs dispatched before it on its source.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.links import transfer_s
from hexijax.costs.memory import GRAD_BYTES
from hexijax.costs.rates import CALL_S
from hexijax.errors import UserError
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.plan.plan import Place, Plan
from hexijax.program.buckets import buckets
from hexijax.program.fuse import fused_segments
from hexijax.program.program import (
    Agree,
    Backward,
    Buffer,
    Forward,
    Free,
    Gather,
    Instruction,
    Load,
    Program,
    Recv,
    Reduce,
    Send,
    Update,
)


class What(enum.StrEnum):
    """What a task is, for people."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"
    """A last segment's forward and backward as one program."""
    MOVE = "move"
    """Activations or cotangents between stages."""
    SYNC = "sync"
    """Gradients to their homes, new parameters to their users, the norm."""
    UPDATE = "update"
    LOAD = "load"


@dataclasses.dataclass(slots=True)
class Task:
    """One use of some queues at once."""

    what: What
    instruction: Instruction
    """The one it belongs to; a Reduce or a Gather has several tasks."""
    queues: tuple[str, ...]
    """Held from start to end."""
    behind: tuple[str, ...]
    """Waited for, not held."""
    after: tuple[int, ...]
    """Tasks of the same step that end before this starts."""
    before: tuple[int, ...]
    """Tasks of the step before, the same."""
    seconds: float
    num_bytes: int
    """That cross each of its link queues."""
    hosts: tuple[str, ...]
    """Islands whose host dispatches it, one call each."""


def tasks(
    program: Program, plan: Plan, chain: Chain, cluster: Cluster, costs: PlanCosts
) -> tuple[Task, ...]:
    """The body's tasks."""
    writer = _Writer(program, plan, chain, cluster, costs)
    for instruction in program.body:
        writer.add(instruction)
    return writer.finished()


class _Writer:
    """Turns instructions into tasks and remembers which task made which buffer."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        costs: PlanCosts,
    ) -> None:
        self._cluster, self._costs = cluster, costs
        self._stages = dict(plan.stages())
        self._sizes = {group.name: group.size for group in buckets(plan, chain)}
        self._fused = fused_segments(program)
        self._pairs = {
            (i.place, i.segment, i.microbatches): i
            for i in program.body
            if isinstance(i, Backward) and (i.place, i.segment) in self._fused
        }
        self._made: dict[Buffer, int] = {}
        self._tasks: list[Task] = []
        self._carried: list[list[Buffer]] = []
        self._islands = functools.cache(self._find_islands)
        self._route = functools.cache(self._find_route)

    def finished(self) -> tuple[Task, ...]:
        """All tasks; what a step reads of the one before is known now."""
        made = {
            Buffer(b.kind, b.place, b.subject, b.microbatch, 0, b.memory): task
            for b, task in self._made.items()
            if b.step == 1
        }
        for task, buffers in zip(self._tasks, self._carried, strict=True):
            if buffers:
                task.before = tuple(made[b] for b in buffers if b in made)
        return tuple(self._tasks)

    def add(self, instruction: Instruction) -> None:
        """The tasks of one instruction."""
        match instruction:
            case Load():
                self._settle(instruction, self._task(instruction, What.LOAD, ()))
            case Forward():
                self._forward(instruction)
            case Backward():
                self._backward(instruction)
            case Send():
                self._send(instruction)
            case Recv():
                devices = self._costs.devices(instruction.target)
                self._settle(
                    instruction, self._program(instruction, What.MOVE, devices)
                )
            case Reduce():
                self._reduce(instruction)
            case Gather():
                self._gather(instruction)
            case Agree():
                self._agree(instruction)
            case Update():
                devices = self._costs.devices(instruction.home)
                seconds = self._costs.duration_s(instruction)
                self._settle(
                    instruction,
                    self._program(instruction, What.UPDATE, devices, seconds),
                )
            case Free():
                pass
            case _:
                raise UserError(
                    f"{type(instruction).__name__} is not simulated by this version: "
                    "the plan asks for host offload. Keep parameters, state and "
                    "activations on the device."
                )

    # Makers of tasks.

    def _task(
        self,
        instruction: Instruction,
        what: What,
        queues: Sequence[str],
        seconds: float = 0.0,
        *,
        after: Sequence[int] | None = None,
        behind: Sequence[str] = (),
        num_bytes: int = 0,
        hosts: Sequence[str] = (),
    ) -> int:
        """A new task; by default after all that made what the instruction reads."""
        carried: list[Buffer] = []
        if after is None:
            after = []
            for read in instruction.reads:
                maker = self._made.get(read.buffer)
                if maker is not None:
                    after.append(maker)
                else:
                    carried.append(read.buffer)
        self._tasks.append(
            Task(
                what=what,
                instruction=instruction,
                queues=tuple(queues),
                behind=tuple(behind),
                after=tuple(after),
                before=(),
                seconds=seconds,
                num_bytes=num_bytes,
                hosts=tuple(hosts),
            )
        )
        self._carried.append(carried)
        return len(self._tasks) - 1

    def _program(
        self,
        instruction: Instruction,
        what: What,
        devices: Sequence[str],
        seconds: float = 0.0,
        after: Sequence[int] | None = None,
    ) -> int:
        """A program call on some devices."""
        return self._task(
            instruction,
            what,
            devices,
            seconds,
            after=after,
            hosts=self._islands(devices),
        )

    def _copy(
        self,
        instruction: Instruction,
        what: What,
        source: Place,
        target: Place,
        num_bytes: int,
        seconds: float | None = None,
        after: Sequence[int] | None = None,
    ) -> int:
        """A move between two places, behind the source's programs."""
        sources, targets = self._costs.devices(source), self._costs.devices(target)
        if seconds is None:
            seconds = transfer_s(self._cluster, sources, targets, num_bytes)
        queues, ways = self._route(source, target) if seconds else ((), 1)
        return self._task(
            instruction,
            what,
            queues,
            seconds,
            after=after,
            behind=sources,
            num_bytes=num_bytes // ways if queues else 0,
            hosts=self._islands(sources),
        )

    def _settle(self, instruction: Instruction, task: int) -> None:
        """All that the instruction writes is made by one task."""
        for buffer in instruction.writes:
            self._made[buffer] = task

    # One a kind of instruction.

    def _forward(self, i: Forward) -> None:
        seconds = self._costs.duration_s(i)
        pair = self._pairs.get((i.place, i.segment, i.microbatches))
        after = None
        if pair is not None:  # one program does both, and needs what both read
            seconds += self._costs.duration_s(pair) - CALL_S
            read = [r.buffer for r in (*i.reads, *pair.reads)]
            after = [self._made[b] for b in read if b in self._made]
        devices = self._costs.devices(i.place)
        what = What.FORWARD if pair is None else What.BOTH
        task = self._program(i, what, devices, seconds, after)
        if pair is not None:
            self._carried[task] = [
                r.buffer for r in i.reads if r.buffer not in self._made
            ]
            self._settle(pair, task)
        self._settle(i, task)

    def _backward(self, i: Backward) -> None:
        if (i.place, i.segment) not in self._fused:
            devices, seconds = self._costs.devices(i.place), self._costs.duration_s(i)
            self._settle(i, self._program(i, What.BACKWARD, devices, seconds))

    def _send(self, i: Send) -> None:
        num_bytes = sum(
            self._costs.border_bytes(i.source, int(read.buffer.subject[1:]))
            for read in i.reads
        )
        seconds = self._costs.duration_s(i)
        self._settle(
            i, self._copy(i, What.MOVE, i.source, i.target, num_bytes, seconds)
        )

    def _reduce(self, i: Reduce) -> None:
        size, num_homes = self._sizes[i.group], len(i.homes)
        num_bytes = size * GRAD_BYTES // num_homes
        arrived: dict[Place, list[int]] = {home: [] for home in i.homes}
        for member, read in zip(i.members, i.reads, strict=True):
            made = [self._made[read.buffer]]
            seconds = self._costs.lanes_s(member, size * GRAD_BYTES)
            devices = self._costs.devices(member)
            summed = self._program(i, What.SYNC, devices, seconds, made)
            for home in i.homes:
                if home == member:
                    arrived[home].append(summed)
                else:
                    arrived[home].append(
                        self._copy(
                            i, What.SYNC, member, home, num_bytes, after=[summed]
                        )
                    )
        for home in i.homes:
            task = arrived[home][0]
            if len(i.members) > 1 or i.members != i.homes:
                devices = self._costs.devices(home)
                seconds = self._costs.add_s(home, num_bytes, len(i.members))
                task = self._program(i, What.SYNC, devices, seconds, arrived[home])
            for buffer in i.writes:
                if buffer.place == home:
                    self._made[buffer] = task

    def _gather(self, i: Gather) -> None:
        item = ITEM_BYTES[self._stages[i.place].dtype]
        num_bytes = self._sizes[i.group] * item // len(i.homes)
        arrived: list[int] = []
        for home in i.homes:
            made = [
                self._made[r.buffer]
                for r in i.reads
                if r.buffer.place == home and r.buffer in self._made
            ]
            arrived += made
            if home != i.place:
                arrived.append(
                    self._copy(i, What.SYNC, home, i.place, num_bytes, after=made)
                )
        devices = self._costs.devices(i.place)
        seconds = 0.0
        if i.place in i.homes:
            seconds = self._costs.lanes_s(i.place, num_bytes)
        self._settle(i, self._program(i, What.SYNC, devices, seconds, arrived))

    def _agree(self, i: Agree) -> None:
        if i.name != "norm" or len(i.members) < 2:  # the host looks when it likes
            self._settle(i, self._task(i, What.SYNC, ()))
            return
        seconds = self._costs.duration_s(i)
        task = self._task(i, What.SYNC, (), seconds)
        for buffer in i.writes:
            devices = self._costs.devices(buffer.place)
            self._made[buffer] = (
                self._program(i, What.SYNC, devices, after=[task]) if devices else task
            )

    def _find_route(self, source: Place, target: Place) -> tuple[tuple[str, ...], int]:
        """Link queues between two places, and in how many pieces an array goes."""
        sources, targets = self._costs.devices(source), self._costs.devices(target)
        if self._node(sources) != self._node(targets):
            return (f"{self._node(sources)} out", f"{self._node(targets)} in"), 1
        ways = min(len(sources), len(targets))
        out = (f"{device} out" for device in sources[:ways])
        into = (f"{device} in" for device in targets[:ways])
        return (*out, *into), ways

    def _find_islands(self, devices: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._cluster.device(d).island for d in devices))

    def _node(self, devices: Sequence[str]) -> str:
        return self._cluster.device(devices[0]).node


def name(instruction: Instruction) -> str:
    """An instruction as a person reads it on a timeline."""
    kind = type(instruction).__name__
    match instruction:
        case Load(replica=replica, microbatch=microbatch):
            return f"{kind} r{replica} #{microbatch}"
        case (
            Forward(segment=g, microbatches=(m, _))
            | Backward(segment=g, microbatches=(m, _))
        ):
            return f"{kind} g{g} #{m}"
        case Send(source=source, target=target) | Recv(source=source, target=target):
            return f"{kind} {source} > {target}"
        case Reduce(group=group) | Gather(group=group) | Update(group=group):
            return f"{kind} {group}"
        case Agree(name=name):
            return f"{kind} {name}"
        case _:
            return kind
