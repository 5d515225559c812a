"""What planning commands leave behind beside figures: pictures, pages, notes."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hexijax
from hexijax.plan import text
from hexijax.report.explain import headline, others, reasons, stages
from hexijax.report.folder import write_atomically, write_bytes
from hexijax.report.limits import Limit
from hexijax.report.page import page
from hexijax.report.verdict import Choices, verdict

HEADINGS = {
    "plan": "Who holds what",
    "timeline": "A step on a timeline",
    "memory": "Memory",
    "held": "Memory over a step",
    "compare": "The same step under every plan",
}
"""Of pictures, by the name of their file."""


def save_pictures(folder: Path, drawn: Mapping[str, bytes]) -> str:
    """Writes pictures; returns their names for people."""
    for name, png in drawn.items():
        write_bytes(folder / f"{name}.png", png)
    names = ",".join(drawn)
    return f"{folder}/{names if len(drawn) == 1 else f'{{{names}}}'}.png"


def save_page(
    file: Path,
    choices: Choices,
    found: Sequence[Limit],
    drawn: Mapping[str, bytes],
) -> None:
    """Writes the page about a plan."""
    ours = choices.ours
    tables = {"Each stage": stages(ours)}
    if choices.runners_up():
        tables["Other plans"] = others(choices)
    write_atomically(
        file,
        page(
            title=f"{ours.problem.name} on {ours.problem.cluster.name}",
            verdict=verdict(choices),
            lines=[headline(ours), *reasons(choices, found)],
            pictures={HEADINGS[name]: png for name, png in drawn.items()},
            tables=tables,
            text=text.render(ours.plan, ours.problem.chain),
            made_by=made_by(),
        ),
    )


def made_by() -> str:
    """What stands at the foot of a page."""
    return f"Predicted by hexijax {hexijax.__version__}; nothing here was measured."


def seconds_note(arguments: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Says what ``--seconds`` gives up."""
    if arguments.seconds:
        tell(
            f"note: --seconds {arguments.seconds:g} bounds each search by the clock; "
            "another run or machine may find another plan. Leave it out to get the "
            "same plan every time."
        )
