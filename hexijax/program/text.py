"""The Program as text: one line an instruction; ``parse(render(p)) == p``.

    hexijax program 1

    prologue
      gather l0 from r0.s0 to r0.s0 : State[r0.s0 l0] -> Param[r0.s0 l0]
    body
      load r0 #0 : -> Batch[r0.s0 batch #0] ...
    drain

``by_stage`` is the picture for people: what each stage computes, in order.
"""

import re

from hexijax.plan.plan import Place
from hexijax.program.grammar import TERMS, is_left_out, opcode
from hexijax.program.parse import parse
from hexijax.program.program import (
    FORMAT_VERSION,
    SECTIONS,
    Backward,
    Forward,
    Instruction,
    Part,
    Program,
    word,
)

__all__ = ["by_stage", "line", "parse", "render"]


def render(program: Program) -> str:
    """All of the Program as text."""
    lines = [f"hexijax program {FORMAT_VERSION}"]
    lines += [f"pool {word(name)} {slots}" for name, slots in program.pools]
    lines += [f"leaving {word(place)} {chunks}" for place, chunks in program.leaving]
    lines.append("")
    for section in SECTIONS:
        lines.append(section)
        lines += [f"  {line(instr)}" for instr in getattr(program, section)]
    return "\n".join(lines) + "\n"


def line(instr: Instruction) -> str:
    """One instruction as a line."""
    parts = [opcode(instr)]
    for term in TERMS[type(instr)]:
        if not is_left_out(instr, term):
            parts += [term.word] * bool(term.word)
            parts.append(term.write(getattr(instr, term.field)))
    if instr.reads or instr.writes:
        parts += [":", *map(str, instr.reads), "->", *map(str, instr.writes)]
    return " ".join(parts)


def by_stage(program: Program) -> str:
    """What every stage computes in one step: ``r0.s0 | F0 F1 B0 B1``.

    ``F0.1`` is segment 1 of a stage of several; ``b`` and ``w`` are the input and the
    weight part of a split backward.
    """
    rows: dict[Place, list[str]] = {}
    runs = [i for i in program.body if isinstance(i, Forward | Backward)]
    several = {run.place for run in runs if run.segment > 0}
    for run in runs:
        letter = "F" if isinstance(run, Forward) else _BACKWARD_LETTERS[run.part]
        first, stop = run.microbatches
        count = f"{first}" if stop == first + 1 else f"{first}:{stop}"
        segment = f".{run.segment}" if run.place in several else ""
        rows.setdefault(run.place, []).append(f"{letter}{count}{segment}")
    width = max(map(len, rows), default=0)
    return "\n".join(
        f"{p:{width}} | {' '.join(rows[p])}" for p in sorted(rows, key=_key)
    )


_BACKWARD_LETTERS = {Part.BOTH: "B", Part.INPUT: "b", Part.WEIGHT: "w"}


def _key(place: Place) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", place)]
