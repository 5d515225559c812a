"""When every instruction of a step ends, without holding the step up.

    Engine, batch, step -> Tracer.step -> StepResult; Tracer.events -> Ran, ...

After each program a number of what it wrote is copied by a program of its own, a token,
which a watcher waits for: what a program writes may be overwritten by then, a token is
not. What only moves is waited for itself, since a token would make the device wait for
it. Ends are therefore late by a token's call, some ten microseconds a program, and what
was overwritten before it was seen has no end.

An instruction starts when it has been dispatched, what it reads is there, and its
queue, of programs, of copies one way or of the host's updates, is done with what was
dispatched before.
"""

import dataclasses
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.program.fuse import fused_pairs
from hexijax.program.program import (
    Agree,
    Backward,
    Buffer,
    Forward,
    Free,
    Instruction,
    Join,
    Load,
    Prefetch,
    Site,
    Sum,
    Update,
    WriteBack,
)
from hexijax.runtime.engine import Engine
from hexijax.runtime.later import Later, value
from hexijax.runtime.results import StepResult

COMPUTE = (Forward, Backward, Sum, Update, Join, Agree)
"""Programs; all else moves."""

SWITCH_S = 2e-4
"""In which threads take turns meanwhile: at Python's 5 ms ends would be seen late."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """An instruction of a step, on one device."""

    instruction: Instruction
    """Which."""

    device: str
    """That computed it, or that it moved to."""

    start_s: float
    """Since the step's first program was dispatched."""

    end_s: float
    """Seen."""

    computes: bool
    """Whether it is a program, and no copy."""

    fused: bool
    """A forward that does its backward, too."""

    waited_s: float
    """For which the device had done nothing before it."""

    waited_for: Instruction | None
    """What was still under way then; None: it was not dispatched yet."""


@dataclasses.dataclass(kw_only=True, slots=True)
class _Seen:
    """What is known of an instruction on a device."""

    instruction: Instruction
    device: str
    dispatched_s: float
    end_s: float | None = None


class Tracer:
    """Watches steps of an engine; each overwrites what was known of the one before."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._names = {device: name for name, device in engine.devices.items()}
        pairs = fused_pairs(engine.program)
        self._fused = {
            id(i): pairs[key]
            for i in engine.program.body
            if isinstance(i, Forward)
            and (key := (i.place, i.segment, i.microbatches)) in pairs
        }
        """Forwards that do their backward, too, and which."""
        self._done = {id(pair) for pair in pairs.values()}
        """Backwards that their forwards do."""
        self._seen: list[_Seen] = []
        self._token = jax.jit(lambda x: jnp.ravel(x)[:1])

    def step(self, batch: Mapping[str, Any], step: int) -> StepResult:
        """A step as ``Engine.step``, watched until all of it has ended."""
        self._seen = []
        waiting: dict[tuple[str, str], queue.SimpleQueue[Any]] = {}
        watchers: list[threading.Thread] = []
        usual = sys.getswitchinterval()

        def then(instruction: Instruction, written: Sequence[Any]) -> None:
            now = time.perf_counter()
            if not written or isinstance(instruction, Free | Load):
                return
            if id(instruction) in self._done:
                return
            computes = _computes(instruction)
            for device, what in self._to_wait_for(written, tokens=computes).items():
                seen = _Seen(instruction=instruction, device=device, dispatched_s=now)
                self._seen.append(seen)
                key = (device, _queue(instruction))
                if key not in waiting:
                    waiting[key] = queue.SimpleQueue()
                    thread = threading.Thread(
                        target=_watch, args=(waiting[key],), daemon=True
                    )
                    thread.start()
                    watchers.append(thread)
                waiting[key].put((seen, what))

        sys.setswitchinterval(SWITCH_S)
        try:
            return self._engine.watched_step(batch, step, then)
        finally:
            for each in waiting.values():
                each.put(None)
            for thread in watchers:
                thread.join()
            sys.setswitchinterval(usual)

    def events(self) -> list[Ran]:
        """Of the last step, in the order of dispatch; seconds from its first start."""
        free_s: dict[tuple[str, str], float] = {}
        there: dict[Buffer, tuple[float, Instruction]] = {}
        found: list[Ran] = []
        first_s = min((seen.dispatched_s for seen in self._seen), default=0.0)
        for seen in self._seen:
            if seen.end_s is None:
                continue
            i = seen.instruction
            key = (seen.device, _queue(i))
            ready_s, last = seen.dispatched_s, None
            for read in i.reads:
                if read.buffer in there and there[read.buffer][0] > ready_s:
                    ready_s, last = there[read.buffer]
            ready_s = min(ready_s, seen.end_s)
            before_s = free_s.get(key, first_s)
            free_s[key] = seen.end_s
            pair = self._fused.get(id(i))
            for buffer in i.writes if pair is None else (*i.writes, *pair.writes):
                end_s, _ = there.get(buffer, (0.0, i))
                there[buffer] = (max(end_s, seen.end_s), i)
            found.append(
                Ran(
                    instruction=i,
                    device=seen.device,
                    start_s=min(max(ready_s, before_s), seen.end_s) - first_s,
                    end_s=seen.end_s - first_s,
                    computes=_computes(i),
                    fused=pair is not None,
                    waited_s=max(0.0, ready_s - before_s),
                    waited_for=last,
                )
            )
        return found

    def _to_wait_for(
        self, written: Sequence[Any], *, tokens: bool
    ) -> dict[str, list[Any]]:
        """By device, what is there when the instruction has ended."""
        found: dict[str, list[Any]] = {}
        for x in jax.tree.leaves(written, is_leaf=_is_later):
            if _is_later(x):  # the host's own, still to come
                found.setdefault(self._host_of(), []).append(x)
                continue
            if not isinstance(x, jax.Array) or not x.size:
                continue
            for shard in x.addressable_shards:
                name = self._names.get(shard.device)
                if name is None:
                    continue
                if not tokens:
                    found.setdefault(name, []).append(shard.data)
                elif name not in found:
                    found[name] = [self._token(shard.data)]
        return found

    def _host_of(self) -> str:
        """Host updates are told on the first device."""
        return next(iter(self._engine.devices))


def _computes(instruction: Instruction) -> bool:
    """Whether its device runs a program for it."""
    if isinstance(instruction, Update):
        return instruction.site is not Site.HOST
    return isinstance(instruction, COMPUTE)


def _queue(instruction: Instruction) -> str:
    """What is done one after another: the device's programs, copies each way, the
    host's updates, and what else moves."""
    if _computes(instruction):
        return "computes"
    match instruction:
        case Prefetch():
            return "in"
        case WriteBack():
            return "out"
        case Update():
            return "host"
        case _:
            return "moves"


def _watch(waiting: "queue.SimpleQueue[Any]") -> None:
    """Writes down when each thing was there."""
    while (item := waiting.get()) is not None:
        seen, what = item
        try:
            jax.block_until_ready(jax.tree.map(value, what, is_leaf=_is_later))
        except RuntimeError as error:
            if "deleted" not in str(error) and "donated" not in str(error):
                raise
            continue  # overwritten before it was seen: no end is known
        seen.end_s = time.perf_counter()


def _is_later(x: Any) -> bool:
    return isinstance(x, Later)
