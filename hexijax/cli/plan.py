"""`hexijax plan`: search, say whether mixing is worth it, explain, save.

arguments -> Study -> choose -> verdict, explanation; plan.txt, plan.json, pictures
"""

import argparse

from hexijax.cli.choosing import choose
from hexijax.cli.drawing import Drawing
from hexijax.cli.screen import Searching
from hexijax.cli.study import Study, open_study
from hexijax.cli.telling import save_page, save_pictures, seconds_note
from hexijax.collector import collector_paused
from hexijax.plan import serial, text
from hexijax.report.explain import explain
from hexijax.report.folder import write_atomically, write_json
from hexijax.report.judged import Judged
from hexijax.report.limits import Limit, limits
from hexijax.report.verdict import Choices, verdict


def plan(arguments: argparse.Namespace) -> int:
    """Makes a plan, or explains the one given; returns the exit code."""
    screen = Searching()
    with Drawing() as drawing:
        with collector_paused():
            study = open_study(arguments, screen.say, own_plan=not _is_plan(arguments))
        choices = choose(study.problem, study.plan, screen, seconds=arguments.seconds)
        drawing.begin(choices.ours)
        with screen.on("finding what limits it"):
            found = limits(choices.ours)
        written = save(study, choices.ours)
        with screen.on("drawing"), collector_paused():
            drawn = drawing.pictures()
    pictures = save_pictures(study.folder, drawn)
    if arguments.json:
        write_json(arguments.json, figures(choices, found))
    if arguments.html:
        save_page(arguments.html, choices, found, drawn)
    # Last, so that `| head` loses no file.
    print(verdict(choices), end="\n\n")
    print(explain(choices, found))
    seconds_note(arguments, print)
    print(f"\nsaved as {written}; run it with --plan {written}\npictures: {pictures}")
    return 0


def save(study: Study, judged: Judged) -> str:
    """Writes plan.txt and plan.json; returns the path of the first."""
    problem = study.problem
    written = study.folder / "plan.txt"
    write_atomically(written, text.render(judged.plan, problem.chain))
    serial.save(
        study.folder / "plan.json",
        judged.plan,
        problem.cluster,
        problem.chain,
        problem.training,
    )
    return str(written)


def figures(choices: Choices, found: tuple[Limit, ...]) -> dict[str, object]:
    """The plan's figures, what limits it, and the plans it was held against."""
    return {
        **choices.ours.figures(),
        "verdict": verdict(choices),
        "limits": [
            {"what": limit.what, "name": limit.name, "saves": limit.saves}
            for limit in found
        ],
        "runners_up": [judged.figures() for judged in choices.runners_up()],
    }


def _is_plan(arguments: argparse.Namespace) -> bool:
    """``hexijax plan plan.json`` plans anew for the model in it."""
    return str(arguments.experiment).endswith(".json")
