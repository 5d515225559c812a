"""The Program as plain dicts and lists; ``from_json(to_json(p)) == p``.

Fields and buffers are spelled as in the text form, so both have one grammar.
"""

from collections.abc import Mapping
from typing import Any

from hexijax.errors import did_you_mean
from hexijax.plan.plan import Place
from hexijax.program.grammar import (
    BUFFER,
    OPCODES,
    TERMS,
    buffer_of,
    is_left_out,
    opcode,
)
from hexijax.program.program import (
    FORMAT_VERSION,
    SECTIONS,
    Instruction,
    Program,
    ProgramError,
    Read,
)


def to_json(program: Program) -> dict[str, Any]:
    """The Program as JSON can hold it."""
    sections = {
        section: [_instruction_to_json(i) for i in getattr(program, section)]
        for section in SECTIONS
    }
    pools = [[name, slots] for name, slots in program.pools]
    leaving = [[place, chunks] for place, chunks in program.leaving]
    return {
        "version": FORMAT_VERSION,
        "pools": pools,
        "leaving": leaving,
        **sections,
    }


def from_json(data: Mapping[str, Any]) -> Program:
    """The Program that ``to_json`` wrote.

    Raises:
      ProgramError: naming the entry, what was found and what belongs there.
    """
    version = data.get("version") if isinstance(data, Mapping) else None
    if version != FORMAT_VERSION:
        raise ProgramError(
            f"The Program has format version {version!r}; this hexijax reads version "
            f"{FORMAT_VERSION}. Lower the plan again to write a new one."
        )
    sections = {
        section: tuple(
            _instruction_from_json(entry, f"{section}[{i}]")
            for i, entry in enumerate(_list(data.get(section), section))
        )
        for section in SECTIONS
    }
    pools, leaving = (
        [
            _counted(entry, f"{name}[{i}]", of)
            for i, entry in enumerate(_list(data.get(name, []), name))
        ]
        for name, of in (("pools", "slots"), ("leaving", "chunks"))
    )
    return Program(
        **sections,
        pools=tuple(pools),
        leaving=tuple((Place(name), chunks) for name, chunks in leaving),
    )


def _instruction_to_json(instr: Instruction) -> dict[str, Any]:
    fields = {
        term.field: term.write(getattr(instr, term.field))
        for term in TERMS[type(instr)]
        if not is_left_out(instr, term)
    }
    reads, writes = [*map(str, instr.reads)], [*map(str, instr.writes)]
    return {"op": opcode(instr), **fields, "reads": reads, "writes": writes}


def _instruction_from_json(entry: Any, where: str) -> Instruction:
    if not isinstance(entry, Mapping):
        raise _unexpected(where, entry, "an instruction")
    name = entry.get("op")
    kind = OPCODES.get(name) if isinstance(name, str) else None
    if kind is None:
        hint = did_you_mean(name, OPCODES) if isinstance(name, str) else ""
        raise _unexpected(f"{where}.op", name, "an instruction", hint)
    values = {}
    for term in TERMS[kind]:
        text = entry.get(term.field)
        if text is None and term.optional:
            continue
        if not isinstance(text, str) or not term.pattern.fullmatch(text):
            raise _unexpected(f"{where}.{term.field}", text, term.what)
        values[term.field] = term.read(text)
    reads = [
        _read(text, f"{where}.reads[{i}]")
        for i, text in enumerate(_list(entry.get("reads"), f"{where}.reads"))
    ]
    writes = [
        _read(text, f"{where}.writes[{i}]").buffer
        for i, text in enumerate(_list(entry.get("writes"), f"{where}.writes"))
    ]
    return kind(reads=tuple(reads), writes=tuple(writes), **values)


def _read(text: Any, where: str) -> Read:
    match = BUFFER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise _unexpected(where, text, "a buffer such as Act[r0.s1 L4 #2]")
    return Read(buffer_of(match), dies=match.group(7) == "!")


def _counted(entry: Any, where: str, of: str) -> tuple[str, int]:
    match entry:
        case [str(name), int(number)] if not isinstance(number, bool):
            return name, number
    raise _unexpected(where, entry, f"a name and a number of {of}")


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _unexpected(where, value, "a list")
    return value


def _unexpected(where: str, found: Any, expected: str, hint: str = "") -> ProgramError:
    return ProgramError(f"{where}: found {found!r}, expected {expected}.{hint}")
