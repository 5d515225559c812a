"""`hexijax run`: plan, compile, train, report.

arguments -> Session -> Chain -> Plan -> Machine -> Loop -> runs/<name>-<number>/
"""

import argparse
import contextlib
import dataclasses
import sys
import threading
from contextlib import closing
from typing import Any

from hexijax.cli import elasticity, rehearsal
from hexijax.cli.session import (
    SINGLE,
    Session,
    find_plan,
    open_session,
)
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.experiment import BatchIterator, Experiment
from hexijax.job import saving
from hexijax.job.elastic import Elastic
from hexijax.job.intake import problem, trace_chain
from hexijax.job.loop import Diverged, Loop
from hexijax.job.machine import Machine, make_machine
from hexijax.job.screen import Screen
from hexijax.layers.chain import Chain
from hexijax.plan import Plan
from hexijax.report import Meter, Metrics, RunFolder
from hexijax.report.explain import brief
from hexijax.report.folder import write_json
from hexijax.report.judged import judge
from hexijax.report.summary import make_report, render

DIVERGED, INTERRUPTED = 1, 130


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    choices = _choices(arguments)
    screen = Screen()
    session = open_session(arguments, cpu=arguments.cpu, emulate=arguments.emulate)
    if not arguments.cpu:
        _check_gpu()
    experiment, members = session.experiment, None
    if arguments.elastic is not None:
        members = elasticity.members(arguments.elastic, session.cluster, arguments.plan)
        session = dataclasses.replace(session, cluster=members.cluster())
    resumed = None
    if arguments.resume is not None:
        run_name = arguments.resume or None
        resumed = RunFolder.find(arguments.out, experiment.name, run_name)
        saved = saving.look(resumed, saving.facts(experiment))
        if anew := saving.moved_settings(saved, session.settings):
            screen.say(f"note: --set is not what the run had: {', '.join(anew)}")
    chain = trace_chain(experiment)
    for note in chain.notes:
        screen.say(f"note: {note}")
    plan = None
    if arguments.plan != SINGLE:
        stored = resumed.plan_text if resumed else None
        plan = find_plan(session, chain, arguments.plan, screen.say, stored)
        screen.say(
            brief(
                judge(
                    experiment.name, plan, problem(experiment, chain, session.cluster)
                )
            )
        )
    with contextlib.ExitStack() as stack:
        job: Elastic | Fixed
        if members is not None:
            job = stack.enter_context(
                elasticity.elastic_job(
                    experiment,
                    chain,
                    members,
                    emulate=arguments.emulate,
                    say=screen.say,
                    progress=screen.compiling,
                    rehearsed=rehearsal.Asked(
                        experiment=session.source.path,
                        settings=session.settings,
                        cluster=members.whole,
                        emulate=arguments.emulate,
                    ),
                )
            )
            job.begin(plan)
        else:
            machine = make_machine(
                experiment,
                session.cluster,
                chain,
                plan,
                emulate=arguments.emulate,
                progress=screen.compiling,
            )
            job = Fixed(machine=machine, plan=plan, cluster=session.cluster)
        return _train(arguments, session, choices, screen, chain, job, resumed)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """A job under one plan."""

    machine: Machine
    """Its engine."""

    plan: Plan | None
    """None: the plain program."""

    cluster: Cluster
    """Where."""

    @property
    def engine(self) -> Any:
        """The machine's."""
        return self.machine.engine


def _train(
    arguments: argparse.Namespace,
    session: Session,
    choices: saving.Choices,
    screen: Screen,
    chain: Chain,
    job: Elastic | Fixed,
    resumed: RunFolder | None,
) -> int:
    """The steps, and what they leave. No machine of an elastic job is held here."""
    experiment = session.experiment
    job.engine.init()
    batches = experiment.data.batches(experiment.batch_size)
    start = _resume(resumed, job.engine, experiment, batches, screen) if resumed else 0
    fingerprint = experiment.data.fingerprint()
    folder = resumed or RunFolder.new(arguments.out, experiment.name)
    if job.plan:
        saving.write_plan(folder, job.plan, job.cluster, chain, experiment)
        if not arguments.emulate:  # stand-ins compile to other programs
            saving.write_temps(folder, job.machine)
    tiers = choices.tiers(folder)
    saver = None
    if not arguments.no_save:
        shared = {**saving.facts(experiment, chain), "data": fingerprint}
        shared |= {saving.SETTINGS: dict(session.settings)}
        saver = saving.saver(
            folder, job.engine, shared, tiers, plan=job.plan, tell=screen.say
        )
    meter = Meter(
        tokens_per_step=float(experiment.batch_size * experiment.tokens_per_sample),
        flops_per_step=job.machine.flops_per_step,
        peak_flops_per_s=job.machine.peak_flops_per_s,
    )
    with closing(Metrics(folder.metrics, continue_at=start)) as metrics:
        stop = threading.Event()

        def make_loop() -> Loop:
            return Loop(
                engine=job.engine,
                experiment=experiment,
                batches=batches,
                meter=meter,
                screen=screen,
                write=metrics.write,
                save=saving.during(saver, experiment.steps, batches.get_state, metrics)
                if saver
                else None,
                due=saver.due if saver else None,
                stop=stop,
            )

        def anew(elastic: Elastic) -> Loop:
            """For the plan of now."""
            meter.peak_flops_per_s = elastic.machine.peak_flops_per_s
            if elastic.changes:
                saving.write_plan(
                    folder, elastic.plan, elastic.cluster, chain, experiment
                )
            if saver:
                saver.plan = saving.plan_text(elastic.plan, elastic.engine)
            return make_loop()

        status = "failed"
        try:
            if isinstance(job, Elastic):
                with elasticity.watched(job, folder, saver, stop.set, screen.say):
                    finished = job.run(anew, batches, metrics.go_back, start)
                    if saver:
                        saver.close(job.done)
            else:
                loop = make_loop()
                finished = loop.run(start)
                if saver:
                    saver.close(loop.done)
            status = "done" if finished else "interrupted"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except Diverged as error:
            screen.close()
            print(f"Diverged: {error}", file=sys.stderr)
            return DIVERGED
        finally:
            screen.close()
            screen.say(_report(arguments, folder, session, job, metrics, meter, status))
    return 0 if status == "done" else INTERRUPTED


def _choices(arguments: argparse.Namespace) -> saving.Choices:
    """Raises a ``UserError`` for choices that contradict each other."""
    if arguments.no_save and arguments.save_every:
        raise UserError(
            f"--no-save and --save-every {arguments.save_every} were both given: a run "
            "saves or it does not. Leave one out."
        )
    if arguments.far_every and not arguments.far:
        raise UserError(
            f"--far-every {arguments.far_every} was given without --far: name the path "
            "or URL that saves are sent to."
        )
    if arguments.far_rate <= 0:
        raise UserError(
            f"--far-rate {arguments.far_rate:g}: nothing would ever arrive. Give GB a "
            "second above 0."
        )
    choices = saving.Choices(
        save_every=arguments.save_every,
        keep=arguments.keep,
        fast=arguments.fast or "",
        far=arguments.far or "",
        far_every=arguments.far_every,
        far_rate=arguments.far_rate,
        neighbour_every=arguments.neighbour_every,
    )
    choices.check()
    return choices


def _check_gpu() -> None:
    """Raises a ``UserError`` where a GPU is present that JAX cannot see."""
    from hexijax.cli.doctor import missing_gpu_message

    if message := missing_gpu_message():
        raise UserError(message)


def _resume(
    folder: RunFolder,
    engine: Any,
    experiment: Experiment,
    batches: BatchIterator,
    screen: Screen,
) -> int:
    """Puts engine and data where the run was saved; returns the steps done."""
    restored = saving.restore(
        folder,
        engine,
        {**saving.facts(experiment), "data": experiment.data.fingerprint()},
        screen.say,
    )
    saved = restored.stand
    if saved.step >= experiment.steps:
        raise UserError(
            f"--resume: {folder.path} has done {saved.step} steps already and "
            f"{experiment.steps} were asked for. Ask for more: --set "
            f"steps={2 * saved.step}."
        )
    if saved.data_state is None:
        raise UserError(
            f"--resume: {folder.path} was saved without the position of its data, by "
            "a loop of its own. Go on with a Trainer's resume, or start a new run from "
            f"its parameters: init={str(folder.path)!r}."
        )
    batches.set_state(saved.data_state)
    screen.say(f"resuming {folder.path} after step {saved.step}: {restored.moved}")
    if moved := saving.moved_versions(saved):
        screen.say(f"versions changed, so last digits may: {', '.join(moved)}")
    return saved.step


def _fingerprints(experiment: Experiment) -> dict[str, str]:
    """Of what is trained and evaluated on, by field."""
    fields = {"data": experiment.data, "eval_data": experiment.eval_data}
    return {k: v.fingerprint() for k, v in fields.items() if v is not None}


def _report(
    arguments: argparse.Namespace,
    folder: RunFolder,
    session: Session,
    job: Elastic | Fixed,
    metrics: Metrics,
    meter: Meter,
    status: str,
) -> str:
    """Writes report.json; returns its few lines."""
    report = make_report(
        name=session.experiment.name,
        status=status,
        metrics=metrics,
        meter=meter,
        plan=job.plan,
        cluster=job.cluster,
        devices=job.machine.devices,
        peak_bytes_by_device=job.machine.engine.peak_bytes_by_device(),
        data=_fingerprints(session.experiment),
    )
    write_json(folder.report, report)
    if arguments.json:
        write_json(arguments.json, report)
    return render(report, str(folder.path))
