"""Loads, runs and copies read and write what their kind says, and no more."""

from collections.abc import Iterable

from hexijax.plan.plan import Place
from hexijax.program import names
from hexijax.program.program import (
    Backward,
    Buffer,
    Forward,
    Free,
    Instruction,
    Kind,
    Load,
    Memory,
    Part,
    Prefetch,
    Program,
    Site,
    Snapshot,
    Update,
    WriteBack,
)
from hexijax.program.rules.facts import Facts
from hexijax.program.rules.fault import Faults


def check_signatures(program: Program, facts: Facts, faults: Faults) -> None:
    """Every instruction of every section that the plan alone determines."""
    for position, instr in enumerate(program):
        match instr:
            case Forward() | Backward() if _key(instr) not in facts.segments:
                faults.at(position, f"The plan has no segment g{instr.segment} there.")
            case Forward():
                reads, writes = _forward(instr, facts)
            case Backward():
                reads, writes = _backward(instr, facts)
            case Load() if instr.replica in facts.batch_places:
                reads, writes = _load(instr, facts)
            case Prefetch() | WriteBack():
                _check_copy(position, instr, faults)
                continue
            case _:
                _check_rest(position, instr, program, faults)
                continue
        shift = 0
        if isinstance(instr, Forward | Backward):
            shift = min((b.step for b in instr.writes), default=0)
            _check_grads(position, instr, facts, faults)
            _check_passes(position, instr, facts, faults)
        _compare(
            position, "read", (r.buffer for r in instr.reads), reads, shift, faults
        )
        _compare(position, "write", instr.writes, writes, shift, faults)


def _check_copy(position: int, instr: Prefetch | WriteBack, faults: Faults) -> None:
    """It goes from one memory to the other."""
    due = [instr.buffer, names.on_host(instr.buffer)]
    if isinstance(instr, Prefetch):
        due.reverse()
    if [*(r.buffer for r in instr.reads), *instr.writes] != due:
        faults.at(position, f"It must read {due[0]} and write {due[1]}.")


def _load(instr: Load, facts: Facts) -> tuple[list[Buffer], list[Buffer]]:
    """The first of a step makes the weight, the first of a replica its seed."""
    places = facts.batch_places[instr.replica]
    reads: list[Buffer] = []
    writes = [names.batch(place, instr.microbatch) for place in places]
    if instr.microbatch == 0 and facts.trains:
        writes.append(names.seed(places[-1]))
        if facts.scaled:
            reads.append(names.scale(places[-1]))
    if names.WEIGHT in instr.writes:
        writes.append(names.WEIGHT)
    elif instr.microbatch == 0:
        reads.append(names.WEIGHT)
    return reads, writes


def _forward(instr: Forward, facts: Facts) -> tuple[list[Buffer], list[Buffer]]:
    segment = facts.segments[instr.place, instr.segment]
    writes = []
    for m in range(*instr.microbatches):
        if segment.is_last:
            writes.append(names.loss(instr.place, m))
        else:
            writes.append(names.act(instr.place, segment.layers[1], m))
        if instr.grad:
            writes.append(names.res(instr.place, instr.segment, m))
    return _inputs(instr, facts), writes


def _backward(instr: Backward, facts: Facts) -> tuple[list[Buffer], list[Buffer]]:
    place, (first, stop) = (
        instr.place,
        facts.segments[instr.place, instr.segment].layers,
    )
    microbatches = range(*instr.microbatches)
    writes: list[Buffer] = []
    if instr.part is Part.WEIGHT:
        reads = _inputs(instr, facts, act=False)
        reads += [names.weight_res(place, instr.segment, m) for m in microbatches]
        return reads, writes
    reads = _inputs(instr, facts)
    reads += [names.res(place, instr.segment, m) for m in microbatches]
    if facts.segments[place, instr.segment].is_last:
        reads.append(names.seed(place))
    else:
        reads += [names.cot(place, stop, m) for m in microbatches]
    if facts.segments[place, instr.segment].hands_back:
        writes += [names.cot(place, first, m) for m in microbatches]
    if instr.part is Part.INPUT:
        writes += [names.weight_res(place, instr.segment, m) for m in microbatches]
    return reads, writes


def _inputs(
    instr: Forward | Backward, facts: Facts, *, act: bool = True
) -> list[Buffer]:
    segment = facts.segments[instr.place, instr.segment]
    inputs = [names.param(instr.place, group) for group in segment.kept]
    for m in range(*instr.microbatches):
        if segment.layers[0] > 0 and act:
            inputs.append(names.act(instr.place, segment.layers[0], m))
        if segment.reads_batch:
            inputs.append(names.batch(instr.place, m))
    return inputs


def _check_rest(
    position: int, instr: Instruction, program: Program, faults: Faults
) -> None:
    """What can be said of a Free, a Snapshot or an Update from its line alone."""
    if isinstance(instr, Free) and (
        instr.writes or not all(read.dies for read in instr.reads)
    ):
        faults.at(position, "All that a Free reads dies there, and it writes nothing.")
    if isinstance(instr, Snapshot):
        before_drain = len(program.prologue) + len(program.body)
        kinds = {read.buffer.kind for read in instr.reads}
        if position < before_drain or kinds != {Kind.STATE}:
            faults.at(
                position,
                "A Snapshot copies State, and stands in the drain: only there is the "
                "state that of one whole step.",
            )
    if isinstance(instr, Update):
        memory = Memory.HOST if instr.site is Site.HOST else Memory.DEVICE
        for read in instr.reads:
            if read.buffer.kind is Kind.STATE and read.buffer.memory is not memory:
                faults.at(
                    position,
                    f"An update at site {instr.site} reads its State in {memory} "
                    "memory; Prefetch and WriteBack move it.",
                    read.buffer,
                )


def _check_grads(
    position: int, instr: Forward | Backward, facts: Facts, faults: Faults
) -> None:
    """A Backward adds to one gradient of each of its groups that train, and to no
    other."""
    before = {r.buffer.subject: r.buffer for r in instr.reads if _is_grad(r.buffer)}
    after = {b.subject: b for b in instr.writes if _is_grad(b)}
    adds = isinstance(instr, Backward) and instr.part is not Part.INPUT
    groups = facts.segments[instr.place, instr.segment].trained if adds else ()
    if set(after) != set(groups) or not set(before) <= set(groups):
        faults.at(
            position,
            f"It writes gradients of {_list(after)} where its segment has the "
            f"parameter groups {_list(groups)}. A backward (not its input part) adds "
            "to the gradient of each of its groups that train, and a forward to none.",
        )
    for group, buffer in after.items():
        count = buffer.microbatch or 0
        expected = names.partial_grad(instr.place, group, count - 1) if count else None
        found = before.get(group)
        if found and buffer.step:
            found = found._replace(step=0)
        if found != expected:
            faults.at(
                position,
                f"{buffer} adds to {found}; it must add to {expected}. Additions to a "
                "gradient form one chain, counted from 0, so that none is lost.",
                buffer,
            )


def _check_passes(
    position: int, instr: Forward | Backward, facts: Facts, faults: Faults
) -> None:
    """Of what its place frees, a run reads the parameters of one pass."""
    segment = facts.segments[instr.place, instr.segment]
    found = [r.buffer for r in instr.reads if names.is_freed(r.buffer)]
    due = [group for group in segment.groups if group not in segment.kept]
    numbers = {buffer.microbatch for buffer in found}
    if sorted(b.subject for b in found) == sorted(due) and len(numbers) <= 1:
        return
    faults.at(
        position,
        f"It reads parameters of passes: {_list(map(str, found))}. Its segment frees "
        f"{_list(due)} after each pass: it reads one of each, all of one pass.",
    )


def _compare(
    position: int,
    verb: str,
    found: Iterable[Buffer],
    expected: Iterable[Buffer],
    shift: int,
    faults: Faults,
) -> None:
    actual = [b for b in found if not (_is_grad(b) or names.is_freed(b))]
    wanted = {b._replace(step=b.step + shift) if shift else b for b in expected}
    if len(actual) == len(wanted) and wanted.issuperset(actual):
        return
    for i, buffer in enumerate(actual):
        if buffer not in wanted or buffer in actual[:i]:
            faults.at(
                position, f"It must not {verb} {buffer}, or not more than once.", buffer
            )
    missing = next(buffer for buffer in wanted if buffer not in actual)
    faults.at(position, f"It must {verb} {missing} and does not.")


def _key(instr: Forward | Backward) -> tuple[Place, int]:
    return instr.place, instr.segment


def _is_grad(buffer: Buffer) -> bool:
    return buffer.kind is Kind.GRAD and buffer.microbatch is not None


def _list(items: Iterable[str]) -> str:
    return ", ".join(items) or "none"
