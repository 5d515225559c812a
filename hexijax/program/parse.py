"""Reads the text form: a Program, or where and why the text is none.

    line -> opcode, terms, `: reads -> writes` -> Instruction

Every message names line and column, what was found there, and what belongs there.
"""

import re
from typing import Any, NoReturn

from hexijax.errors import did_you_mean
from hexijax.plan.plan import Place
from hexijax.program.grammar import (
    BUFFER,
    NUMBER,
    OPCODES,
    TERMS,
    WORD,
    Term,
    buffer_of,
    default,
    unquoted,
)
from hexijax.program.program import (
    FORMAT_VERSION,
    SECTIONS,
    Buffer,
    Instruction,
    Kind,
    Program,
    ProgramError,
    Read,
)


def parse(text: str) -> Program:
    """The Program that ``render`` wrote.

    Raises:
      ProgramError: naming line, column, what was found and what belongs there.
    """
    lines = [_Line(text, n) for n, text in enumerate(text.splitlines(), start=1)]
    lines = [item for item in lines if item.text.strip()]
    if not lines:
        raise ProgramError(
            f"The text is empty. A Program starts with 'hexijax program "
            f"{FORMAT_VERSION}'."
        )
    _header(lines[0])
    pools: list[tuple[str, int]] = []
    leaving: list[tuple[Place, int]] = []
    sections: dict[str, list[Instruction]] = {}
    interned: dict[str, Read] = {}
    for item in lines[1:]:
        if not sections and item.skip(r"pool\b"):
            name = unquoted(item.take(WORD, "a pool"))
            pools.append((name, int(item.take(NUMBER, "a number of slots"))))
            item.end()
        elif not sections and item.skip(r"leaving\b"):
            place = Place(unquoted(item.take(WORD, "a place")))
            leaving.append((place, int(item.take(NUMBER, "a number of chunks"))))
            item.end()
        elif len(sections) < 3 and item.skip(rf"{SECTIONS[len(sections)]}\s*$"):
            sections[SECTIONS[len(sections)]] = []
        elif not sections:
            item.fail("'pool', 'leaving' or the section 'prologue'")
        else:
            list(sections.values())[-1].append(_instruction(item, interned))
    if len(sections) < 3:
        raise ProgramError(
            f"line {lines[-1].number}: the text ends before the section "
            f"{SECTIONS[len(sections)]!r}. A Program has the sections "
            f"{', '.join(SECTIONS)}, each once and in this order."
        )
    made = {name: tuple(instrs) for name, instrs in sections.items()}
    return Program(**made, pools=tuple(pools), leaving=tuple(leaving))


def _header(item: "_Line") -> None:
    item.take("hexijax program", "'hexijax program'")
    version = int(item.take(NUMBER, "a format version"))
    item.end()
    if version != FORMAT_VERSION:
        raise ProgramError(
            f"The Program has format version {version}; this hexijax reads version "
            f"{FORMAT_VERSION}. Lower the plan again to write a new one."
        )


def _instruction(item: "_Line", interned: dict[str, Read]) -> Instruction:
    kind = OPCODES.get(item.peek())
    if kind is None:
        item.fail("an instruction", hint=did_you_mean(item.peek(), OPCODES))
    item.take(r"\w+", "an instruction")
    values = {term.field: item.term(kind, term) for term in TERMS[kind]}
    reads: tuple[Read, ...] = ()
    writes: tuple[Buffer, ...] = ()
    if item.skip(r":(?!\S)"):
        reads = item.reads(interned)
        item.take(r"->(?!\S)", "'->' or another buffer")
        written = item.reads(interned)
        if any(read.dies for read in written):
            item.fail("no '!' on what is written")
        writes = tuple(read.buffer for read in written)
    item.end()
    return kind(reads=reads, writes=writes, **values)


class _Line:
    """A line and how far it is read."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        self._at = len(text) - len(text.lstrip())

    def peek(self) -> str:
        """The next word, or nothing."""
        words = self.text[self._at :].split(maxsplit=1)
        return words[0] if words else ""

    def skip(self, pattern: str) -> bool:
        """Whether the pattern came next; then it is read."""
        match = re.compile(pattern).match(self.text, self._at)
        if match:
            self._move(match.end())
        return match is not None

    def take(self, pattern: str | re.Pattern[str], what: str) -> str:
        """The text that the pattern matches here."""
        match = re.compile(pattern).match(self.text, self._at)
        if match is None:
            self.fail(what)
        self._move(match.end())
        return match.group()

    def term(self, kind: type[Instruction], term: Term) -> Any:
        """The value of one field."""
        if term.optional and not term.pattern.match(self.text, self._at):
            return default(kind, term.field)
        if term.word:
            self.take(rf"{term.word}(?!\S)", f"'{term.word}' and {term.what}")
        return term.read(self.take(rf"(?:{term.pattern.pattern})(?!\S)", term.what))

    def reads(self, interned: dict[str, Read]) -> tuple[Read, ...]:
        """Buffers up to the arrow or the end."""
        found: list[Read] = []
        while self._at < len(self.text):
            match = BUFFER.match(self.text, self._at)
            if match is None:
                if self.peek() == "->":
                    break
                kind = self.peek().partition("[")[0]
                hint = did_you_mean(kind, map(str, Kind))
                self.fail("a buffer such as Act[r0.s1 L4 #2]", hint)
            text = match.group()
            if text not in interned:
                interned[text] = Read(buffer_of(match), dies=match.group(7) == "!")
            found.append(interned[text])
            self._move(match.end())
        return tuple(found)

    def end(self) -> None:
        """Nothing more stands in the line."""
        if self.peek():
            self.fail("the end of the line")

    def fail(self, expected: str, hint: str = "") -> NoReturn:
        """Says where, what was found and what belongs there."""
        found = repr(self.peek()) if self.peek() else "the end of the line"
        raise ProgramError(
            f"line {self.number}, column {self._at + 1}: found {found}, expected "
            f"{expected}.{hint}\n  {self.text}\n  {' ' * self._at}^"
        )

    def _move(self, end: int) -> None:
        self._at = len(self.text) - len(self.text[end:].lstrip())
