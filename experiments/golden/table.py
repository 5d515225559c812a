"""What is printed of a published case: rows, what they are held against, notes.

Row, Check -> Table -> text for people, JSON for programs
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

Figure = float | None
"""A number of a row; None where there is none, as where no plan fits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One plan, or one comparison of plans."""

    name: str
    """What it is."""

    figures: Mapping[str, Figure]
    """By column."""

    note: str = ""
    """What a person should know of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One figure against its limit, and what was published."""

    what: str
    """What the figure is."""

    found: Figure
    """Ours; None: there is none, which is no fault."""

    limit: float
    """What it is held against."""

    at_least: bool = True
    """The figure may not be below its limit; else not above."""

    published: Figure = None
    """What the others' own measurements came to."""

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps its limit."""
        if self.found is None:
            return True
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def line(self) -> str:
        """The check, for people."""
        published = "" if self.published is None else f", published {self.published:g}"
        if self.found is None:
            said = "none to compare with"
        else:
            said = f"{self.found:.3f}" + ("" if self.is_met else ", FALLS SHORT")
        bound = "at least" if self.at_least else "at most"
        return f"{self.what}: {said} ({bound} {self.limit:g}{published})"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """All that is said of one system's cases."""

    title: str
    """System, model and machines."""

    columns: tuple[str, ...]
    """Figures of every row, in the order they are printed."""

    rows: tuple[Row, ...]
    """In the order they are printed."""

    checks: tuple[Check, ...]
    """What the rows are held against."""

    notes: tuple[str, ...] = ()
    """What was assumed."""

    @property
    def faults(self) -> tuple[str, ...]:
        """The checks that fail."""
        return tuple(check.line() for check in self.checks if not check.is_met)

    def render(self) -> str:
        """The table, for people."""
        width = max(len(row.name) for row in self.rows)
        wide = {column: max(9, len(column)) for column in self.columns}
        head = "  ".join(f"{column:>{wide[column]}}" for column in self.columns)
        lines = [self.title, f"{'':{width}}  {head}"]
        for row in self.rows:
            cells = "  ".join(
                f"{_cell(row.figures.get(column)):>{wide[column]}}"
                for column in self.columns
            )
            lines.append(f"{row.name:{width}}  {cells}  {row.note}".rstrip())
        lines += [check.line() for check in self.checks]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.title,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "checks": [
                {**dataclasses.asdict(check), "is_met": check.is_met}
                for check in self.checks
            ],
            "notes": list(self.notes),
        }


def _cell(figure: Figure) -> str:
    return "-" if figure is None else f"{figure:.3f}"


def ratio(over: Figure, under: Figure) -> Figure:
    """A quotient; None where one side has no figure."""
    return None if over is None or under is None else over / under
