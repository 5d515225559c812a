"""`hexijax run`: plan, compile, train, report.

arguments -> begin -> Begun -> Machine -> train -> runs/<name>-<number>/
"""

import argparse
import contextlib

from hexijax.cli import elasticity, rehearsal
from hexijax.cli.beginning import begin
from hexijax.cli.session import SINGLE
from hexijax.cli.training import train
from hexijax.collector import collector_paused
from hexijax.errors import UserError
from hexijax.job.elastic import Elastic
from hexijax.job.machine import Fixed, make_machine
from hexijax.job.screen import Screen
from hexijax.job.tracing import Traced


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    screen, traced = Screen(), None
    _check_trace(arguments)
    with contextlib.ExitStack() as stack:
        starting = stack.enter_context(contextlib.ExitStack())
        starting.enter_context(collector_paused())
        begun = begin(arguments, screen)
        session, chain = begun.session, begun.chain
        job: Elastic | Fixed
        if begun.members is not None:
            job = stack.enter_context(
                elasticity.elastic_job(
                    session.experiment,
                    chain,
                    begun.members,
                    emulate=arguments.emulate,
                    say=screen.say,
                    progress=screen.compiling,
                    rehearsed=rehearsal.Asked(
                        experiment=session.source.path,
                        settings=session.settings,
                        cluster=begun.members.whole,
                        emulate=arguments.emulate,
                    ),
                )
            )
            job.begin(begun.plan)
        else:
            from hexijax.runtime.engine import Engine

            machine = make_machine(
                session.experiment,
                session.cluster,
                chain,
                begun.plan,
                emulate=arguments.emulate,
                progress=screen.compiling,
            )
            job = Fixed(machine=machine, plan=begun.plan, cluster=session.cluster)
            if arguments.trace:
                engine = machine.engine
                assert isinstance(engine, Engine), "the plain program is refused above"
                traced = Traced(engine, session.experiment.steps)
        return train(
            arguments,
            session,
            choices=begun.choices,
            screen=screen,
            chain=chain,
            job=job,
            resumed=begun.resumed,
            judged=None if arguments.emulate else begun.judged,
            traced=traced,
            started=starting.close,
        )


def _check_trace(arguments: argparse.Namespace) -> None:
    """Raises a ``UserError`` where there is no one plan to hold a step against."""
    for flag, given in (
        ("--elastic", arguments.elastic is not None),
        ("--plan single", arguments.plan == SINGLE),
        ("--emulate", arguments.emulate),
    ):
        if arguments.trace and given:
            raise UserError(
                f"--trace and {flag} were both given: a step is held against what one "
                "plan was predicted to do on the devices it runs on. Leave one out."
            )
