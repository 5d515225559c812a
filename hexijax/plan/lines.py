"""Reads one line of a plan's text, word by word, with errors that point at the word.

line 9: expected a whole number after 'lanes', found '2x'.
    stage 0  devices fast/0-1  lanes 2x
                                     ^^
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from hexijax.errors import did_you_mean
from hexijax.plan.limits import MAX_INTEGER
from hexijax.plan.names import unfold
from hexijax.plan.plan import PlanError

_TOKEN = re.compile(
    r'(?P<space>\s+)|(?P<comment>#.*)|(?P<quoted>"(?:[^"\\]|\\.)*")'
    r'|(?P<mark>[,=])|(?P<word>[^\s,="#]+)|(?P<bad>.)',
    re.DOTALL,
)
_WHOLE = re.compile(r"[0-9]{1,19}")
_FLOAT = re.compile(r"[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A word, a quoted name, a ',' or a '='."""

    text: str
    """As written, without the quotes."""

    column: int
    """Where it starts, from 0."""

    kind: str
    """``word``, ``quoted`` or ``mark``; ``end`` after the last."""


class Line:
    """A cursor over the tokens of one line."""

    def __init__(self, text: str, number: int, source: str) -> None:
        self.text = text.expandtabs().rstrip()
        self.number = number
        self.source = source
        self._tokens = list(self._scan())
        self._at = 0

    def _scan(self) -> Iterator[Token]:
        for match in _TOKEN.finditer(self.text):
            kind, text = str(match.lastgroup), match.group()
            token = Token(text=text, column=match.start(), kind=kind)
            if kind in ("space", "comment"):
                continue
            if kind == "bad":
                self.fail("a closing quote", token)
            if kind == "quoted":
                try:
                    text = json.loads(text, strict=False)
                except ValueError:
                    self.fail("a quoted name as JSON writes one", token)
                token = dataclasses.replace(token, text=text)
            yield token

    def __bool__(self) -> bool:
        """Whether there is anything left to read."""
        return self._at < len(self._tokens)

    @property
    def next(self) -> Token:
        """The token to read next."""
        if self:
            return self._tokens[self._at]
        return Token(text="", column=len(self.text.rstrip()), kind="end")

    @property
    def last(self) -> Token:
        """The token read last."""
        return self._tokens[self._at - 1]

    def fail(
        self, expected: str, token: Token | None = None, choices: Iterable[str] = ()
    ) -> NoReturn:
        """Raises: what was expected, what stands there, and the line with a mark."""
        token = token or self.next
        found = "the end of the line" if token.kind == "end" else repr(token.text)
        mark = " " * token.column + "^" * max(1, len(token.text))
        near = did_you_mean(token.text, map(str, choices))
        raise PlanError(
            f"{self.source}, line {self.number}: expected {expected}, found {found}."
            f"{near}\n    {self.text}\n    {mark}"
        )

    def word(self, expected: str) -> str:
        """The next bare word."""
        token = self.next
        if token.kind != "word":
            self.fail(expected)
        self._at += 1
        return token.text

    def choice(self, choices: Iterable[str], expected: str) -> str:
        """The next word, which must be one of a few."""
        known = list(map(str, choices))  # enums print as members otherwise
        word = self.word(f"{expected}: {', '.join(known)}")
        if word not in known:
            self.fail(f"{expected}: {', '.join(known)}", self.last, known)
        return word

    def whole(self, name: str) -> int:
        """The next whole number."""
        expected = f"a whole number for {name}"
        word = self.word(expected)
        if not _WHOLE.fullmatch(word):
            self.fail(expected, self.last)
        return self._limited(int(word), expected)

    def numbers(self, name: str, separator: str, example: str) -> tuple[int, ...]:
        """Whole numbers in one word, such as ``2+2`` or ``0-3``."""
        expected = f"{name} such as {example}"
        parts = self.word(expected).split(separator)
        if not all(_WHOLE.fullmatch(part) for part in parts):
            self.fail(expected, self.last)
        return tuple(self._limited(int(part), expected) for part in parts)

    def _limited(self, number: int, expected: str) -> int:
        if number > MAX_INTEGER:
            self.fail(f"{expected} of at most {MAX_INTEGER}", self.last)
        return number

    def decimal(self, name: str) -> float:
        """The next number, not negative."""
        expected = f"a number from 0 for {name}"
        word = self.word(expected)
        if not _FLOAT.fullmatch(word) or not math.isfinite(float(word)):
            self.fail(expected, self.last)
        return float(word)

    def names(self, what: str) -> tuple[str, ...]:
        """A list such as ``fast/0-1,slow/0``."""
        found = [*self.name(what)]
        while self.mark(","):
            found += self.name(what)
        return tuple(found)

    def name(self, what: str) -> tuple[str, ...]:
        """One name, or the names of one range."""
        token = self.next
        if token.kind not in ("word", "quoted"):
            self.fail(f"{what} such as fast/0-1,slow/0")
        self._at += 1
        if token.kind == "quoted":
            return (token.text,)
        try:
            return unfold(token.text)
        except ValueError as error:
            self.fail(str(error), token)

    def mark(self, mark: str) -> bool:
        """Reads the mark if it comes next, and says whether it did."""
        if self.next.kind == "mark" and self.next.text == mark:
            self._at += 1
            return True
        return False

    def end(self) -> None:
        """Nothing but a comment may follow."""
        if self:
            self.fail("the end of the line")
