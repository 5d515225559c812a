"""`hexijax run --elastic`: who takes part, and what a run does when that changes.

--elastic [NODES] -> Members, and the cluster of those who begin
Members, chain -> Elastic, with plans and programs made ahead
"""

import contextlib
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hexijax.cli import rehearsal
from hexijax.cluster import Cluster
from hexijax.elastic import Members
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.job import membership
from hexijax.job.elastic import Elastic
from hexijax.job.machine import Progress
from hexijax.job.membership import watched
from hexijax.layers.chain import Chain
from hexijax.plan import Plan

__all__ = ["elastic_job", "members", "watched"]


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
    with contextlib.ExitStack() as stack:
        made: dict[str, Callable[[Cluster, Plan], None]] = {}
        if rehearsed and rehearsal.can_rehearse(members.whole, emulate=emulate):
            rehearsals = rehearsal.Rehearsals(rehearsed, say)
            stack.callback(rehearsals.close)
            made["made"] = rehearsals.rehearse
        yield stack.enter_context(
            membership.elastic_job(
                experiment,
                chain,
                members,
                emulate=emulate,
                say=say,
                progress=progress,
                **made,
            )
        )
