"""What a job leaves in its folder besides figures: the plan, and its state.

    RunFolder <- write_plan, write_temps, saver
    RunFolder -> restore -> engine, Saved

The command line and the Trainer write one kind of folder, which ``hexijax.load``,
``hexijax export`` and ``Experiment.init`` read.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.job.intake import training_facts
from hexijax.job.machine import Machine
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, serial, text
from hexijax.plan.precision import DYNAMIC, STATE_KEY
from hexijax.report import RunFolder
from hexijax.report.folder import write_atomically, write_json
from hexijax.report.summary import versions

if TYPE_CHECKING:
    from hexijax.checkpoint import Saved
    from hexijax.checkpoint.plain import Stateful

BATCH = "batch"
"""The fact that says what a batch looks like."""

Facts = Mapping[str, Any]
"""By a name for people; JSON-able."""


def facts(experiment: Experiment, chain: Chain | None = None) -> dict[str, Any]:
    """What a resumed job must share with the saved one, besides its arrays.

    With the ``chain``, also what its batches look like.
    """
    found: dict[str, Any] = {
        "seed": experiment.seed,
        "batch size": experiment.batch_size,
    }
    if chain:
        found[BATCH] = words(chain)
    return found


def words(chain: Chain) -> dict[str, str]:
    """A sample of each of a batch's arrays, as text."""
    from hexijax.runtime.form import BatchForm

    return BatchForm(size=1, arrays=chain.batch).words


def write_plan(
    folder: RunFolder,
    plan: Plan,
    cluster: Cluster,
    chain: Chain,
    experiment: Experiment,
) -> None:
    """plan.txt for people, and plan.json, which stands alone."""
    write_atomically(folder.plan_text, text.render(plan, chain))
    training = training_facts(experiment)
    serial.save(folder.plan_json, plan, cluster, chain, training)


def write_temps(folder: RunFolder, machine: Machine) -> None:
    """What the compiled programs take, for later promises."""
    from hexijax.runtime.engine import Engine

    if isinstance(machine.engine, Engine):
        write_json(folder.temps, machine.engine.temps().to_json())


def saver(
    folder: RunFolder,
    engine: "Stateful",
    shared: Facts,
    position: Callable[[], Any],
) -> Callable[[int], None]:
    """``save(steps done)`` into ``folder``.

    Args:
        folder: of the run.
        engine: whose state is written.
        shared: what must be equal on resume.
        position: gives that of the data, JSON-able.
    """
    all_facts = {**shared, **_scaling(engine), "versions": versions()}

    def save(step: int) -> None:
        from hexijax import checkpoint  # imports Orbax: for those who save

        checkpoint.save(
            folder.checkpoints,
            engine,
            step=step,
            data_state=position(),
            facts=all_facts,
        )

    return save


def restore(folder: RunFolder, engine: "Stateful", shared: Facts) -> "Saved":
    """Puts an engine where the run was saved last.

    Raises:
      UserError: it was not, or under other facts, another plan or model.
    """
    from hexijax import checkpoint

    all_facts = {**shared, **_scaling(engine)}
    return checkpoint.restore(folder.checkpoints, engine, facts=all_facts)


def _scaling(engine: "Stateful") -> dict[str, Any]:
    """Whether its state has a loss scale, which a plan's dtypes may decide."""
    dynamic = STATE_KEY in engine.array_targets()
    return {"loss scale": DYNAMIC if dynamic else "fixed"}


def moved_versions(saved: "Saved") -> list[str]:
    """``package old -> new`` for each that is another now than when it was saved."""
    then, now = saved.facts.get("versions", {}), versions()
    return [f"{k} {then[k]} -> {now.get(k)}" for k in then if then[k] != now.get(k)]
