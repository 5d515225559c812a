"""What `run` and `plan` share: from arguments to experiment, cluster, chain and plan.

The order matters. The cluster is known from flags and text before JAX is imported, so
that the platform stands; the experiment's file, which imports JAX, runs after.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from hexijax.cli import platform
from hexijax.cli.fields import Source, read_source
from hexijax.cli.loading import beside, find_experiment, load_experiment
from hexijax.cli.settings import parse_settings
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, PlanError, checks, serial, text
from hexijax.plan.training import Training
from hexijax.planner import PlanOptions, make_plan

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
    return Session(source=source, experiment=experiment, cluster=cluster)


def read_cluster(file: Path) -> Cluster:
    """The cluster in ``file``.

    Raises:
      UserError: there is no such file, or it does not describe a cluster.
    """
    if not file.is_file():
        raise UserError(
            f"There is no cluster file {file} (looked from {Path.cwd()}). Examples lie "
            "in experiments/clusters."
        )
    return Cluster.from_toml(file)


def trace_chain(experiment: Experiment) -> Chain:
    """The experiment's model as layers, on shapes alone."""
    from hexijax.layers import kernels
    from hexijax.runtime.engine import abstract_params

    if experiment.data is None:
        raise UserError(
            f"The experiment {experiment.name!r} has no data. Give it a Data, such as "
            "hexijax.data.TextBytes()."
        )
    if experiment.optimizer is None:
        raise UserError(
            f"The experiment {experiment.name!r} has no optimizer. Give it an optax "
            "gradient transformation, such as optax.adamw(1e-3)."
        )
    return kernels.trace_chain(
        experiment.loss,
        abstract_params(experiment),
        next(experiment.data.batches(1)),
        dtype=experiment.dtype,
        name=experiment.name,
        per_microbatch=experiment.per_microbatch,
        tokens_per_sample=experiment.tokens_per_sample,
    )


def find_plan(
    session: Session,
    chain: Chain,
    given: str | Path | None,
    tell: Callable[[str], None],
) -> Plan:
    """The plan in ``given``, else the experiment's own if it fits, else the planner's.

    Args:
        session: the experiment and the cluster.
        chain: the experiment's model.
        given: what the user or the resumed run names; it must fit.
        tell: is told why the experiment's own plan was put aside.
    """
    if given is not None:
        return _read_plan(Path(given), session, chain)
    own = session.experiment.plan
    if own:
        # It was written for the experiment as it stands: a setting may outgrow it.
        try:
            return _read_plan(beside(session.source, own), session, chain)
        except PlanError as error:
            tell(f"{own} does not fit, so a plan is made. {error}")
    experiment = session.experiment
    return make_plan(
        chain,
        session.cluster,
        batch_size=experiment.batch_size,
        dtype=experiment.dtype,
        options=plan_options(experiment),
    )


def _read_plan(file: Path, session: Session, chain: Chain) -> Plan:
    """The plan in a plan.txt or plan.json, held against what it is to run."""
    plan = serial.load(file).plan if file.suffix == ".json" else text.read(file)
    checks.check(plan, chain, session.cluster)
    wanted = session.experiment.batch_size
    if plan.batch_size != wanted:
        raise PlanError(
            f"The plan {file} is for batches of {plan.batch_size} samples, and "
            f"{session.experiment.name} asks for {wanted}. Batches are exact under "
            f"every plan: --set batch_size={plan.batch_size}, or plan again."
        )
    return plan


def plan_options(experiment: Experiment) -> PlanOptions:
    """What the search must respect."""
    training = training_facts(experiment)
    return PlanOptions(
        max_microbatch_size=training.max_microbatch_size,
        moments=training.moments,
        whole_leaves=training.whole_leaves,
    )


def training_facts(experiment: Experiment) -> Training:
    """What the optimizer and the rules of a step ask of a plan."""
    import jax

    from hexijax.runtime.engine import abstract_params
    from hexijax.runtime.optimizer import Reach, classify

    params = abstract_params(experiment)
    state = jax.eval_shape(experiment.optimizer.init, params)
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state, params)
    ]
    return Training(
        dtype=experiment.dtype,
        moments=round(sizes[0] / max(1, sizes[1])),
        whole_leaves=classify(experiment.optimizer, params) is Reach.PER_LEAF,
        clip=experiment.clip_norm is not None,
        skip_nonfinite=experiment.skip_nonfinite,
        max_microbatch_size=experiment.max_microbatch_size,
    )
