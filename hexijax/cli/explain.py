"""`hexijax explain`: what limits a plan that is there already. Nothing is searched for.

arguments -> Study -> judge, limits -> explanation; pictures
"""

import argparse

from hexijax.cli.choosing import GIVEN
from hexijax.cli.plan import figures
from hexijax.cli.screen import Searching
from hexijax.cli.study import open_study
from hexijax.cli.telling import save_page, save_pictures
from hexijax.errors import UserError
from hexijax.report.explain import explain
from hexijax.report.folder import write_json
from hexijax.report.judged import judge
from hexijax.report.limits import limits
from hexijax.report.verdict import Choices


def explain_plan(arguments: argparse.Namespace) -> int:
    """Explains the plan given; returns the exit code."""
    screen = Searching()
    study = open_study(arguments, screen.say)
    if study.plan is None:
        raise UserError(
            f"{arguments.experiment} has no plan to explain. Name a plan.json, add "
            f"--plan FILE, or make one: hexijax plan {arguments.experiment}"
        )
    choices = Choices(ours=judge(GIVEN, study.plan, study.problem))
    with screen.on("finding what limits it"):
        found = limits(choices.ours)
    with screen.on("drawing"):
        from hexijax.report.pictures import draw  # matplotlib takes a second

        drawn = draw(choices.ours)
    pictures = save_pictures(study.folder, drawn)
    if arguments.json:
        write_json(arguments.json, figures(choices, found))
    if arguments.html:
        save_page(arguments.html, choices, found, drawn)
    print(explain(choices, found))
    print(f"\npictures: {pictures}")
    return 0
