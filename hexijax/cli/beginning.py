"""From flags to what is trained, where and how: what `run` and `launch` share.

arguments -> begin -> Begun: session, chain, plan, the run that is resumed
"""

import argparse
import dataclasses

from hexijax.cli import elasticity
from hexijax.cli.session import SINGLE, Session, find_plan, open_session
from hexijax.elastic import Members
from hexijax.errors import UserError
from hexijax.job import saving
from hexijax.job.clusters import regrouped
from hexijax.job.intake import problem, trace_chain
from hexijax.job.islands import check_left
from hexijax.job.screen import Screen
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.report import RunFolder
from hexijax.report.explain import brief
from hexijax.report.grounds import measurements
from hexijax.report.judged import Judged, judge


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What is to be run."""

    session: Session
    """Experiment and cluster; of an elastic run, the cluster of those who begin."""

    chain: Chain
    """The model."""

    plan: Plan | None
    """Who does what; None: the plain program."""

    choices: saving.Choices
    """Where and how often it saves."""

    resumed: RunFolder | None
    """The run that goes on; None: a new one begins."""

    members: Members | None
    """Of an elastic run in one process."""

    judged: Judged | None
    """The plan as it is predicted to run; None: the plain program."""


def begin(
    arguments: argparse.Namespace, screen: Screen, *, islands: int | None = None
) -> Begun:
    """Reads, traces and plans.

    Args:
        arguments: of the command line.
        screen: for people.
        islands: nodes are put together to so many; 0: they stay as they are; None: all
            of it is one process's.
    """
    found = choices(arguments)
    session = open_session(arguments, cpu=arguments.cpu, emulate=arguments.emulate)
    if not arguments.cpu:
        check_gpu()
        if islands is None:
            from hexijax.runtime.waking import wake

            wake(session.cluster, emulate=arguments.emulate)
    if islands and len(session.cluster.islands) != islands:
        grouped = regrouped(session.cluster, islands)
        session = dataclasses.replace(session, cluster=grouped)
    experiment, members = session.experiment, None
    if arguments.elastic is not None and islands is None:
        members = elasticity.members(arguments.elastic, session.cluster, arguments.plan)
        session = dataclasses.replace(session, cluster=members.cluster())
    resumed = None
    if arguments.resume is not None:
        run_name = arguments.resume or None
        resumed = RunFolder.find(arguments.out, experiment.name, run_name)
        saved = saving.look(resumed, saving.facts(experiment))
        if anew := saving.moved_settings(saved, session.settings):
            screen.say(f"note: --set is not what the run had: {', '.join(anew)}")
        if islands is None:  # of islands, one may have seen fewer saves
            check_left(saved.step, experiment.steps, resumed.path)
    chain = trace_chain(experiment)
    for note in chain.notes:
        screen.say(f"note: {note}")
    for line in measurements(session.cluster):
        screen.say(f"note: {line}")
    plan = judged = None
    if arguments.plan != SINGLE:
        stored = resumed.plan_text if resumed else None
        plan = find_plan(session, chain, arguments.plan, screen.say, stored)
        what = problem(experiment, chain, session.cluster)
        judged = judge(experiment.name, plan, what)
        screen.say(brief(judged))
    return Begun(
        session=session,
        chain=chain,
        plan=plan,
        choices=found,
        resumed=resumed,
        members=members,
        judged=judged,
    )


def choices(arguments: argparse.Namespace) -> saving.Choices:
    """Raises a ``UserError`` for choices that contradict each other."""
    if arguments.no_save and arguments.save_every:
        raise UserError(
            f"--no-save and --save-every {arguments.save_every} were both given: a run "
            "saves or it does not. Leave one out."
        )
    if arguments.far_every and not arguments.far:
        raise UserError(
            f"--far-every {arguments.far_every} was given without --far: name the path "
            "or URL that saves are sent to."
        )
    if arguments.far_rate <= 0:
        raise UserError(
            f"--far-rate {arguments.far_rate:g}: nothing would ever arrive. Give GB a "
            "second above 0."
        )
    choices = saving.Choices(
        save_every=arguments.save_every,
        keep=arguments.keep,
        fast=arguments.fast or "",
        far=arguments.far or "",
        far_every=arguments.far_every,
        far_rate=arguments.far_rate,
        neighbour_every=arguments.neighbour_every,
    )
    choices.check()
    return choices


def check_gpu() -> None:
    """Raises a ``UserError`` where a GPU is present that JAX cannot see."""
    from hexijax.cli.doctor import missing_gpu_message

    if message := missing_gpu_message():
        raise UserError(message)
