"""What `run` and `plan` share: from arguments to experiment, cluster, chain and plan.

The order matters. The cluster is known from flags and text before JAX is imported, so
that the platform stands; the experiment's file, which imports JAX, runs after.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hexijax.cli.fields import Source, read_source
from hexijax.cli.loading import beside, find_experiment, load_experiment
from hexijax.cli.settings import parse_settings
from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.job import platform
from hexijax.job.clusters import read_cluster
from hexijax.job.plans import new_plan, read_plan
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, PlanError

SINGLE = "single"
"""``--plan single``: the plain program on one device."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """An experiment on a cluster."""

    source: Source
    """The experiment's file."""

    experiment: Experiment
    """What is trained."""

    cluster: Cluster
    """Where."""

    settings: Mapping[str, Any]
    """What ``--set`` said, by field."""


def open_session(
    arguments: argparse.Namespace, *, cpu: bool = False, emulate: bool = False
) -> Session:
    """Reads the input, prepares the platform, runs the experiment's file.

    Args:
        arguments: of the command line.
        cpu: leave GPUs alone.
        emulate: let forced CPU devices stand for the cluster's.
    """
    source = read_source(find_experiment(arguments.experiment))
    values = parse_settings(arguments.set, source)
    named = str(values.get("cluster") or source.cluster)
    file = arguments.cluster or (beside(source, named) if named else None)
    cluster = read_cluster(file) if file else None
    platform.prepare(cluster, cpu=cpu, emulate=emulate)
    experiment = load_experiment(source, values)
    if cluster is None and experiment.cluster:  # named by code, not in plain text
        cluster = read_cluster(beside(source, experiment.cluster))
        platform.prepare(cluster, cpu=cpu, emulate=emulate)
    if cluster is None:
        from hexijax.runtime.devices import local_cluster

        cluster = local_cluster()
    if profile := getattr(arguments, "profile", None):
        cluster = cluster.with_profiles(profile, of_others=False)
    return Session(
        source=source, experiment=experiment, cluster=cluster, settings=values
    )


def find_plan(
    session: Session,
    chain: Chain,
    given: str | Path | None,
    tell: Callable[[str], None],
    stored: Path | None = None,
) -> Plan:
    """The plan in ``given``, else the experiment's own if it fits, else the planner's.

    Args:
        session: the experiment and the cluster.
        chain: the experiment's model.
        given: what the user names; it must fit.
        tell: is told why the experiment's or the run's own plan was put aside.
        stored: the plan of the run that is resumed.
    """
    experiment = session.experiment
    if given is not None:
        return read_plan(Path(given), experiment, chain, session.cluster)
    if stored is not None and stored.is_file():
        try:
            return read_plan(stored, experiment, chain, session.cluster)
        except PlanError as error:
            tell(f"The run's own plan does not fit, so a plan is made. {error}")
            return new_plan(experiment, chain, session.cluster)
    own = experiment.plan
    if own:
        # It was written for the experiment as it stands: a setting may outgrow it.
        try:
            file = beside(session.source, own)
            return read_plan(file, experiment, chain, session.cluster)
        except PlanError as error:
            tell(f"{own} does not fit, so a plan is made. {error}")
    return new_plan(experiment, chain, session.cluster)
