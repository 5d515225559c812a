"""Programs changed by hand: what a later pass, an editor, or a mistake may make."""

import dataclasses
from collections.abc import Iterator

from hexijax.program import names
from hexijax.program.program import (
    Backward,
    Buffer,
    Gather,
    Instruction,
    Kind,
    Memory,
    Part,
    Prefetch,
    Program,
    Read,
    WriteBack,
)


def with_body(program: Program, body: list[Instruction]) -> Program:
    """The same Program with another body."""
    return dataclasses.replace(program, body=tuple(body))


def without(program: Program, index: int) -> Program:
    """One instruction of the body dropped."""
    return with_body(program, [*program.body[:index], *program.body[index + 1 :]])


def doubled(program: Program, index: int) -> Program:
    """One instruction of the body twice in a row."""
    return with_body(program, [*program.body[: index + 1], *program.body[index:]])


def with_reads(program: Program, index: int, reads: tuple[Read, ...]) -> Program:
    """One instruction of the body reading something else."""
    body = list(program.body)
    body[index] = dataclasses.replace(body[index], reads=reads)
    return with_body(program, body)


def split_backwards(program: Program) -> Program:
    """Every Backward as its input part and, right after, its weight part."""
    body: list[Instruction] = []
    for instr in program.body:
        body += _halves(instr) if isinstance(instr, Backward) else [instr]
    return with_body(program, body)


def _halves(instr: Backward) -> Iterator[Backward]:
    kept = names.weight_res(instr.place, instr.segment, instr.microbatches[0])
    both = (Kind.PARAM, Kind.BATCH)
    again = tuple(r for r in instr.reads if r.buffer.kind in both)
    grads = tuple(r for r in instr.reads if r.buffer.kind is Kind.GRAD)
    written = tuple(b for b in instr.writes if b.kind is Kind.GRAD)
    yield dataclasses.replace(
        instr,
        part=Part.INPUT,
        reads=tuple(
            Read(r.buffer, r.dies and r not in again)
            for r in instr.reads
            if r not in grads
        ),
        writes=(*(b for b in instr.writes if b not in written), kept),
    )
    yield dataclasses.replace(
        instr,
        part=Part.WEIGHT,
        reads=(*again, Read(kept, dies=True), *grads),
        writes=written,
    )


def host_twin(buffer: Buffer) -> Buffer:
    """The copy in pinned host memory."""
    return buffer._replace(memory=Memory.HOST)


def with_waiting_residuals(program: Program, slots: int) -> Program:
    """Residuals wait in host memory between their Forward and their Backward."""
    body: list[Instruction] = []
    for instr in program.body:
        needed = [r.buffer for r in instr.reads if r.buffer.kind is Kind.RES]
        body += [_prefetch(buffer) for buffer in needed]
        body.append(instr)
        body += [_write_back(b) for b in instr.writes if b.kind is Kind.RES]
    return dataclasses.replace(program, body=tuple(body), pools=(("pool", slots),))


def with_streamed_state(program: Program, slots: int) -> Program:
    """State lives in host memory and visits the device for its update."""
    body: list[Instruction] = []
    for instr in program.body:
        states = [r.buffer for r in instr.reads if r.buffer.kind is Kind.STATE]
        body += [_prefetch(buffer) for buffer in states]
        body.append(instr)
        body += [_write_back(b) for b in instr.writes if b.kind is Kind.STATE]
    prologue = [
        dataclasses.replace(
            instr, reads=tuple(Read(host_twin(r.buffer)) for r in instr.reads)
        )
        if isinstance(instr, Gather)
        else instr
        for instr in program.prologue
    ]
    return Program(prologue=tuple(prologue), body=tuple(body), pools=(("pool", slots),))


def _prefetch(buffer: Buffer) -> Prefetch:
    return Prefetch(
        buffer=buffer,
        pool="pool",
        reads=(Read(host_twin(buffer), dies=True),),
        writes=(buffer,),
    )


def _write_back(buffer: Buffer) -> WriteBack:
    return WriteBack(
        buffer=buffer,
        pool="pool",
        reads=(Read(buffer, dies=True),),
        writes=(host_twin(buffer),),
    )
