"""`hexijax compare`: our plan beside what others would choose. No device is used.

arguments -> Study -> our search, each baseline -> one table, timelines side by side
"""

import argparse
import dataclasses
import time

from hexijax.cli.choosing import GIVEN, OURS, parts, search
from hexijax.cli.screen import Searching
from hexijax.cli.study import Study, open_study
from hexijax.cli.telling import HEADINGS, made_by, save_pictures, seconds_note
from hexijax.plan import Plan, PlanError
from hexijax.planner import Objective
from hexijax.planner.baselines import all_baselines
from hexijax.planner.baselines.baseline import Baseline
from hexijax.planner.baselines.offload import offload_baselines, rests_on_host
from hexijax.report.comparison import Comparison, shown
from hexijax.report.folder import write_atomically, write_json
from hexijax.report.judged import judge
from hexijax.report.page import page
from hexijax.report.problem import Problem
from hexijax.report.words import columns


def compare(arguments: argparse.Namespace) -> int:
    """Searches, runs every baseline, prints the table; returns the exit code."""
    screen = Searching()
    study = open_study(arguments, screen.say)
    made = run_all(study, screen, seconds=arguments.seconds)
    with screen.on("drawing"):
        from hexijax.report.pictures import compared  # matplotlib takes a second

        drawn = {"compare": compared(shown(made.rows))}
    picture = save_pictures(study.folder, drawn)
    if arguments.json:
        write_json(arguments.json, made.figures())
    if arguments.html:
        problem = study.problem
        write_atomically(
            arguments.html,
            page(
                title=f"{problem.name} on {problem.cluster.name}",
                verdict=made.headline(),
                lines=made.notes(),
                pictures={HEADINGS[name]: png for name, png in drawn.items()},
                tables={"All plans": made.table()},
                text="",
                made_by=made_by(),
            ),
        )
    print(made.headline(), end="\n\n")
    print("\n".join(columns(made.table(), right=range(1, 9))))
    print("\n".join(made.notes()))
    seconds_note(arguments, print)
    print(f"picture: {picture}")
    return 0


def run_all(study: Study, screen: Searching, *, seconds: float | None) -> Comparison:
    """Our plan, the one given, and every baseline's; Ctrl-C ends with what there is.

    Systems that offload have rows where a plan of ours does.
    """
    problem = study.problem
    with screen.on(f"searching: {OURS}") as progress:
        first = search(problem, OURS, seconds=seconds, progress=progress)
    rows = [first.best]
    if study.plan and study.plan.replicas != first.best.plan.replicas:
        rows.append(judge(GIVEN, study.plan, problem))
    baselines = dict(all_baselines())
    if any(rests_on_host(judged.plan) for judged in rows):
        baselines |= offload_baselines()
    misfits: list[str] = []
    done = 0
    try:
        for name, baseline in [] if first.interrupted else baselines.items():
            with screen.on(f"searching: {name}"):
                start = time.perf_counter()
                plans = _plans(baseline, problem, seconds)
                took_s = time.perf_counter() - start
                found = [judge(name, plan, problem, search_s=took_s) for plan in plans]
                if found:
                    rows.append(min(found, key=lambda judged: judged.cost))
                else:
                    misfits.append(name)
            done += 1
    except KeyboardInterrupt:
        screen.say("Interrupted: what was found so far counts.")
    return Comparison(
        rows=tuple(rows), misfits=tuple(misfits), skipped=tuple([*baselines][done:])
    )


def _plans(baseline: Baseline, problem: Problem, seconds: float | None) -> list[Plan]:
    """The baseline's plan; where plans are not chosen by their steps, also those on
    each kind and each node alone: it chooses by steps itself."""
    clusters = [problem.cluster]
    if problem.objective is not Objective.STEP:
        clusters += [part for _, part in parts(problem.cluster)]
    whole = problem.cluster.fingerprint()
    found: list[Plan] = []
    for cluster in clusters:
        try:
            plan = baseline(
                problem.chain,
                cluster,
                batch_size=problem.batch_size,
                dtype=problem.training.dtype,
                options=problem.options(seconds=seconds),
            )
        except PlanError:
            continue
        if plan:
            found.append(dataclasses.replace(plan, cluster=whole))
    return found
