"""Our plan beside the baselines', in one table.

(Judged, ...), ours first -> headline, comparison -> the first line, the table
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from hexijax.report.explain import Table
from hexijax.report.judged import Judged
from hexijax.report.objectives import ahead, alike, cell, heading
from hexijax.report.words import gib, listed, rate, seconds

TIE = 0.005
"""Plans whose costs are this near to each other are equal: the table shows no more."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Plans for one problem, judged alike."""

    rows: tuple[Judged, ...]
    """Ours first, then a plan that was given, then the baselines' that fit."""

    misfits: tuple[str, ...] = ()
    """Baselines of whose form nothing fits."""

    skipped: tuple[str, ...] = ()
    """Baselines that Ctrl-C left out."""

    def headline(self) -> str:
        """How ours stands to the best of the others."""
        ours, *others = self.rows
        if not others:
            return "no baseline has a plan that fits: ours is the only one"
        best = min(others, key=lambda judged: judged.cost)
        ratio, objective = best.cost / ours.cost, ours.problem.objective
        if abs(ratio - 1) <= TIE:
            return alike(objective, ours.name, f"the best other, {best.name}", TIE)
        if ratio < 1:
            return ahead(objective, best.name, 1 / ratio, ours.name)
        return ahead(objective, ours.name, ratio, f"the best other, {best.name}")

    def notes(self) -> list[str]:
        """What the table does not show."""
        notes = []
        if self.misfits:
            notes.append(f"nothing of its form fits: {listed(self.misfits)}")
        if self.skipped:
            notes.append(f"interrupted before: {listed(self.skipped)}")
        return notes

    def table(self) -> Table:
        """A row a plan, the best first behind ours."""
        ours, *others = self.rows
        rows: Table = [
            (
                "plan",
                "step",
                "tokens/s",
                "MFU",
                *heading(ours.problem.objective),
                "of bound",
                "devices",
                "fullest",
                "ratio",
            )
        ]
        for judged in (ours, *sorted(others, key=lambda judged: judged.cost)):
            rows.append(
                (
                    judged.name,
                    seconds(judged.step_s),
                    rate(judged.tokens_per_s),
                    "-" if judged.mfu is None else f"{judged.mfu:.1%}",
                    *cell(judged),
                    f"{judged.fraction_of_bound:.1%}",
                    f"{len(judged.used)}",
                    _fullest(judged),
                    f"{judged.cost / ours.cost:.2f}x",
                )
            )
        return rows

    def figures(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        ours = self.rows[0]
        return {
            "headline": self.headline(),
            "rows": [
                {**judged.figures(), "ratio": judged.cost / ours.cost}
                for judged in self.rows
            ],
            "misfits": list(self.misfits),
            "skipped": list(self.skipped),
        }


def shown(rows: Sequence[Judged], most: int = 6) -> tuple[Judged, ...]:
    """Ours and the best of the others, for a picture; equal plans once."""
    ours, *others = rows
    unlike = {judged.plan.replicas: judged for judged in (*reversed(others), ours)}
    rest = [judged for judged in others if unlike[judged.plan.replicas] is judged]
    return (ours, *sorted(rest, key=lambda judged: judged.cost)[: most - 1])


def _fullest(judged: Judged) -> str:
    """The peak of the device that is nearest to its limit."""
    cluster = judged.problem.cluster
    part, size = max(
        (
            parts.total_bytes / cluster.device(name).usable_memory_bytes,
            parts.total_bytes,
        )
        for name, parts in judged.memory.items()
    )
    return f"{gib(size)} ({part:.0%})"
