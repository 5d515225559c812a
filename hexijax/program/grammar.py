"""How instructions are written: the one table behind the text and the JSON form.

A line is the opcode, its terms, and ``: reads -> writes``:

    forward r0.s1 g0 #2 : Param[r0.s1 l4] Act[r0.s1 L4 #2]! -> Act[r0.s1 L6 #2]
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hexijax.plan.plan import Place
from hexijax.program.program import (
    PLAIN,
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
    Memory,
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
    word,
)

NUMBER = r"[0-9]{1,9}"
QUOTED = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
WORD = rf"(?:{PLAIN}|{QUOTED})"
SUBJECT = rf"(?:{PLAIN}(?: {PLAIN})*|{QUOTED})"
BUFFER = re.compile(
    rf"({'|'.join(Kind)})\[({WORD}) ({SUBJECT})(?: #({NUMBER}))?\]"
    rf"(?:@(-?{NUMBER}))?(~host)?(!)?(?!\S)"
)

Parse = Callable[[str], Any]


def unquoted(text: str) -> str:
    """The name that ``word`` wrote."""
    return json.loads(text) if text.startswith('"') else text


def buffer_of(match: re.Match[str]) -> Buffer:
    """The buffer that ``BUFFER`` matched."""
    kind, place, subject, microbatch, step, host, _ = match.groups()
    return Buffer(
        Kind(kind),
        Place(unquoted(place)),
        unquoted(subject),
        None if microbatch is None else int(microbatch),
        int(step or 0),
        Memory.HOST if host else Memory.DEVICE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One field of an instruction, as it stands in a line."""

    field: str
    """Field of the instruction's class."""

    what: str
    """What a reader is told to put there."""

    pattern: re.Pattern[str]
    """The term and nothing after it."""

    write: Callable[[Any], str]
    read: Parse

    word: str = ""
    """Word before the term."""

    optional: bool = False
    """Left out where the field has its default."""


def _name(field: str, what: str, *, after: str = "") -> Term:
    pattern = re.compile(WORD)
    return Term(
        field=field, what=what, pattern=pattern, write=word, read=unquoted, word=after
    )


def _names(field: str, what: str, *, after: str) -> Term:
    return Term(
        field=field,
        what=f"{what} with commas between",
        pattern=re.compile(rf"\(\)|{WORD}(?:,{WORD})*"),
        write=lambda names: ",".join(map(word, names)) or "()",
        read=lambda text: tuple(map(unquoted, re.findall(WORD, text))),
        word=after,
    )


def _number(field: str, letter: str, *, optional: bool = False) -> Term:
    return Term(
        field=field,
        what=f"{letter} and a number",
        pattern=re.compile(rf"{letter}{NUMBER}"),
        write=lambda number: f"{letter}{number}",
        read=lambda text: int(text.removeprefix(letter)),
        optional=optional,
    )


def _choice(field: str, choices: Mapping[str, Any]) -> Term:
    """An optional word; a choice that is the field's default is never written."""
    return Term(
        field=field,
        what=" or ".join(choices),
        pattern=re.compile("|".join(choices)),
        write=lambda value: next(k for k, v in choices.items() if v == value),
        read=lambda text: choices[text],
        optional=True,
    )


def _buffer(field: str) -> Term:
    return Term(
        field=field,
        what="a buffer such as Act[r0.s1 L4 #2]",
        pattern=BUFFER,
        write=str,
        read=lambda text: buffer_of(_matched(text)),
    )


def _matched(text: str) -> re.Match[str]:
    match = BUFFER.match(text)
    assert match is not None
    return match


def _range(field: str) -> Term:
    def read(text: str) -> tuple[int, int]:
        first, _, stop = text.removeprefix("#").partition(":")
        return int(first), int(stop or int(first) + 1)

    return Term(
        field=field,
        what="a microbatch #2 or a range #2:4",
        pattern=re.compile(rf"#{NUMBER}(?::{NUMBER})?"),
        write=lambda r: f"#{r[0]}" if r[1] == r[0] + 1 else f"#{r[0]}:{r[1]}",
        read=read,
    )


_PATH = Term(
    field="path",
    what="'collective' and a number of elements",
    pattern=re.compile("collective [0-9]{1,12}"),
    write=lambda elements: f"collective {elements}",
    read=lambda text: int(text.split()[1]),
    optional=True,
)
_PLACE = _name("place", "a place")
_ENDS = (
    _number("tag", "t"),
    _name("source", "the source's place", after="from"),
    _name("target", "the target's place", after="to"),
)
_RUN = (_PLACE, _number("segment", "g"), _range("microbatches"))

TERMS: Mapping[type[Instruction], tuple[Term, ...]] = {
    Load: (_number("replica", "r"), _number("microbatch", "#")),
    Forward: (*_RUN, _choice("grad", {"eval": False, "grad": True})),
    Backward: (*_RUN, _choice("part", {str(part): part for part in Part})),
    Send: _ENDS,
    Recv: _ENDS,
    Gather: (
        _name("group", "a group"),
        _names("homes", "homes", after="from"),
        _names("places", "places", after="to"),
        _PATH,
    ),
    Join: (_name("group", "a group"), _name("place", "a place", after="at")),
    Reduce: (
        _name("group", "a group"),
        _names("members", "members", after="from"),
        _names("homes", "homes", after="to"),
        _PATH,
    ),
    Sum: (_name("group", "a group"), _name("home", "a home", after="at")),
    Agree: (_name("name", "a name"), _names("members", "members", after="to")),
    Update: (
        _name("group", "a group"),
        _name("home", "a home", after="at"),
        _choice("site", {str(site): site for site in Site}),
        _number("chunk", "chunk", optional=True),
    ),
    Prefetch: (_buffer("buffer"), _name("pool", "a pool", after="into")),
    WriteBack: (_buffer("buffer"), _name("pool", "a pool", after="from")),
    Snapshot: (),
    Free: (),
}
"""The fields of every instruction, in the order in which a line has them."""

OPCODES: Mapping[str, type[Instruction]] = {
    kind.__name__.lower(): kind for kind in TERMS
}


def opcode(instruction: Instruction) -> str:
    """The first word of its line."""
    return type(instruction).__name__.lower()


def default(kind: type[Instruction], field: str) -> Any:
    """The value of a field that a line leaves out."""
    return next(f.default for f in dataclasses.fields(kind) if f.name == field)


def is_left_out(instr: Instruction, term: Term) -> bool:
    """Whether the instruction's line does without the term."""
    value = getattr(instr, term.field)
    return term.optional and value == default(type(instr), term.field)
