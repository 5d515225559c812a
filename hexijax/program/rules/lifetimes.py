"""Each buffer is written once, read while it lives, and gone when its step is over.

Plays the prologue and two bodies: what the first leaves at step+1 the second must find,
so what holds for two holds for any number. Where a body begins with what the step
before left to do, one without that comes first, and again after the drain. Pools and
live microbatches are counted on the way.
"""

import dataclasses
from collections import Counter

from hexijax.errors import did_you_mean
from hexijax.plan.plan import Place
from hexijax.program import names
from hexijax.program.program import (
    HOST,
    Buffer,
    Instruction,
    Kind,
    Memory,
    Prefetch,
    Program,
    Update,
    WriteBack,
)
from hexijax.program.rules.facts import Facts, numbered
from hexijax.program.rules.fault import Faults

MOST_PASSES = 2
"""Whose parameters a place holds at once."""


@dataclasses.dataclass(slots=True)
class Peaks:
    """The most that was alive at once."""

    residuals: Counter[Place]
    """Microbatches with a Res of their forward, by stage."""

    handed: Counter[Place]
    """Microbatches with a Res for the weight part of their backward, by stage."""

    activations: Counter[Place]
    """Microbatches with an Act, by stage: those that have arrived early included."""

    slots: Counter[str]
    """Slots in use, by pool."""

    passes: Counter[Place]
    """Passes with parameters, by stage: those on their way included."""

    grads: Counter[Place]
    """Passes with gradients, by stage, where the plan has room for some only."""


def check_lifetimes(program: Program, facts: Facts, faults: Faults) -> Peaks:
    """Plays the Program; returns what it held."""
    play = _Play(program, facts, faults)
    for position, instr in numbered(program, "prologue"):
        play.run(position, instr)
    late = program.late
    for first, *others in [(late, (), ()), (late,)] if late else [((), ())]:
        for left_out in (first, *others):
            play.written.clear()
            for position, instr in numbered(program, "body"):
                if not any(b in left_out for b in instr.writes):
                    play.run(position, instr)
            play.end_body()
        play.written.clear()
        for position, instr in numbered(program, "drain"):
            play.run(position, instr)
    return play.peaks


class _Play:
    """What lives, and where it was written or died."""

    def __init__(self, program: Program, facts: Facts, faults: Faults) -> None:
        self.peaks = Peaks(
            Counter(), Counter(), Counter(), Counter(), Counter(), Counter()
        )
        self.written: dict[Buffer, int] = {}
        self._live: dict[Buffer, int] = {}
        self._died: dict[Buffer, int] = {}
        self._given = {
            (home, group.group)
            for group in facts.groups.values()
            for home in group.homes
        }
        if facts.scaled:
            self._given.add((HOST, names.scale(HOST).subject))
        self._faults = faults
        self._pools = dict(program.pools)
        self._slots: dict[Buffer, str] = {}
        self._held: Counter[tuple[str, Place, int | None]] = Counter()
        self._passes = facts.grad_passes
        self._most_grads = {place: s.grads for place, s in facts.plan.stages()}
        self._late = {
            r.buffer for i in program.body for r in i.reads if r.buffer.step < 0
        }

    def run(self, position: int, instr: Instruction) -> None:
        """One instruction: reads, deaths, writes."""
        for read in instr.reads:
            if read.buffer not in self._live:
                self._explain(position, read.buffer)
        pool = self._check_copy(position, instr)
        for read in instr.reads:
            if read.dies:
                if read.buffer not in self._live:
                    self._faults.at(
                        position, f"{read.buffer} dies twice here.", read.buffer
                    )
                self._end(position, read.buffer)
        for buffer in instr.writes:
            self._write(position, instr, buffer)
            if pool and (isinstance(instr, Prefetch) or buffer.kind is Kind.STATE):
                self._take_slot(position, pool, buffer)

    def end_body(self) -> None:
        """Checks what is left and counts its steps down by one."""
        left = list(self._live.items())
        self._live.clear()
        for buffer, position in left:
            outlives = _has_versions(buffer)
            if buffer.place == HOST and buffer != names.WEIGHT and not outlives:
                continue  # a result of the step
            before = buffer._replace(step=buffer.step - 1)
            if before in self._late:
                self._live[before] = position
                continue
            if buffer.step == 0 and (
                not outlives or names.is_slice(buffer) or names.is_freed(buffer)
            ):
                self._faults.at(
                    position,
                    f"{buffer} is still alive when the step is over. Only State, Param "
                    "and a loss scale outlive a step: mark its last reader with '!' or "
                    "free it.",
                    buffer,
                )
            later = buffer._replace(step=max(buffer.step - 1, 0))
            self._live[later] = position
            if buffer in self._slots:
                self._slots[later] = self._slots.pop(buffer)
        self._died.clear()

    def _explain(self, position: int, buffer: Buffer) -> None:
        """A read of what does not live: the state at the start, or a fault."""
        place_group = (buffer.place, buffer.subject)
        from_before = buffer.kind is Kind.STATE or names.is_scale(buffer)
        if from_before and place_group in self._given:
            self._given.remove(place_group)
            self._live[buffer] = position
            return
        if buffer in self._died:
            self._faults.at(
                position,
                f"{buffer} is read here, but it died at line {self._died[buffer]}. A "
                "last reader is marked with '!'; move the mark to this line.",
                buffer,
            )
        self._faults.at(
            position,
            f"{buffer} is read before anything writes it. An instruction stands after "
            "those that write what it reads.",
            buffer,
        )

    def _write(self, position: int, instr: Instruction, buffer: Buffer) -> None:
        copy = isinstance(instr, Prefetch | WriteBack)
        if buffer in self._live or (buffer in self.written and not copy):
            self._faults.at(
                position,
                f"{buffer} is written a second time. A value is written once; only a "
                "copy that has died may come back by Prefetch or WriteBack.",
                buffer,
            )
        if _has_versions(buffer):
            before = buffer._replace(step=buffer.step - 1)
            if before in self._live:
                self._faults.at(
                    position,
                    f"{before} still lives when its next version is written, so both "
                    "would take memory. Its last reader, marked '!', comes first.",
                    buffer,
                )
        self.written[buffer] = position
        self._live[buffer] = position
        self._count(buffer, 1)
        if names.is_freed(buffer) and self.peaks.passes[buffer.place] > MOST_PASSES:
            self._faults.at(
                position,
                f"{buffer} is one pass too many: {buffer.place} would hold parameters "
                f"of {self.peaks.passes[buffer.place]} passes at once, and "
                f"{MOST_PASSES} is the most: while one computes, the next travels.",
                buffer,
            )
        most = self._most_grads.get(buffer.place, 0)
        if buffer.kind is Kind.GRAD and most < self.peaks.grads[buffer.place]:
            self._faults.at(
                position,
                f"{buffer} is one pass too many: {buffer.place} would hold gradients "
                f"of {self.peaks.grads[buffer.place]} passes at once, and the plan has "
                f"room for {most}. The update of an earlier one comes first.",
                buffer,
            )

    def _end(self, position: int, buffer: Buffer) -> None:
        del self._live[buffer]
        self._died[buffer] = position
        self._slots.pop(buffer, None)
        self._count(buffer, -1)

    def _count(self, buffer: Buffer, change: int) -> None:
        """Counts microbatches that live on the devices of a stage, and passes."""
        freed = names.is_freed(buffer)
        segment = None
        if buffer.kind is Kind.GRAD:
            segment = self._passes.get((buffer.place, buffer.subject))
        counted = freed or buffer.kind is Kind.RES or buffer.kind is Kind.ACT
        if buffer.memory is Memory.HOST or not (counted or segment is not None):
            return
        peaks, what = self.peaks.activations, str(buffer.kind)
        if freed:
            peaks, what = self.peaks.passes, "pass"
        elif names.is_handed(buffer):
            peaks, what = self.peaks.handed, "handed"
        elif buffer.kind is Kind.RES:
            peaks = self.peaks.residuals
        elif buffer.kind is Kind.GRAD:
            peaks = self.peaks.grads
        turn = buffer.microbatch if segment is None else segment
        key = (what, buffer.place, turn)
        before = self._held[key]
        self._held[key] += change
        total = (what, buffer.place, None)
        self._held[total] += bool(self._held[key]) - bool(before)
        peaks[buffer.place] = max(peaks[buffer.place], self._held[total])

    def _check_copy(self, position: int, instr: Instruction) -> str:
        """The pool in which the writes of an instruction take slots, or nothing."""
        if isinstance(instr, Prefetch | WriteBack) and instr.pool not in self._pools:
            self._faults.at(
                position,
                f"The Program has no pool {instr.pool!r}; it has "
                f"{', '.join(self._pools) or 'none'}."
                f"{did_you_mean(instr.pool, self._pools)}",
            )
        if isinstance(instr, Prefetch):
            return instr.pool
        if isinstance(instr, WriteBack):
            pool = self._slots.get(instr.buffer, instr.pool)
            if pool != instr.pool:
                self._faults.at(
                    position,
                    f"{instr.buffer} has a slot of pool {pool!r}, not of "
                    f"{instr.pool!r}.",
                    instr.buffer,
                )
        if isinstance(instr, Update):  # the new state takes the donated slot
            donated = [r.buffer for r in instr.reads if r.dies]
            return next((self._slots[b] for b in donated if b in self._slots), "")
        return ""

    def _take_slot(self, position: int, pool: str, buffer: Buffer) -> None:
        self._slots[buffer] = pool
        used = sum(name == pool for name in self._slots.values())
        if used > self._pools[pool]:
            self._faults.at(
                position,
                f"Pool {pool!r} has {self._pools[pool]} slots and this would be number "
                f"{used}. Free or write back one of "
                f"{', '.join(str(b) for b, p in self._slots.items() if p == pool)}.",
                buffer,
            )
        self.peaks.slots[pool] = max(self.peaks.slots[pool], used)


def _has_versions(buffer: Buffer) -> bool:
    """Whether a step leaves it to the next, or writes the next step's."""
    return buffer.kind in (Kind.STATE, Kind.PARAM) or names.is_scale(buffer)
