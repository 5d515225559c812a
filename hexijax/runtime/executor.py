"""Follows a Program's order, one instruction after another, never waiting.

Every instruction becomes one prepared action over numbered slots. JAX dispatches
asynchronously: the order of calls is the order on each device. The executor owns no
queue and makes no choice.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from hexijax.program import names
from hexijax.program.fuse import fused_pairs
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Instruction,
    Kind,
    Program,
    WriteBack,
)
from hexijax.program.waiting import held_back
from hexijax.runtime.actions import Action, Actions, Parts, Slots, nothing
from hexijax.runtime.carrying import Spot, at_spot
from hexijax.runtime.later import Later, value
from hexijax.runtime.memories import check_memory

Watch = Callable[[Instruction, Sequence[Any]], None]
"""Told of an instruction and what it has written, once it is dispatched."""


class Executor:
    """A Program bound to compiled parts."""

    def __init__(self, program: Program, parts: Parts, name: str = "step"):
        """``name``: what sets it apart from other executors of its engine."""
        self._slot: dict[Buffer, int] = {}
        self.slots: Slots = []
        self._actions = Actions(parts, self._at)
        self._settle = parts.layout.carrier.settle
        self._name, self._runs = name, 0
        self._program = program
        self.prologue = self._spotted(
            program.prologue, [self._at_rest(i) for i in program.prologue]
        )
        self.body = self._spotted(program.body, self._body(program))
        self.drain = self._spotted(
            program.drain, [self._action(i) for i in program.drain]
        )
        self.given = _given(program)
        """State and parameters that a body finds where the step before left them."""
        ahead = [b for b in self._slot if b.step == 1]
        self._turn = [(self._slot[b], self._at(b._replace(step=0))) for b in ahead]
        late = [b for b in self._slot if b.step < 0]
        self._late = [(self._at(b._replace(step=0)), self._slot[b]) for b in late]
        self._due = False
        """Whether the last body left updates to the next."""
        of_drain = program.late
        self._starts = [of_drain.isdisjoint(i.writes) for i in program.body]
        """Of a body's actions, those of one that nothing is left to."""

    def run_prologue(self) -> None:
        """Parameters from state; call once state is in its slots.

        Raises:
          UserError: something is not in the memory that the Program says.
        """
        self._due = False
        for _, late in self._late:
            self.slots[late] = None
        self._run(self.prologue)
        for buffer in self.live():
            check_memory(buffer, self.get(buffer))

    def run_body(self) -> dict[Buffer, Any]:
        """One step; returns the scalars it left behind, but for what the next reads."""
        if self._due or not self.drain:
            self._run(self.body)
        else:
            self._run(list(itertools.compress(self.body, self._starts)))
        for now, late in self._late:
            self.slots[late], self.slots[now] = self.slots[now], None
        self._due = bool(self.drain)
        left = {
            b: self.slots[s]
            for b, s in self._slot.items()
            if b.kind is Kind.SCALAR and not names.is_scale(b) and b.step == 0
        }
        for b in left:
            self.slots[self._slot[b]] = None
        return left

    def settle(self) -> None:
        """Does what the last body left to the next: state and parameters are then those
        of one whole step."""
        if self._due:
            self._due = False
            self._run(self.drain)

    @contextlib.contextmanager
    def watched(self, then: Watch) -> Generator[None]:
        """While it lasts, ``then`` is told of each action of the body.

        What a fused forward does for its backward counts as the forward's.
        """
        plain = self.body

        def telling(action: Action, instruction: Instruction) -> Action:
            at = [self._at(b) for b in instruction.writes]

            def tell(slots: Slots) -> None:
                action(slots)
                then(instruction, [slots[slot] for slot in at])

            return tell

        self.body = [
            telling(action, instruction)
            for action, instruction in zip(plain, self._program.body, strict=True)
        ]
        try:
            yield
        finally:
            self.body = plain

    def _spotted(
        self, section: Sequence[Instruction], actions: list[Action]
    ) -> list[Action]:
        """Actions; those that other islands take part in say where they stand."""

        def spotted(index: int, instruction: Instruction, action: Action) -> Action:
            if not self._actions.shared(instruction):
                return action

            def said(slots: Slots) -> None:
                with at_spot(Spot((self._name, self._runs, index), instruction)):
                    action(slots)

            return said

        return [
            spotted(index, *both)
            for index, both in enumerate(zip(section, actions, strict=True))
        ]

    def _body(self, program: Program) -> list[Action]:
        """Actions of the body; a fused backward is done by its forward."""
        pairs, held = (
            fused_pairs(program),
            held_back(program.body, dict(program.leaving)),
        )
        actions = []
        for at, i in enumerate(program.body):
            pair = None
            if isinstance(i, Forward | Backward):
                pair = pairs.get((i.place, i.segment, i.microbatches))
            if pair is not None and isinstance(i, Forward):
                actions.append(self._then_forget(self._actions.fused(i, pair), i))
            elif pair is i:
                actions.append(self._then_forget(nothing, i))
            elif at in held:
                actions.append(self._held_back(self._action(i), held[at]))
            else:
                actions.append(self._action(i))
        return actions

    def _held_back(self, action: Action, copy: Buffer) -> Action:
        """It is dispatched once a copy has left the device: its own results would find
        the memory taken. What a host has used up has left, and so has what it makes."""
        slot = self._at(copy)

        def when_left(slots: Slots) -> None:
            if not isinstance(slots[slot], Later):
                jax.block_until_ready(
                    [x for x in jax.tree.leaves(slots[slot]) if not x.is_deleted()]
                )
            action(slots)

        return when_left

    def _run(self, actions: Sequence[Action]) -> None:
        slots = self.slots
        self._runs += 1
        for action in actions:
            action(slots)
        for ahead, now in self._turn:
            if slots[ahead] is not None:
                slots[now], slots[ahead] = slots[ahead], None

    def get(self, buffer: Buffer) -> Any:
        """What a buffer holds between steps."""
        if buffer.kind is Kind.STATE or buffer.kind is Kind.PARAM:
            self.settle()
        return self._settle(value(self.slots[self._at(buffer)]))

    def put(self, buffer: Buffer, value: Any) -> None:
        """Fill a buffer between steps."""
        self.slots[self._at(buffer)] = value

    def live(self) -> list[Buffer]:
        """Buffers that hold something now, of whole steps."""
        self.settle()
        return [b for b, s in self._slot.items() if self.slots[s] is not None]

    def _at(self, buffer: Buffer) -> int:
        slot = self._slot.setdefault(buffer, len(self._slot))
        if slot == len(self.slots):
            self.slots.append(None)
        return slot

    def _action(self, instruction: Instruction) -> Action:
        return self._then_forget(self._actions.make(instruction), instruction)

    def _at_rest(self, instruction: Instruction) -> Action:
        """What goes to the host has left the device before more comes: there may be
        no room for all."""
        action = self._action(instruction)
        if not isinstance(instruction, WriteBack):
            return action
        target = self._at(instruction.writes[0])

        def at_rest(slots: Slots) -> None:
            action(slots)
            jax.block_until_ready(slots[target])

        return at_rest

    def _then_forget(self, action: Action, instruction: Instruction) -> Action:
        dead = [self._at(read.buffer) for read in instruction.reads if read.dies]
        if not dead:
            return action

        def then_forget(slots: Slots) -> None:
            action(slots)
            for slot in dead:
                slots[slot] = None

        return then_forget


def _given(program: Program) -> tuple[Buffer, ...]:
    written = {buffer for i in program.body for buffer in i.writes}
    outlive = (Kind.STATE, Kind.PARAM)
    reads = (r.buffer for i in program.body for r in i.reads)
    return tuple(
        dict.fromkeys(b for b in reads if b.kind in outlive and b not in written)
    )
