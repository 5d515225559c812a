"""From what the user names to a Problem: an experiment, or a plan.json alone.

EXPERIMENT --trace on shapes--> Problem          (imports JAX)
plan.json  --read------------> Problem, its plan (does not)
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from hexijax.cli.prices import read_prices
from hexijax.cli.session import SINGLE, find_plan, open_session
from hexijax.costs.temp import Temps
from hexijax.errors import UserError
from hexijax.job.clusters import read_cluster
from hexijax.job.intake import problem, trace_chain
from hexijax.plan import Plan, checks, serial
from hexijax.planner import Objective
from hexijax.report.folder import temps_beside
from hexijax.report.grounds import measurements
from hexijax.report.problem import Problem

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What a planning command is about."""

    problem: Problem
    """What is planned."""

    plan: Plan | None
    """The plan that was given; None: one is searched for."""

    folder: Path
    """Where files go."""


def open_study(
    arguments: argparse.Namespace, tell: Tell, *, own_plan: bool = True
) -> Study:
    """Reads what the command line names.

    Args:
        arguments: of the command line.
        tell: is told what was put aside, and why.
        own_plan: an experiment's own plan, and a plan.json's, counts as given.
    """
    named = Path(arguments.experiment)
    if named.suffix == ".txt":
        raise UserError(_lonely(named))
    if named.suffix == ".json":
        study = _from_plan(named, arguments, own_plan=own_plan)
    else:
        study = _from_experiment(arguments, tell, own_plan=own_plan)
    given = named if named.suffix == ".json" else getattr(arguments, "plan", None)
    temps = temps_beside(Path(given)) if given else Temps()
    aimed = dataclasses.replace(_aimed(study.problem, arguments), temps=temps)
    for line in measurements(aimed.cluster):
        tell(f"note: {line}")
    return dataclasses.replace(study, problem=aimed)


def _aimed(problem: Problem, arguments: argparse.Namespace) -> Problem:
    """The problem with what plans are chosen by, and what machines cost."""
    asked, file = (getattr(arguments, f, None) for f in ("objective", "price"))
    aimed = dataclasses.replace(
        problem,
        objective=Objective[asked.upper()] if asked else Objective.STEP,
        usd_per_hour=read_prices(file, problem.cluster),
    )
    assert aimed.goal, "kinds without figures are refused now, not after a search"
    return aimed


def _from_plan(file: Path, arguments: argparse.Namespace, *, own_plan: bool) -> Study:
    for flag in ("set", "plan"):
        if getattr(arguments, flag, None):
            raise UserError(
                f"--{flag} was given with {file}. It changes an experiment, and a "
                "plan.json has none: name the experiment instead, or leave the flag."
            )
    saved = serial.load(file)
    cluster = read_cluster(arguments.cluster) if arguments.cluster else saved.cluster
    if arguments.profile:
        cluster = cluster.with_profiles(arguments.profile, of_others=False)
    if own_plan:
        checks.check(saved.plan, saved.chain, cluster)
    return Study(
        problem=Problem(
            name=saved.chain.name,
            chain=saved.chain,
            cluster=cluster,
            batch_size=saved.plan.batch_size,
            training=saved.training,
        ),
        plan=saved.plan if own_plan else None,
        folder=arguments.out / saved.chain.name,
    )


def _from_experiment(
    arguments: argparse.Namespace, tell: Tell, *, own_plan: bool
) -> Study:
    given = getattr(arguments, "plan", None)
    if given == SINGLE:
        raise UserError("--plan single is the plain program on one device, no plan.")
    # Planning traces on shapes: a GPU would only be taken from whoever uses it.
    session = open_session(arguments, cpu=True)
    experiment = session.experiment
    chain = trace_chain(experiment)
    for note in chain.notes:
        tell(f"note: {note}")
    plan = None
    if own_plan and (given or experiment.plan):
        plan = find_plan(session, chain, given, tell)
    return Study(
        problem=problem(experiment, chain, session.cluster),
        plan=plan,
        folder=arguments.out / experiment.name,
    )


def _lonely(file: Path) -> str:
    beside = file.with_suffix(".json")
    better = f", or name {beside}, which stands alone" if beside.is_file() else ""
    return (
        f"{file} is a plan's text, which says nothing of the model: name its "
        f"experiment and add --plan {file}{better}."
    )
