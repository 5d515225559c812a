"""`hexijax run --elastic`: who takes part, and what a run does when that changes.

--elastic [NODES] -> Members, and the cluster of those who begin
Members, chain -> Elastic -> machine; watch: SIGTERM, members.txt -> Elastic
"""

import contextlib
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hexijax.checkpoint.saver import Saver
from hexijax.cli import rehearsal
from hexijax.cluster import Cluster
from hexijax.elastic import Asked, Members, PlansAhead, Roll
from hexijax.elastic.notice import on_sigterm
from hexijax.elastic.stores import Saved
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.job.elastic import Elastic
from hexijax.job.intake import plan_options
from hexijax.job.machine import Progress
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.report import RunFolder

MEMBERS = "members.txt"
"""In a run's folder: who takes part."""


def members(given: str, cluster: Cluster, plan: str | None) -> Members:
    """Those who take part from the start.

    Args:
        given: names of nodes with commas between them; empty: all.
        cluster: every node that may come.
        plan: what ``--plan`` said.

    Raises:
      UserError: nobody can go or come.
    """
    if len(cluster.nodes) < 2:
        raise UserError(
            f"--elastic: cluster {cluster.name!r} has one node, "
            f"{cluster.nodes[0].name!r}: if it goes, nobody is left. Name a cluster of "
            "more with --cluster, or leave --elastic out; what is saved can be resumed "
            "anywhere."
        )
    if plan == "single":
        raise UserError(
            "--elastic: --plan single is the plain program on one device, with nobody "
            "to take over. Leave one of the two out."
        )
    names = [name for name in given.split(",") if name]
    return Members(cluster, names or None)


@contextmanager
def elastic_job(
    experiment: Experiment,
    chain: Chain,
    members: Members,
    *,
    emulate: bool,
    say: Callable[[str], None],
    progress: Progress,
    rehearsed: rehearsal.Asked | None = None,
) -> Generator[Elastic]:
    """The job, and processes that plan and compile ahead for as long as it lasts."""
    from hexijax.runtime.devices import assign

    asked = Asked(
        chain=chain,
        batch_size=experiment.batch_size,
        dtype=experiment.dtype,
        options=plan_options(experiment),
    )
    with contextlib.ExitStack() as stack:
        made: Callable[[Cluster, Plan], None] = lambda cluster, plan: None  # noqa: E731
        if rehearsed and rehearsal.can_rehearse(members.whole, emulate=emulate):
            rehearsals = rehearsal.Rehearsals(rehearsed, say)
            stack.callback(rehearsals.close)
            made = rehearsals.rehearse
        ahead = stack.enter_context(PlansAhead(asked, made=made))
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
    folder: RunFolder,
    saver: Saver | None,
    stop: Callable[[], None],
    say: Callable[[str], None],
) -> Generator[None]:
    """While it lasts, the run's folder says who takes part, and SIGTERM is a notice.

    Args:
        elastic: that is told.
        folder: of the run.
        saver: of the run.
        stop: ends the run after the step at hand.
        say: takes lines for people.
    """
    roll = Roll(folder.path / MEMBERS, elastic.members)
    roll.write()
    elastic.roll = roll
    if saver is not None:
        elastic.stores = [Saved(saver)]

    def leave() -> None:
        if saver is not None:
            saver.tiers.far_rate.bytes_per_s = math.inf  # nothing else matters now
        say("SIGTERM: the step at hand ends, what is missing is saved, the run ends.")
        stop()

    with on_sigterm(leave):
        yield
