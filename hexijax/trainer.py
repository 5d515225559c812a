"""Training from Python: a person's own loop, or ``fit``.

    loss, params, optimizer -> Trainer -> step(batch), evaluate, params, save

    trainer = hexijax.Trainer(loss, params, optimizer, cluster="lab.toml")
    for batch in batches:
        metrics = trainer.step(batch)       # returns before it is computed
    params = trainer.params()

The plan is made, and its programs compiled, when the first batch shows what batches
look like. A thin face over ``job``: the same plans, programs and folders as the command
line's.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hexijax.checkpoint import Stand
from hexijax.checkpoint.saver import Saver
from hexijax.cluster import Cluster
from hexijax.elastic import Members
from hexijax.errors import UserError
from hexijax.experiment import Batch, BatchIterator, Data, Experiment
from hexijax.job import platform, saving
from hexijax.job.clusters import given_cluster
from hexijax.job.elastic import Elastic
from hexijax.job.evaluation import NO_BATCH, repeatable
from hexijax.job.evaluation import evaluate as evaluate_all
from hexijax.job.fitting import Fitting
from hexijax.job.handed import (
    checked_rules,
    elastic_members,
    of_three,
    placed,
    position,
    zeros_like,
)
from hexijax.job.intake import check_vocabulary, problem, trace_chain
from hexijax.job.loop import Line, ended
from hexijax.job.machine import Fixed, make_machine
from hexijax.job.membership import elastic_job
from hexijax.job.plans import check_plan, new_plan, read_plan
from hexijax.job.screen import Quiet, Screen
from hexijax.layers.chain import Chain
from hexijax.plan import Plan, PlanError
from hexijax.report import Meter, RunFolder
from hexijax.runtime.form import BatchForm
from hexijax.runtime.intake import abstract_params
from hexijax.runtime.results import Numbers
from hexijax.weights.opening import is_weights

SINGLE = "single"
"""``plan="single"``: the plain program on the cluster's first device."""

_log = logging.getLogger("hexijax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """What the first batch decides."""

    experiment: Experiment
    chain: Chain
    form: BatchForm
    now: Elastic | Fixed
    """Plan, cluster and machine: those of now, where they change."""

    @property
    def engine(self) -> Any:
        """Of now, as a saver or a loop keeps it."""
        return self.now.engine


class Trainer:
    """Trains one model over a cluster's devices, a batch at a time.

    Args:
      loss: ``loss(params, batch, keys) -> (sum, weight)``, or with a dict of metrics:
        the loss summed by sample and what to divide by, each ``[samples]`` or ``()``.
        ``keys`` holds a key a sample, and a loss that draws nothing may do without:
        ``loss(params, batch)``. Or one of ``hexijax.layers.loss``.
      params: a tree of arrays, ``init(key) -> params``, a path to weights, or one of
        ``hexijax.weights``; None: the loss of a module makes its own.
      optimizer: an optax gradient transformation, without clipping.
      cluster: a ``Cluster`` or its file; None: what JAX sees on this machine.
      batch_size: samples of a step; None: those of the first batch.
      plan: a ``Plan``, a plan.txt or plan.json, or ``"single"`` for the plain program
        on the first device; None: the planner makes one.
      emulate: let forced CPU devices stand for the cluster's; see ``hexijax.emulate``.
      seed: parameters that are made, and all random keys, follow from it.
      dtype: compute dtype asked for; a kind that lacks it computes in the next it has.
      clip_norm: largest global norm of the gradient; None: no clipping.
      elastic: nodes may go and come while ``fit`` trains; names of those that take
        part from the start, or True: all. ``members`` is told of changes.
      rules: any other field of an ``Experiment``, as ``skip_nonfinite=True``.

    Raises:
      UserError: what is given does not fit together.
    """

    def __init__(
        self,
        loss: Any,
        params: Any = None,
        optimizer: Any = None,
        *,
        cluster: Cluster | str | Path | None = None,
        batch_size: int | None = None,
        plan: Plan | str | Path | None = None,
        emulate: bool = False,
        seed: int = 0,
        dtype: str = "float32",
        clip_norm: float | None = None,
        elastic: bool | Iterable[str] = False,
        **rules: Any,
    ):
        fields: dict[str, Any] = {"name": "trainer", **checked_rules(rules)}
        if optimizer is None:
            raise UserError(
                "The Trainer has no optimizer. Give it an optax gradient "
                "transformation: Trainer(loss, params, optax.adamw(1e-3))."
            )
        self._cluster = given_cluster(cluster)
        self._emulate, self._plan_given = emulate, plan
        self._batch_size = batch_size
        file = None if isinstance(cluster, Cluster | None) else str(cluster)
        platform.stand(self._cluster, emulate=emulate, file=file)
        experiment = Experiment(
            loss=of_three(loss),
            init=params,
            optimizer=optimizer,
            seed=seed,
            dtype=dtype,
            clip_norm=clip_norm,
            batch_size=1 if batch_size is None else batch_size,
            **fields,
        )
        shapes = abstract_params(experiment)
        self._first: Experiment | None = experiment
        if params is not None and not callable(params) and not is_weights(params):
            # The tree may be as large as the model: it is let go when it has been read.
            experiment = dataclasses.replace(
                experiment, init=functools.partial(zeros_like, shapes)
            )
        self._experiment = experiment
        self._members: Members | None = None
        if elastic:
            names = None if isinstance(elastic, bool) else list(elastic)
            self._members = elastic_members(self.cluster, names, plan)
        self._job: _Job | None = None
        self._steps_done = 0
        self._last: Numbers | None = None
        self._data: str | None = None
        self._resumed: Stand | None = None
        self._stop = threading.Event()

    # What it is.

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        if self._cluster is None:
            from hexijax.runtime.devices import local_cluster

            self._cluster = local_cluster()
        return self._cluster

    @property
    def members(self) -> Members:
        """Who takes part in an elastic Trainer: tell it ``lose``, ``notice``, ``join``
        or ``slow``, from any thread.

        Raises:
          UserError: the Trainer is not elastic.
        """
        if self._members is None:
            raise UserError(
                "The Trainer has no members: it stays on its cluster. Give it "
                "elastic=True, and nodes may go and come while it fits."
            )
        return self._members

    @property
    def plan(self) -> Plan | None:
        """Who does what; None for ``plan="single"``.

        Raises:
          UserError: no batch has been seen yet, so there is none.
        """
        return self._made("a plan").now.plan

    @property
    def chain(self) -> Chain:
        """The model as layers; there once a batch was seen, as ``plan``."""
        return self._made("a chain of layers").chain

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far, those of a resumed run among them."""
        return self._steps_done

    def explain(self) -> str:
        """The plan as a picture, what limits its step, and what devices wait for.

        Raises:
          UserError: no batch has been seen yet, or there is no plan to explain.
        """
        from hexijax.report.explain import explain
        from hexijax.report.judged import judge
        from hexijax.report.limits import limits
        from hexijax.report.verdict import Choices

        job = self._made("a plan")
        plan = job.now.plan
        if plan is None:
            return f"The plain program on {next(iter(job.now.machine.devices))}."
        whole_problem = problem(job.experiment, job.chain, job.now.cluster)
        ours = judge(job.experiment.name, plan, whole_problem)
        return explain(Choices(ours=ours), limits(ours))

    # Training.

    def prepare(self, batch: Mapping[str, Any]) -> None:
        """Plans, and compiles, for batches like this one; the first step does it else.

        Args:
          batch: arrays by name, ``[batch_size, ...]``; their values do not matter.

        Raises:
          UserError: the batch, the loss or the cluster will not do.
        """
        if self._job is None:
            form = BatchForm.of(batch)
            size = self._batch_size or form.size
            self._prepare(dataclasses.replace(form, size=size))

    def step(self, batch: Mapping[str, Any]) -> Numbers:
        """One optimizer step; returns before it is computed.

        It waits for the step before the last one, so that a loop which looks at no
        number does not run ahead without end.

        Args:
          batch: arrays by name, ``[batch_size, ...]``: NumPy's, JAX's, or lists.

        Returns:
          The step's numbers, waited for when first read: ``loss`` and each metric as
          means over the global weight, ``weight``, and ``grad_norm`` before clipping
          and ``finite`` (1 or 0) where the step needs them; ``skipped`` (1 or 0) where
          a step may be left out, and ``scale``, a dynamic loss scale.

        Raises:
          UserError: the batch is not like the first; nothing was trained on it.
        """
        self.prepare(batch)
        job, step = self._made("an engine"), self._steps_done
        taken = job.form.taken(batch, f"The batch of step {step}")
        numbers = Numbers(job.now.machine.engine.step(taken, step).fetch)
        self._steps_done += 1
        before, self._last = self._last, numbers
        if before is not None:
            before.wait()
        return numbers

    def evaluate(
        self, batches: Data | Iterable[Batch], at_most: int | None = None
    ) -> dict[str, float]:
        """The loss and each metric over many batches, as one device would give them.

        Args:
          batches: dicts of arrays, the last one perhaps short; or a ``Data``, of which
            ``at_most`` are taken (8, if it is not said).
          at_most: batches to take; None: all.

        Raises:
          UserError: there is none, or one does not fit.
        """
        if isinstance(batches, Data):
            at_most = 8 if at_most is None else at_most
            batches = batches.batches(self._size())
        waiting = iter(batches)
        if self._job is None:
            self._size()  # not for the first batch here to say: it may be short
            first = next(waiting, None)
            if first is None:
                raise UserError(NO_BATCH)
            self.prepare(first)
            waiting = itertools.chain([first], waiting)
        engine = self._made("an engine").now.machine.engine
        return dict(evaluate_all(engine, waiting, at_most).means)

    def fit(
        self,
        batches: Data | BatchIterator | Iterable[Batch],
        steps: int,
        *,
        eval_data: Data | Iterable[Batch] | None = None,
        eval_every: int = 0,
        eval_batches: int = 8,
        callbacks: Iterable[Callable[[Line], object]] = (),
        save: str | Path | None = None,
        save_every: int = 0,
        far: str | Path | None = None,
        far_every: int = 0,
        far_rate: float = math.inf,
        neighbour_every: int = 0,
        show: bool = False,
    ) -> bool:
        """``steps`` more steps; Ctrl-C and ``stop`` end them early, and whole.

        After ``resume``, a ``Data`` or an iterator with ``set_state`` goes on where the
        saved run's stood; another iterator is taken as it comes. An elastic Trainer
        goes back to the newest step that is whole when a node is lost, so it needs
        one of these two; ``members.txt`` in ``save`` is looked at between steps.

        Args:
          batches: dicts of arrays, as many as steps at least.
          steps: optimizer steps to do.
          eval_data: to evaluate on, every time from its beginning: a ``Data``, or
            batches that can be read again.
          eval_every: steps between evaluations; 0: none.
          eval_batches: batches of an evaluation.
          callbacks: each is called with a step's line when the step is over: a dict of
            ``step``, ``loss``, ``step_s``, ``tokens_per_s``, and ``eval_loss`` where
            there was an evaluation.
          save: a folder to save into at the end; see ``save``.
          save_every: steps between saves, which are written beside training; 0: only
            the end.
          far: a path or URL to send saves to, that outlives this machine.
          far_every: steps between those that are sent; 0: only the end.
          far_rate: GB/s that are sent at most.
          neighbour_every: steps between copies of each node's state in the memory of
            the next one; 0: none.
          show: print lines, or a bar on a terminal.

        Returns:
          Whether all steps were done.

        Raises:
          UserError: the data ended early; the steps done stand.
          hexijax.job.loop.Diverged: a loss or gradient is not finite.
        """
        asked_of = {"save_every": save_every, "far": far}
        for asked, value in {**asked_of, "neighbour_every": neighbour_every}.items():
            if value and save is None:
                raise UserError(
                    f"fit({asked}={value!r}) was given without save=: name the folder "
                    "to save into."
                )
        iterator = self._iterator(batches)
        if self._members is not None and not isinstance(iterator, BatchIterator):
            raise UserError(
                f"An elastic Trainer's fit was given a {type(batches).__name__}, which "
                "cannot be put back: after a loss some steps are done again. Give a "
                "Data, or an iterator with get_state and set_state."
            )
        waiting: Iterator[Batch] = iterator
        if self._job is None and steps > 0:
            before = position(iterator)()
            first = next(iterator, None)
            if first is None:
                raise UserError(ended(0, steps, self._steps_done))
            self.prepare(first)
            if isinstance(iterator, BatchIterator):
                iterator.set_state(before)
            else:
                waiting = itertools.chain([first], iterator)
        job = self._made("an engine")
        check_vocabulary(batches, job.chain, "fit's data")
        check_vocabulary(eval_data, job.chain, "fit's eval_data")
        experiment = dataclasses.replace(
            job.experiment,
            steps=self._steps_done + steps,
            eval_every=eval_every,
            eval_data=None if eval_data is None else repeatable(eval_data),
            eval_batches=eval_batches,
        )
        self._stop = threading.Event()
        called = tuple(callbacks)

        def tell(line: Line) -> None:
            if self._members is not None:
                self._count(int(line["step"] or 0) + 1)
            for callback in called:
                callback(line)

        saver = None
        if save is not None:
            choices = saving.Choices(
                save_every=save_every,
                far=str(far or ""),
                far_every=far_every,
                far_rate=far_rate,
                neighbour_every=neighbour_every,
            )
            saver = self._saver(Path(save), choices)

        fitting = Fitting(
            job=job.now,
            experiment=experiment,
            batches=waiting,
            iterator=iterator,
            meter=Meter(
                tokens_per_step=float(job.form.size * job.chain.tokens_per_sample),
                flops_per_step=job.now.machine.flops_per_step,
                peak_flops_per_s=job.now.machine.peak_flops_per_s,
            ),
            screen=Screen() if show else Quiet(),
            stop=self._stop,
            count=self._count,
            tell=tell,
            saver=saver,
            folder=None if save is None else RunFolder(Path(save).expanduser()),
            tell_plan=self._tell_plan,
        )
        return fitting.run(self._steps_done)

    def stop(self) -> None:
        """Ends ``fit`` after the step that is computing; for callbacks."""
        self._stop.set()

    # Parameters and state.

    def params(self) -> Any:
        """The parameters as the model names them: its tree, of NumPy arrays.

        Raises:
          UserError: no batch has been seen yet: they are those that were given.
        """
        return self._made("parameters of its own").now.machine.engine.params()

    def save(self, folder: str | Path, data_state: Any = None) -> Path:
        """Writes parameters and optimizer state, exactly, and the plan.

        ``resume``, ``hexijax.load``, ``hexijax export`` and ``params=`` of another
        Trainer read the folder. Of several saves it keeps the newest two.

        Args:
          folder: where to; made if it is missing.
          data_state: position of the data, JSON-able; ``resume`` gives it back.

        Returns:
          The folder.

        Raises:
          UserError: there is nothing to save before the first batch.
        """
        return self._save(Path(folder), lambda: data_state)

    def resume(self, folder: str | Path) -> Any:
        """Goes on where a saved run stood, bit by bit; returns its data's position.

        Its plan is taken, unless the Trainer was given one. Say it before the first
        step.

        Raises:
          UserError: there is no such run, or it is of another model, plan or seed.
        """
        run = RunFolder(Path(folder).expanduser())
        experiment = self._job.experiment if self._job else self._experiment
        known = saving.facts(experiment)  # told before anything is compiled
        if self._batch_size is None and self._job is None:
            del known["batch size"]
        saved = saving.look(run, known)
        if self._job is None:
            if self._plan_given is None:
                stored = run.plan_text
                self._plan_given = stored if stored.is_file() else SINGLE
            words, size = saved.facts.get(saving.BATCH), saved.facts.get("batch size")
            if words is None or size is None:
                raise UserError(
                    f"{run.path} does not say what its batches look like. Call "
                    "prepare(batch) with the first one before resume."
                )
            self._prepare(BatchForm.from_words(words, self._batch_size or size))
        job = self._made("an engine")
        shared = saving.facts(job.experiment, job.chain)
        saved = saving.restore(run, job.engine, shared, _log.warning).stand
        self._steps_done, self._last = saved.step, None
        self._resumed = saved
        for moved in saving.moved_versions(saved):
            _log.warning("%s: %s, so last digits may change", run.path, moved)
        return saved.data_state

    # Inside.

    def _prepare(self, form: BatchForm) -> None:
        experiment = dataclasses.replace(self._experiment, batch_size=form.size)
        cluster = self._members.cluster() if self._members else self.cluster
        chain = trace_chain(experiment, form.example())
        for note in chain.notes:
            _log.info("%s", note)
        plan = self._find_plan(experiment, chain, cluster)
        _log.info("compiling for %d devices", len(cluster.devices))
        now: Elastic | Fixed
        if self._members is None:
            machine = make_machine(
                experiment, cluster, chain, plan, emulate=self._emulate
            )
            now = Fixed(cluster=cluster, plan=plan, machine=machine)
        else:
            ahead = contextlib.ExitStack()
            now = ahead.enter_context(
                elastic_job(
                    experiment,
                    chain,
                    self._members,
                    emulate=self._emulate,
                    say=_log.warning,
                )
            )
            weakref.finalize(self, ahead.close)  # it has a process
            machine = now.begin(plan)
        machine.engine.init(self._first)
        self._first = None
        self._job = _Job(experiment=experiment, chain=chain, form=form, now=now)

    def _find_plan(
        self, experiment: Experiment, chain: Chain, cluster: Cluster
    ) -> Plan | None:
        match self._plan_given:
            case None:
                return new_plan(experiment, chain, cluster)
            case "single":
                return None
            case Plan() as plan:
                check_plan(plan, experiment, chain, cluster, what="The plan given")
                return plan
            case file:
                path = Path(file).expanduser()
                try:
                    return read_plan(path, experiment, chain, cluster)
                except PlanError as error:
                    if self._members is None:
                        raise
                    _log.warning("%s does not fit, so a plan is made. %s", path, error)
                    return new_plan(experiment, chain, cluster)

    def _made(self, what: str) -> _Job:
        if self._job is None:
            raise UserError(
                f"The Trainer has {what} once it knows what a batch looks like. Call "
                "step(batch), or prepare(batch), first."
            )
        return self._job

    def _size(self) -> int:
        size = self._job.form.size if self._job else self._batch_size
        if size is None:
            raise UserError(
                "The Trainer has seen no batch, so it does not know the batch size. "
                "Give it batch_size=, or call prepare(batch) first."
            )
        return size

    def _iterator(self, batches: Data | Iterable[Batch]) -> Iterator[Batch]:
        saved, self._resumed = self._resumed, None
        self._data = batches.fingerprint() if isinstance(batches, Data) else None
        if isinstance(batches, Data):
            return placed(batches.batches(self._size()), saved, self._data)
        return placed(iter(batches), saved, None)

    def _count(self, done: int) -> None:
        self._steps_done = done

    def _save(self, folder: Path, position: Callable[[], Any]) -> Path:
        saver = self._saver(folder, saving.Choices())
        saver.save(self._steps_done, position())
        return folder.expanduser()

    def _saver(self, folder: Path, choices: saving.Choices) -> Saver:
        """What writes into a run's folder; the plan lies there when it returns."""
        job = self._made("a state")
        run = RunFolder(folder.expanduser())
        found = saving.stored(run, _log.warning).whole()
        if found and found[0] > self._steps_done:
            raise UserError(
                f"{run.path} holds step {found[0]} of a run already, and this one has "
                f"done {self._steps_done}: whoever resumed would get the other. Save "
                "into a folder of its own."
            )
        shared = saving.facts(job.experiment, job.chain)
        shared |= {"data": self._data} if self._data else {}
        tiers = choices.tiers(run)
        saver = saving.saver(run, job.engine, shared, tiers, tell=_log.warning)
        self._tell_plan(run, saver)
        return saver

    def _tell_plan(self, run: RunFolder, saver: Saver) -> None:
        """Writes the plan of now, which saves that follow are of."""
        job = self._made("a plan")
        plan = job.now.plan
        if plan:
            saving.write_plan(run, plan, job.now.cluster, job.chain, job.experiment)
        saver.plan = saving.plan_text(plan, job.engine)
