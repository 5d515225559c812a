"""`hexijax run`: plan, compile, train, report.

arguments -> begin -> Begun -> Machine -> train -> runs/<name>-<number>/
"""

import argparse
import contextlib

from hexijax.cli import elasticity, rehearsal
from hexijax.cli.beginning import begin
from hexijax.cli.training import Fixed, train
from hexijax.job.elastic import Elastic
from hexijax.job.machine import make_machine
from hexijax.job.screen import Screen


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    screen = Screen()
    begun = begin(arguments, screen)
    session, chain = begun.session, begun.chain
    with contextlib.ExitStack() as stack:
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
            machine = make_machine(
                session.experiment,
                session.cluster,
                chain,
                begun.plan,
                emulate=arguments.emulate,
                progress=screen.compiling,
            )
            job = Fixed(machine=machine, plan=begun.plan, cluster=session.cluster)
        return train(
            arguments,
            session,
            choices=begun.choices,
            screen=screen,
            chain=chain,
            job=job,
            resumed=begun.resumed,
        )
