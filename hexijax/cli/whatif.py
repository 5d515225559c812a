"""`hexijax whatif`: the same training on other machines, and what each card is worth.

arguments -> Study -> changed cluster -> plans now and then, and without each card
"""

import argparse
import dataclasses
from collections.abc import Sequence

from hexijax.cli.changes import changed
from hexijax.cli.choosing import search
from hexijax.cli.prices import per_hour, read_prices
from hexijax.cli.screen import Searching
from hexijax.cli.study import open_study
from hexijax.cli.telling import seconds_note
from hexijax.cluster import Device
from hexijax.plan import PlanError
from hexijax.planner import Objective
from hexijax.report.folder import write_json
from hexijax.report.judged import Judged, judge
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
    for name, machines in {"now": now.cluster, "then": cluster}.items():
        if rows and cluster == now.cluster:
            continue
        prices = read_prices(arguments.price, machines)
        problem = dataclasses.replace(now.on(machines), usd_per_hour=prices)
        with screen.on(f"searching: {name}") as progress:
            found = search(problem, name, seconds=seconds, progress=progress)
        rented = machines.devices
        if problem.objective is Objective.PRICE:
            rented = tuple(machines.device(name) for name in found.best.used)
        usd, unknown = per_hour(rented, prices)
        rows.append(Offer(name=name, judged=found.best, usd_per_hour=usd))
    if unknown:
        notes.append(
            f"no price is known of {listed(unknown)}; give it by --price FILE with "
            f"[usd_per_hour] {unknown[0]} = 1.0"
        )
    less = _without_each(rows[-1], screen, seconds, notes)
    rows[-1] = best_of(rows[-1], [rows[0].judged, *(j for _, j in less if j)])
    whole = rows[-1].judged.tokens_per_cost
    cards = [Worth.of(its, whole, j.tokens_per_cost if j else 0.0) for its, j in less]
    if arguments.json:
        write_json(
            arguments.json,
            {
                "rows": [row.figures(arguments.tokens) for row in rows],
                "worth": [card.figures() for card in cards],
                "notes": notes,
            },
        )
    print("\n".join(columns(offers(rows, arguments.tokens), right=range(1, 12))))
    if cards:
        print("\n" + "\n".join(columns(worths(cards, now.objective), right=(1, 2, 3))))
    print("\n".join(f"note: {note}" for note in notes))
    seconds_note(arguments, print)
    return 0


def best_of(offer: Offer, others: Sequence[Judged]) -> Offer:
    """The offer with the best plan there is: one for fewer machines is one for it.

    So an added card never costs, however a search ends.
    """
    problem = offer.judged.problem
    known = {device.name for device in problem.cluster.devices}
    plans = [other.plan for other in others if known.issuperset(other.used)]
    rivals = [judge(offer.name, plan, problem) for plan in plans]
    fits = [offer.judged, *(judged for judged in rivals if judged.fits)]
    best = min(fits, key=lambda judged: judged.cost)
    return dataclasses.replace(offer, judged=best)


def _without_each(
    last: Offer, screen: Searching, seconds: float | None, notes: list[str]
) -> list[tuple[tuple[Device, ...], Judged | None]]:
    """Plans without one card of each class, None where none fits.

    Ctrl-C ends with what there is.
    """
    problem = last.judged.problem
    found: list[tuple[tuple[Device, ...], Judged | None]] = []
    if len(problem.cluster.devices) == 1:
        return found
    for cards in classes(problem.cluster):
        left = problem.on(problem.cluster.without(cards[-1].name))
        name = f"without {cards[-1].name}"
        with screen.on(f"searching: {name}") as progress:
            try:
                less = search(left, name, seconds=seconds, progress=progress)
            except PlanError:
                notes.append(f"{name} no plan fits: the training hangs on it")
                found.append((cards, None))
                continue
        if less.interrupted:
            notes.append("interrupted: the worth of the other cards is missing")
            break
        found.append((cards, less.best))
    return found
