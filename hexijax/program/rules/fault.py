"""How a rule says what is wrong: the Program is shown with its fault marked."""

import dataclasses
from typing import NoReturn

from hexijax.program.program import Buffer, Program, ProgramError
from hexijax.program.text import by_stage, line

SHOWN_WHOLE = 80
"""Lines up to which a Program is shown whole; of a longer one, the part around."""

AROUND = 12
"""Lines shown before and after a fault of a long Program."""


@dataclasses.dataclass(frozen=True, slots=True)
class Faults:
    """Raises the faults of one Program."""

    program: Program

    def at(self, position: int, message: str, buffer: Buffer | None = None) -> NoReturn:
        """Something is wrong with one instruction, or with one buffer in its line.

        ``position`` counts over all sections.
        """
        lines = [line(instr) for instr in self.program]
        first, stop = 0, len(lines)
        if len(lines) > SHOWN_WHOLE:
            first, stop = max(position - AROUND, 0), position + AROUND + 1
        shown = [message]
        for number, text in list(enumerate(lines))[first:stop]:
            arrow = "-->" if number == position else ""
            shown.append(f"{arrow:3} {number:5}  {text}")
            if arrow and buffer is not None and str(buffer) in text:
                indent = len("--> 12345  ") + text.index(str(buffer))
                shown.append(" " * indent + "^" * len(str(buffer)))
        raise ProgramError("\n".join(shown))

    def missing(self, message: str) -> NoReturn:
        """Something is not there; the picture by stages shows what is."""
        rows = [f"  {row}" for row in by_stage(self.program).splitlines()]
        raise ProgramError("\n".join([message, *rows]))
