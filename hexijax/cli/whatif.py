"""`hexijax whatif`: the same training on other machines, and what each card is worth.

arguments -> Study -> changed cluster -> plans now and then, and without each card
"""

import argparse

from hexijax.cli.changes import changed
from hexijax.cli.choosing import search
from hexijax.cli.prices import per_hour, read_prices
from hexijax.cli.screen import Searching
from hexijax.cli.study import open_study
from hexijax.cli.telling import seconds_note
from hexijax.plan import PlanError
from hexijax.report.folder import write_json
from hexijax.report.words import columns, listed
from hexijax.report.worth import Offer, Worth, classes, offers, worths


def whatif(arguments: argparse.Namespace) -> int:
    """Plans now and then, and without each card; returns the exit code."""
    screen = Searching()
    study = open_study(arguments, screen.say, own_plan=False)
    now = study.problem
    cluster, notes = changed(
        now.cluster, add=arguments.add, drop=arguments.drop, link=arguments.link
    )
    rows: list[Offer] = []
    unknown: list[str] = []
    seconds = arguments.seconds
    for name, problem in {"now": now, "then": now.on(cluster)}.items():
        if rows and cluster == now.cluster:
            continue
        prices = read_prices(arguments.price, problem.cluster)
        usd, unknown = per_hour(problem.cluster, prices)
        with screen.on(f"searching: {name}") as progress:
            found = search(problem, name, seconds=seconds, progress=progress)
        rows.append(Offer(name=name, judged=found.best, usd_per_hour=usd))
    if unknown:
        notes.append(
            f"no price is known of {listed(unknown)}; give them: --price FILE with "
            f"[usd_per_hour] {unknown[0]} = 1.0"
        )
    cards = _worths(rows[-1], screen, seconds, notes)
    if arguments.json:
        write_json(
            arguments.json,
            {
                "rows": [row.figures(arguments.tokens) for row in rows],
                "worth": [card.figures() for card in cards],
                "notes": notes,
            },
        )
    print("\n".join(columns(offers(rows, arguments.tokens), right=range(1, 11))))
    if cards:
        print("\n" + "\n".join(columns(worths(cards), right=(1, 2, 3))))
    print("\n".join(f"note: {note}" for note in notes))
    seconds_note(arguments, print)
    return 0


def _worths(
    last: Offer, screen: Searching, seconds: float | None, notes: list[str]
) -> list[Worth]:
    """Plans without one card of each class; Ctrl-C ends with what there is."""
    problem, whole = last.judged.problem, last.judged.tokens_per_s
    found: list[Worth] = []
    if len(problem.cluster.devices) == 1:
        return found
    for cards in classes(problem.cluster):
        left = problem.on(problem.cluster.without(cards[-1].name))
        name = f"without {cards[-1].name}"
        with screen.on(f"searching: {name}") as progress:
            rate = 0.0
            try:
                less = search(left, name, seconds=seconds, progress=progress)
            except PlanError:
                notes.append(f"{name} no plan fits: all that is trained hangs on it")
            else:
                if less.interrupted:
                    notes.append("interrupted: the worth of the other cards is missing")
                    return found
                rate = less.best.tokens_per_s
        lost = whole - rate
        found.append(Worth(cards=cards, share=lost / whole, tokens_per_s=lost))
    return found
