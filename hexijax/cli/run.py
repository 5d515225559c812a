"""`hexijax run`: plan, compile, train, report.

arguments -> Session -> Chain -> Plan -> Machine -> Loop -> runs/<name>-<number>/
"""

import argparse
import sys
from contextlib import closing

from hexijax.cli.session import (
    SINGLE,
    Session,
    find_plan,
    open_session,
)
from hexijax.errors import UserError
from hexijax.experiment import BatchIterator, Experiment
from hexijax.job import saving
from hexijax.job.intake import problem, trace_chain
from hexijax.job.loop import Diverged, Loop
from hexijax.job.machine import Machine, make_machine
from hexijax.job.screen import Screen
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
    experiment = session.experiment
    resumed = None
    if arguments.resume is not None:
        run_name = arguments.resume or None
        resumed = RunFolder.find(arguments.out, experiment.name, run_name)
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
    machine = make_machine(
        experiment,
        session.cluster,
        chain,
        plan,
        emulate=arguments.emulate,
        progress=screen.compiling,
    )
    machine.engine.init()
    batches = experiment.data.batches(experiment.batch_size)
    start = _resume(resumed, machine, experiment, batches, screen) if resumed else 0
    fingerprint = experiment.data.fingerprint()
    folder = resumed or RunFolder.new(arguments.out, experiment.name)
    if plan:
        saving.write_plan(folder, plan, session.cluster, chain, experiment)
        if not arguments.emulate:  # stand-ins compile to other programs
            saving.write_temps(folder, machine)
    tiers = choices.tiers(folder)
    saver = None
    if not arguments.no_save:
        shared = {**saving.facts(experiment, chain), "data": fingerprint}
        saver = saving.saver(
            folder, machine.engine, shared, tiers, plan=plan, tell=screen.say
        )
    meter = Meter(
        tokens_per_step=float(experiment.batch_size * experiment.tokens_per_sample),
        flops_per_step=machine.flops_per_step,
        peak_flops_per_s=machine.peak_flops_per_s,
    )
    with closing(Metrics(folder.metrics, continue_at=start)) as metrics:
        loop = Loop(
            engine=machine.engine,
            experiment=experiment,
            batches=batches,
            meter=meter,
            screen=screen,
            write=metrics.write,
            save=saving.during(saver, experiment.steps, batches.get_state, metrics)
            if saver
            else None,
            due=saver.due if saver else None,
        )
        status = "failed"
        try:
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
            screen.say(
                _report(
                    arguments, folder, session, plan, machine, metrics, meter, status
                )
            )
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
    return saving.Choices(
        save_every=arguments.save_every,
        keep=arguments.keep,
        fast=arguments.fast or "",
        far=arguments.far or "",
        far_every=arguments.far_every,
        far_rate=arguments.far_rate,
        neighbour_every=arguments.neighbour_every,
    )


def _check_gpu() -> None:
    """Raises a ``UserError`` where a GPU is present that JAX cannot see."""
    from hexijax.cli.doctor import missing_gpu_message

    if message := missing_gpu_message():
        raise UserError(message)


def _resume(
    folder: RunFolder,
    machine: Machine,
    experiment: Experiment,
    batches: BatchIterator,
    screen: Screen,
) -> int:
    """Puts engine and data where the run was saved; returns the steps done."""
    restored = saving.restore(
        folder,
        machine.engine,
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
    plan: Plan | None,
    machine: Machine,
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
        plan=plan,
        cluster=session.cluster,
        devices=machine.devices,
        peak_bytes_by_device=machine.engine.peak_bytes_by_device(),
        data=_fingerprints(session.experiment),
    )
    write_json(folder.report, report)
    if arguments.json:
        write_json(arguments.json, report)
    return render(report, str(folder.path))
