"""What an instruction does: one prepared action over numbered slots.

    instruction, compiled parts -> Actions.make -> action(slots)

Which slots it reads and writes, and what it calls, is settled once; an action is
dictionary-free Python and the calls themselves.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from hexijax.plan.plan import Place
from hexijax.program.program import (
    Agree,
    Backward,
    Buffer,
    Forward,
    Free,
    Gather,
    Instruction,
    Join,
    Kind,
    Load,
    Part,
    Prefetch,
    Recv,
    Reduce,
    Send,
    Site,
    Snapshot,
    Sum,
    Update,
    WriteBack,
)
from hexijax.runtime.borders import Border
from hexijax.runtime.carrying import come
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.later import later, once_there, value
from hexijax.runtime.layout import DEVICE, PINNED_HOST, Layout
from hexijax.runtime.lowering import Compiled
from hexijax.runtime.memories import copied, pin

Slots = list[Any]
Action = Callable[[Slots], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What actions are made of: compiled programs and the hooks of a step."""

    segments: Mapping[tuple[Place, int], Compiled]
    groups: Mapping[str, GroupRuntime]
    borders: Mapping[tuple[Place, Place, str, Kind], Border]
    zeros: Callable[[Place, tuple[str, ...]], Callable[[], Any]]
    """(place, groups) -> maker of fresh gradient accumulators, one after another."""
    load: Callable[[int, int, Place], Any]
    """(replica, microbatch, place) -> its batch arrays, of the current step."""
    consts: Callable[[Place], Mapping[str, Any]]
    """Large arrays the loss closed over, on a place."""
    seed: Callable[[Place], Any]
    """The factor of the loss sum in the backward, on a place."""
    judge: Callable[[Sequence[Any], Sequence[Place], Sequence[Place]], list[Any]]
    """Squared norms, and a dynamic loss scale if there is one; where they are -> (norm,
    factor, finite, scale) on each of some places."""
    rescale: Callable[[Sequence[Any], Sequence[Place], Sequence[Place]], list[Any]]
    """A loss scale as it is, or (verdict, scale); where they are -> the next step's: on
    each of some places."""
    collect: Callable[[Sequence[Any], Sequence[Place]], Any]
    """What microbatches left, and where -> what the host reads."""
    layout: Layout
    """Where places are, and what carries between them."""


class Actions:
    """One maker of actions an instruction."""

    def __init__(self, parts: Parts, at: Callable[[Buffer], int]):
        """``at``: the slot of a buffer."""
        self._parts, self._at = parts, at
        self._groups_of = {
            place_segment: compiled.segment.groups
            for place_segment, compiled in parts.segments.items()
        }

    def elsewhere(self, instruction: Instruction) -> bool:
        """Whether only other islands have to do with it."""
        if isinstance(instruction, Load | Agree):
            return False
        return not any(self._heres(instruction))

    def shared(self, instruction: Instruction) -> bool:
        """Whether other islands have to do with it, too."""
        if isinstance(instruction, Load | Free):
            return False
        if isinstance(instruction, Agree):
            return bool(self._parts.layout.readers)
        return len(set(self._heres(instruction))) > 1

    def _heres(self, instruction: Instruction) -> Iterator[bool]:
        """Of each place that has to do with it, whether it is driven here."""
        buffers = [*(r.buffer for r in instruction.reads), *instruction.writes]
        return (self._parts.layout.here(buffer.place) for buffer in buffers)

    def make(self, instruction: Instruction) -> Action:
        """Of one instruction; it forgets nothing."""
        if self.elsewhere(instruction):
            return nothing
        match instruction:
            case Load():
                action = self._load(instruction)
            case Forward():
                action = self._forward(instruction)
            case Backward():
                action = self._backward(instruction)
            case Send():
                action = self._send(instruction)
            case Recv():
                action = self._recv(instruction)
            case Sum():
                action = self._sum(instruction)
            case Join():
                action = self._join(instruction)
            case Reduce():
                action = self._reduce(instruction)
            case Agree():
                action = self._agree(instruction)
            case Update():
                action = self._update(instruction)
            case Gather():
                action = self._gather(instruction)
            case Free():
                action = nothing
            case Prefetch():
                action = self._copy(instruction, DEVICE)
            case WriteBack():
                action = self._copy(instruction, PINNED_HOST)
            case Snapshot():
                action = self._snapshot(instruction)
            case _:
                raise AssertionError(instruction)
        return action

    def _reads(self, instruction: Instruction, kind: Kind) -> dict[str, int]:
        return {
            r.buffer.subject: self._at(r.buffer)
            for r in instruction.reads
            if r.buffer.kind is kind
        }

    def _writes(self, instruction: Instruction, kind: Kind) -> dict[str, int]:
        return {b.subject: self._at(b) for b in instruction.writes if b.kind is kind}

    def _load(self, instruction: Load) -> Action:
        load = self._parts.load
        replica, microbatch = instruction.replica, instruction.microbatch
        places = [
            (b.place, self._at(b))
            for b in instruction.writes
            if b.kind is Kind.BATCH and self._parts.layout.here(b.place)
        ]

        def action(slots: Slots) -> None:
            for place, slot in places:
                slots[slot] = load(replica, microbatch, place)

        return action

    def _inputs(self, instruction: Forward | Backward) -> Callable[[Slots], Any]:
        """(params, act, batch, consts) of a segment call."""
        key = (instruction.place, instruction.segment)
        params = self._reads(instruction, Kind.PARAM)
        groups = [params[name] for name in self._groups_of[key]]
        act = list(self._reads(instruction, Kind.ACT).values())
        batch = list(self._reads(instruction, Kind.BATCH).values())
        segment = self._parts.segments[key].segment
        names = tuple(segment.batch)
        everywhere = self._parts.consts(instruction.place)
        consts = {name: everywhere[name] for name in segment.consts}

        def inputs(slots: Slots) -> Any:
            leaves = tuple(x for group in groups for x in value(slots[group]))
            arrays = slots[batch[0]] if names else {}
            return (
                leaves,
                come(slots[act[0]]) if act else (),
                {name: arrays[name] for name in names},
                consts,
            )

        return inputs

    def _forward(self, instruction: Forward) -> Action:
        compiled = self._parts.segments[instruction.place, instruction.segment]
        inputs = self._inputs(instruction)
        (out,) = (
            self._at(b) for b in instruction.writes if b.kind in (Kind.ACT, Kind.SCALAR)
        )
        if not instruction.grad:
            evaluate = compiled.evaluate
            assert evaluate is not None, instruction

            def action(slots: Slots) -> None:
                slots[out] = evaluate(*inputs(slots))

            return action
        (res,) = self._writes(instruction, Kind.RES).values()
        forward = compiled.forward
        assert forward is not None, instruction

        def action(slots: Slots) -> None:
            slots[out], slots[res] = forward(*inputs(slots))

        return action

    def _backward(self, instruction: Backward) -> Action:
        match instruction.part:
            case Part.INPUT:
                return self._backward_input(instruction)
            case Part.WEIGHT:
                return self._backward_weight(instruction)
            case Part.BOTH:
                return self._backward_whole(instruction)

    def _backward_whole(self, instruction: Backward) -> Action:
        compiled = self._parts.segments[instruction.place, instruction.segment]
        inputs = self._inputs(instruction)
        (res,) = self._reads(instruction, Kind.RES).values()
        cot = list(self._reads(instruction, Kind.COT).values())
        cot_out = list(self._writes(instruction, Kind.COT).values())
        seed, place = self._parts.seed, instruction.place
        grads_before, keep_grads = self._grads(instruction)
        backward = compiled.backward
        assert backward is not None, instruction

        def action(slots: Slots) -> None:
            d_out = come(slots[cot[0]]) if cot else seed(place)
            grads, d_in = backward(
                *inputs(slots), slots[res], d_out, grads_before(slots)
            )
            keep_grads(slots, grads)
            if cot_out:
                slots[cot_out[0]] = d_in

        return action

    def _backward_input(self, instruction: Backward) -> Action:
        compiled = self._parts.segments[instruction.place, instruction.segment]
        inputs = self._inputs(instruction)
        (res,) = self._reads(instruction, Kind.RES).values()
        cot = list(self._reads(instruction, Kind.COT).values())
        cot_out = list(self._writes(instruction, Kind.COT).values())
        (handed,) = self._writes(instruction, Kind.RES).values()
        seed, place = self._parts.seed, instruction.place
        split, run = compiled.segment.split, compiled.input
        assert run is not None, instruction

        def action(slots: Slots) -> None:
            params, act, batch, consts = inputs(slots)
            residuals = slots[res]
            d_out = come(slots[cot[0]]) if cot else seed(place)
            d_in, made = run(params, act, batch, consts, residuals, d_out)
            kept = [residuals[i] for i in split.residuals]
            slots[handed] = split.hand_on(act, kept, d_out if cot else (), made)
            if cot_out:
                slots[cot_out[0]] = d_in

        return action

    def _backward_weight(self, instruction: Backward) -> Action:
        compiled = self._parts.segments[instruction.place, instruction.segment]
        inputs = self._inputs(instruction)
        (handed,) = self._reads(instruction, Kind.RES).values()
        grads_before, keep_grads = self._grads(instruction)
        run = compiled.weight
        assert run is not None, instruction

        def action(slots: Slots) -> None:
            params, _, batch, consts = inputs(slots)
            grads = run(params, batch, consts, slots[handed], grads_before(slots))
            keep_grads(slots, grads)

        return action

    def fused(self, forward: Forward, backward: Backward) -> Action:
        """Of a last segment's forward that does its backward, too."""
        if self.elsewhere(forward):
            return nothing
        if backward.part is Part.INPUT:
            return self._fused_input(forward, backward)
        compiled = self._parts.segments[forward.place, forward.segment]
        inputs = self._inputs(forward)
        (out,) = (self._at(b) for b in forward.writes if b.kind is Kind.SCALAR)
        cot_out = list(self._writes(backward, Kind.COT).values())
        seed, place = self._parts.seed, forward.place
        grads_before, keep_grads = self._grads(backward)
        both = compiled.fused
        assert both is not None, forward

        def action(slots: Slots) -> None:
            slots[out], grads, d_in = both(
                *inputs(slots), seed(place), grads_before(slots)
            )
            keep_grads(slots, grads)
            if cot_out:
                slots[cot_out[0]] = d_in

        return action

    def _fused_input(self, forward: Forward, backward: Backward) -> Action:
        compiled = self._parts.segments[forward.place, forward.segment]
        inputs = self._inputs(forward)
        (out,) = (self._at(b) for b in forward.writes if b.kind is Kind.SCALAR)
        cot_out = list(self._writes(backward, Kind.COT).values())
        (handed,) = self._writes(backward, Kind.RES).values()
        seed, place = self._parts.seed, forward.place
        split, run = compiled.segment.split, compiled.fused_input
        assert run is not None, forward

        def action(slots: Slots) -> None:
            given = inputs(slots)
            slots[out], d_in, kept, made = run(*given, seed(place))
            slots[handed] = split.hand_on(given[1], kept, (), made)
            if cot_out:
                slots[cot_out[0]] = d_in

        return action

    def _grads(
        self, instruction: Backward
    ) -> tuple[Callable[[Slots], Any], Callable[[Slots, Any], None]]:
        """The accumulators a backward adds to, and where their sums go."""
        place = instruction.place
        before, after = (
            self._reads(instruction, Kind.GRAD),
            self._writes(instruction, Kind.GRAD),
        )
        groups = self._parts.groups
        names = [
            name
            for name in self._groups_of[place, instruction.segment]
            if groups[name].group.trainable
        ]
        sizes = [len(groups[name].group.leaves) for name in names]
        sources = [(before.get(n), size) for n, size in zip(names, sizes, strict=True)]
        new = tuple(name for name in names if name not in before)
        zeros = self._parts.zeros(place, new) if new else tuple
        targets: list[tuple[int, int, int]] = []
        start = 0
        for name in names:
            size = len(groups[name].group.leaves)
            targets.append((after[name], start, start + size))
            start += size

        def take(slots: Slots) -> Any:
            made = iter(zeros())
            return tuple(
                x
                for slot, size in sources
                for x in (itertools.islice(made, size) if slot is None else slots[slot])
            )

        def keep(slots: Slots, grads: Any) -> None:
            for slot, lo, hi in targets:
                slots[slot] = grads[lo:hi]

        return take, keep

    def _send(self, instruction: Send) -> Action:
        (read,) = (r.buffer for r in instruction.reads)
        border = self._border(instruction, read)
        source, (wire,) = self._at(read), (self._at(b) for b in instruction.writes)

        def action(slots: Slots) -> None:
            slots[wire] = border.send(slots[source])

        return action

    def _recv(self, instruction: Recv) -> Action:
        (written,) = instruction.writes
        border = self._border(instruction, written)
        wire, target = self._at(instruction.reads[0].buffer), self._at(written)

        def action(slots: Slots) -> None:
            slots[target] = border.recv(slots[wire])

        return action

    def _border(self, instruction: Send | Recv, buffer: Buffer) -> Border:
        key = (instruction.source, instruction.target, buffer.subject, buffer.kind)
        return self._parts.borders[key]

    def _reduce(self, instruction: Reduce) -> Action:
        group, path = self._parts.groups[instruction.group], instruction.path
        sources = {
            r.buffer.place: self._at(r.buffer)
            for r in instruction.reads
            if r.buffer.kind is Kind.GRAD
        }
        targets = {b.place: self._at(b) for b in instruction.writes}

        def action(slots: Slots) -> None:
            grads = {place: slots[s] for place, s in sources.items()}
            sent = group.reduce(grads, path) if path else group.send_grads(grads)
            for home, pieces in sent.items():
                slots[targets[home]] = pieces

        return action

    def _sum(self, instruction: Sum) -> Action:
        group, home = self._parts.groups[instruction.group], instruction.home
        (pieces,) = self._reads(instruction, Kind.PIECES).values()
        (grad,) = self._writes(instruction, Kind.GRAD).values()
        (norm,) = self._writes(instruction, Kind.SCALAR).values()
        group.prepare_sum(home)

        def action(slots: Slots) -> None:
            slots[grad], slots[norm] = group.sum(home, slots[pieces])

        return action

    def _agree(self, instruction: Agree) -> Action:
        parts = self._parts
        if instruction.name == "loss":
            # Losses are summed on the host, in this order, when someone looks.
            losses = [
                r.buffer
                for r in instruction.reads
                if r.buffer.subject == instruction.name
            ]
            reads = [self._at(buffer) for buffer in losses]
            sources = [buffer.place for buffer in losses]
            writes = [self._at(b) for b in instruction.writes]

            def collect(slots: Slots) -> None:
                values = parts.collect([slots[s] for s in reads], sources)
                for slot in writes:
                    slots[slot] = values

            return collect
        agree = parts.rescale if instruction.name == "scale" else parts.judge
        reads = [self._at(r.buffer) for r in instruction.reads]
        writes = [self._at(b) for b in instruction.writes]
        sources = [r.buffer.place for r in instruction.reads]
        places = [b.place for b in instruction.writes]

        def action(slots: Slots) -> None:
            given = agree([slots[s] for s in reads], sources, places)
            for slot, each in zip(writes, given, strict=True):
                slots[slot] = each

        return action

    def _update(self, instruction: Update) -> Action:
        group, home = self._parts.groups[instruction.group], instruction.home
        (state,) = self._reads(instruction, Kind.STATE).values()
        (grad,) = self._reads(instruction, Kind.GRAD).values()
        verdict = list(self._reads(instruction, Kind.SCALAR).values())
        (new_state,) = self._writes(instruction, Kind.STATE).values()
        new_slice = list(self._writes(instruction, Kind.PARAM).values())
        travels = bool(new_slice)
        settle = self._parts.layout.carrier.settle
        group.prepare_update(home, judged=bool(verdict), travels=travels)

        def on_host(slots: Slots) -> None:
            judged = settle(slots[verdict[0]]) if verdict else None
            work = functools.partial(
                group.update_on_host,
                *(home, slots[state], slots[grad], judged),
                travels=travels,
            )
            slots[new_state], made = later(work, 2)
            for slot in new_slice:
                slots[slot] = made

        if instruction.site is Site.HOST:
            return on_host

        def action(slots: Slots) -> None:
            judged = settle(slots[verdict[0]]) if verdict else None
            slots[new_state], made = group.update(
                home, slots[state], slots[grad], judged, travels=travels
            )
            for slot in new_slice:
                slots[slot] = made

        return action

    def _gather(self, instruction: Gather) -> Action:
        group, path = self._parts.groups[instruction.group], instruction.path
        states = [
            (r.buffer.place, self._at(r.buffer), r.buffer.kind is Kind.STATE)
            for r in instruction.reads
            if r.buffer.kind is Kind.STATE or r.buffer.subject.startswith("slice ")
        ]
        targets = {b.place: self._at(b) for b in instruction.writes}

        def made(*given: Any) -> tuple[Any, ...]:
            slices = {
                home: group.slices(home, x) if is_state else group.on_devices(home, x)
                for (home, _, is_state), x in zip(states, given, strict=True)
            }
            if path:
                gathered = group.gather(slices, path)
                return tuple(gathered[place] for place in targets)
            return tuple(group.send_params(list(targets), slices))

        def action(slots: Slots) -> None:
            given = [slots[slot] for _, slot, _ in states]
            pieces = once_there(made, given, len(targets))
            for slot, each in zip(targets.values(), pieces, strict=True):
                slots[slot] = each

        return action

    def _copy(self, instruction: Prefetch | WriteBack, kind: str) -> Action:
        (read,), (written,) = instruction.reads, instruction.writes
        source, target = self._at(read.buffer), self._at(written)
        put: Callable[[Any, Any], Any] = jax.device_put
        if kind == PINNED_HOST:
            put = functools.partial(pin, what=written)

        def copied(given: Any) -> tuple[Any]:
            arrays, tree = jax.tree.flatten(given)
            where = [x.sharding.with_memory_kind(kind) for x in arrays]
            return (jax.tree.unflatten(tree, put(arrays, where)),)

        def action(slots: Slots) -> None:
            (slots[target],) = once_there(copied, [come(slots[source])], 1)

        return action

    def _snapshot(self, instruction: Snapshot) -> Action:
        """Copies of one-device arrays; a ``Saver`` takes those of a whole engine."""
        pairs = [
            (self._at(read.buffer), self._at(written))
            for read, written in zip(instruction.reads, instruction.writes, strict=True)
        ]

        def action(slots: Slots) -> None:
            for source, target in pairs:
                arrays, tree = jax.tree.flatten(value(slots[source]))
                made = copied(arrays, instruction)
                slots[target] = jax.tree.unflatten(tree, made)

        return action

    def _join(self, instruction: Join) -> Action:
        group, place = self._parts.groups[instruction.group], instruction.place
        (pieces,) = self._reads(instruction, Kind.PIECES).values()
        (target,) = self._writes(instruction, Kind.PARAM).values()

        def joined(given: Any) -> tuple[Any]:
            return (group.join(place, given),)

        def action(slots: Slots) -> None:
            (slots[target],) = once_there(joined, [slots[pieces]], 1)

        return action


def nothing(slots: Slots) -> None:
    """Free: its buffers are forgotten by their dying reads."""
