"""What a run with members that come and go has beside its engines.

    experiment, chain, members -> elastic_job -> Elastic, plans made ahead for it
    watched: SIGTERM, members.txt in the run's folder -> Elastic

The command line and the Trainer do the same here.
"""

import contextlib
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hexijax.checkpoint.saver import Saver
from hexijax.cluster import Cluster
from hexijax.elastic import Asked, Members, PlansAhead, Roll
from hexijax.elastic.notice import on_sigterm
from hexijax.elastic.stores import Saved
from hexijax.experiment import Experiment
from hexijax.job.elastic import Elastic
from hexijax.job.intake import plan_options
from hexijax.job.machine import Progress
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.report import RunFolder

MEMBERS = "members.txt"
"""In a run's folder: who takes part."""


@contextmanager
def elastic_job(
    experiment: Experiment,
    chain: Chain,
    members: Members,
    *,
    emulate: bool,
    say: Callable[[str], None],
    progress: Progress | None = None,
    made: Callable[[Cluster, Plan], None] = lambda cluster, plan: None,
) -> Generator[Elastic]:
    """The job, and a process that plans ahead for as long as it lasts.

    Args:
        experiment: what is trained.
        chain: its model.
        members: who takes part.
        emulate: let any device stand for any other.
        say: takes lines for people.
        progress: told (what, done, total) while compiling.
        made: is told of each plan that was made ahead, in another thread.
    """
    from hexijax.runtime.devices import assign

    asked = Asked(
        chain=chain,
        batch_size=experiment.batch_size,
        dtype=experiment.dtype,
        options=plan_options(experiment),
    )
    with PlansAhead(asked, made=made) as ahead:
        yield Elastic(
            experiment=experiment,
            chain=chain,
            members=members,
            ahead=ahead,
            devices=assign(members.whole, emulate=emulate),
            emulate=emulate,
            say=say,
            progress=progress,
        )


@contextmanager
def watched(
    elastic: Elastic,
    folder: RunFolder | None,
    saver: Saver | None,
    stop: Callable[[], None],
    say: Callable[[str], None],
) -> Generator[None]:
    """While it lasts, the run's folder says who takes part, and SIGTERM is a notice.

    Args:
        elastic: that is told.
        folder: of the run; None: it has none, and its members are told of by code.
        saver: of the run.
        stop: ends the run after the step at hand.
        say: takes lines for people.
    """
    if folder is not None:
        elastic.roll = Roll(folder.path / MEMBERS, elastic.members)
        elastic.roll.write()
    elastic.stores = [Saved(saver)] if saver is not None else []

    def leave() -> None:
        if saver is not None:
            saver.tiers.far_rate.bytes_per_s = math.inf  # nothing else matters now
        say("SIGTERM: the step at hand ends, what is missing is saved, the run ends.")
        stop()

    with on_sigterm(leave), contextlib.ExitStack() as stack:
        stack.callback(setattr, elastic, "roll", None)
        yield
