"""What a job leaves in its folder besides figures: the plan, and its state.

    RunFolder <- write_plan, write_temps, saver
    RunFolder -> restore -> engine, Saved

The command line and the Trainer write one kind of folder, which ``hexijax.load``,
``hexijax export`` and ``Experiment.init`` read.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexijax.checkpoint.restore import Restored
from hexijax.checkpoint.restore import look as checkpoint_look
from hexijax.checkpoint.restore import restore as checkpoint_restore
from hexijax.checkpoint.saver import Saver
from hexijax.checkpoint.sources import DISK, FAR
from hexijax.checkpoint.tiers import KEEP, Copy, Inventory, Tiers, inventory
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.job.intake import training_facts
from hexijax.job.machine import Machine
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, serial, text
from hexijax.report import Metrics, RunFolder
from hexijax.report.folder import write_atomically, write_json
from hexijax.report.summary import versions
from hexijax.weights.runs import TIERS, saved_elsewhere
from hexijax.weights.stored.files import Folder, Rate, open_files
from hexijax.weights.stored.manifest import Stand
from hexijax.weights.stored.parts import SESSION, of_one_mind, parts_in

if TYPE_CHECKING:
    import jax

    from hexijax.checkpoint.slices import Stateful

BATCH = "batch"
"""The fact that says what a batch looks like."""

SETTINGS = "settings"
"""The fact that says what the command line set, by field; it need not be equal."""

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Where and how often a run saves, as a person says it."""

    save_every: int = 0
    """Steps between saves; 0: at the end."""

    keep: int = KEEP
    """Steps kept in each place."""

    fast: str = ""
    """A folder to save in instead of the run's own, such as one in memory."""

    far: str = ""
    """A path or URL that outlives the machines; empty: none."""

    far_every: int = 0
    """Steps between those that go there; 0: the last alone."""

    far_rate: float = math.inf
    """GB/s that may be sent there."""

    neighbour_every: int = 0
    """Steps between copies in a neighbour's memory; 0: none."""

    def check(self) -> None:
        """Before anything is compiled.

        Raises:
          UserError: the far place is not there.
        """
        far = open_files(self.far) if self.far else None
        if isinstance(far, Folder) and not far.path.is_dir():
            raise UserError(
                f"--far {self.far}: there is no such folder. Mount it or make it "
                "first: made here, it would be on this machine's disk."
            )

    def tiers(self, folder: RunFolder) -> Tiers:
        """Of a run.

        Raises:
          UserError: see ``check``.
        """
        self.check()
        fast = Path(self.fast).expanduser() / folder.path.name if self.fast else None
        far = open_files(f"{self.far.rstrip('/')}/{folder.path.name}")
        return Tiers(
            fast=open_files(fast or folder.checkpoints),
            every=self.save_every,
            keep=self.keep,
            far=far if self.far else None,
            far_every=self.far_every,
            far_keep=self.keep,
            far_rate=Rate(self.far_rate * 1e9),
            neighbour_every=self.neighbour_every,
        )


def write_tiers(folder: RunFolder, tiers: Tiers) -> None:
    """Where else the run saves, for whoever looks for its steps."""
    elsewhere = [(DISK, tiers.fast), *([(FAR, tiers.far)] if tiers.far else [])]
    own = str(folder.checkpoints.resolve())
    found = [
        {"label": label, "where": files.where}
        for label, files in elsewhere
        if files.where != own
    ]
    if found:
        write_json(folder.path / TIERS, {"version": 1, "tiers": found})


def stored(
    folder: RunFolder,
    tell: Callable[[str], None],
    remembered: Iterable[Copy] = (),
) -> Inventory:
    """The steps of a run, wherever it saved, and what is ``remembered`` of them."""
    own = Tiers(fast=open_files(folder.checkpoints))
    parts = list(inventory(own, tell=tell).parts)
    for label, where in saved_elsewhere(folder.path):
        try:
            node = "" if label == FAR else None
            parts += parts_in(open_files(where), label, node, tell=tell)
        except OSError as error:
            tell(f"{where} cannot be looked at ({error}); it counts as empty.")
    parts = of_one_mind(parts)
    sessions = {part.step: part.manifest.stand.facts.get(SESSION) for part in parts}

    def same(copy: Copy) -> bool:
        """Whether those who wrote the step as it lies there wrote this of it."""
        stand = copy.manifest.stand
        found = sessions.get(stand.step, ())
        return found == stand.facts.get(SESSION)

    return Inventory(parts=parts, copies=[copy for copy in remembered if same(copy)])


def saver(
    folder: RunFolder,
    engine: "Stateful",
    shared: Facts,
    tiers: Tiers,
    *,
    plan: Plan | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Saver:
    """What saves a run.

    Args:
        folder: of the run.
        engine: whose state is written.
        shared: what must be equal on resume.
        tiers: where to.
        plan: that is run.
        tell: is told of what could not be saved.
    """
    write_tiers(folder, tiers)
    return Saver(
        engine,
        tiers,
        node_of=nodes(engine),
        facts={**shared, "versions": versions()},
        plan=plan_text(plan, engine),
        tell=tell,
        alone=_alone(engine),
    )


def _alone(engine: Any) -> bool:
    """Whether one process drives all of a plan's devices, or there is no plan."""
    layout = getattr(engine, "layout", None)
    return layout is None or all(map(layout.carrier.here, engine.devices.values()))


def during(
    saver: Saver, steps: int, position: Callable[[], Any], metrics: Metrics
) -> Callable[[int], None]:
    """``save(steps done)`` for a loop; the end of the run goes to every tier.

    Args:
        saver: whose threads write.
        steps: of the run.
        position: gives that of the data, JSON-able.
        metrics: of the run.
    """

    def save(done: int) -> None:
        asked = done >= steps or not saver.due(done)
        taken = saver.take(done, position(), asked=asked)
        saver.write(taken, {"loss": metrics.last_loss})

    return save


def plan_text(plan: Plan | None, engine: Any) -> str:
    """A plan as a manifest keeps it; empty for the plain program."""
    return text.render(plan, engine.chain) if plan else ""


def nodes(engine: Any) -> "dict[jax.Device, str] | None":
    """The node of each device of an engine that this process drives, and of its host;
    None: it has no cluster."""
    from hexijax.runtime.batches import host_device

    cluster: Cluster | None = getattr(engine, "cluster", None)
    if cluster is None:
        return None
    here = engine.layout.carrier.here  # the host may be a ghost, too
    of = {x: cluster.device(n).node for n, x in engine.devices.items() if here(x)}
    host = host_device()
    if host is not None:
        of.setdefault(host, next(iter(of.values())))
    return of


def restore(
    folder: RunFolder,
    engine: "Stateful",
    shared: Facts,
    tell: Callable[[str], None] = lambda text: None,
    step: int | None = None,
    remembered: Iterable[Copy] = (),
) -> Restored:
    """Puts an engine where the run was saved last, or at ``step``, whatever plan that
    had; what is ``remembered`` of it is not read from where it lies.

    Raises:
      UserError: it was not, or under other facts, or is of another model.
    """
    return checkpoint_restore(
        engine,
        stored(folder, tell, remembered),
        where=str(folder.path),
        facts=shared,
        step=step,
        node_of=nodes(engine),
        tell=tell,
    )


def position(stand: Stand, path: Path) -> Any:
    """Of the data, where a run was saved.

    Raises:
      UserError: it was saved without.
    """
    if stand.data_state is None:
        raise UserError(
            f"--resume: {path} was saved without the position of its data, by a loop "
            "of its own. Go on with a Trainer's resume, or start a new run from its "
            f"parameters: init={str(path)!r}."
        )
    return stand.data_state


def look(folder: RunFolder, shared: Facts) -> Stand:
    """Where a run was saved last."""
    found = stored(folder, lambda text: None)
    return checkpoint_look(found, where=str(folder.path), facts=shared)


def moved_settings(saved: Stand, now: Mapping[str, Any]) -> list[str]:
    """``field old -> new`` for each that was set to another value when it was saved; a
    Trainer's runs have none."""
    if SETTINGS not in saved.facts:
        return []
    then, own = saved.facts[SETTINGS], "the file's own"
    fields = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return [f"{k} {then.get(k, own)} -> {now.get(k, own)}" for k in fields]


def moved_versions(saved: Stand) -> list[str]:
    """``package old -> new`` for each that is another now than when it was saved."""
    then, now = saved.facts.get("versions", {}), versions()
    return [f"{k} {then[k]} -> {now.get(k)}" for k in then if then[k] != now.get(k)]
