"""`hexijax run`: plan, compile, train, report.

arguments -> Session -> Chain -> Plan -> Machine -> Loop -> runs/<name>-<number>/
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from hexijax.cli.screen import Screen
from hexijax.cli.session import (
    SINGLE,
    Session,
    find_plan,
    open_session,
)
from hexijax.errors import UserError
from hexijax.experiment import BatchIterator, Experiment
from hexijax.job.intake import problem, trace_chain, training_facts
from hexijax.job.loop import Diverged, Loop
from hexijax.job.machine import Machine, make_machine
from hexijax.plan import Plan, serial, text
from hexijax.report import Meter, Metrics, RunFolder
from hexijax.report.explain import brief
from hexijax.report.folder import write_atomically, write_json
from hexijax.report.judged import judge
from hexijax.report.summary import make_report, render, versions

DIVERGED, INTERRUPTED = 1, 130


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    if arguments.no_save and arguments.save_every:
        raise UserError(
            f"--no-save and --save-every {arguments.save_every} were both given: a run "
            "saves or it does not. Leave one out."
        )
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
    plan = None
    if arguments.plan != SINGLE:
        stored = resumed.plan_text if resumed else None
        plan = find_plan(session, chain, arguments.plan or stored, screen.say)
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
    folder = resumed or RunFolder.new(arguments.out, experiment.name)
    if plan:
        write_atomically(folder.plan_text, text.render(plan, chain))
        serial.save(
            folder.plan_json,
            plan,
            session.cluster,
            chain,
            training_facts(experiment),
        )
        if not arguments.emulate:  # stand-ins compile to other programs
            _write_temps(folder, machine)
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
            save=None
            if arguments.no_save
            else _saver(folder, machine, experiment, batches),
            save_every=arguments.save_every,
        )
        status = "failed"
        try:
            status = "done" if loop.run(start) else "interrupted"
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


def _check_gpu() -> None:
    """Raises a ``UserError`` where a GPU is present that JAX cannot see."""
    from hexijax.cli.doctor import missing_gpu_message

    if message := missing_gpu_message():
        raise UserError(message)


def _write_temps(folder: RunFolder, machine: Machine) -> None:
    from hexijax.runtime.engine import Engine

    if isinstance(machine.engine, Engine):
        write_json(folder.temps, machine.engine.temps().to_json())


def _resume(
    folder: RunFolder,
    machine: Machine,
    experiment: Experiment,
    batches: BatchIterator,
    screen: Screen,
) -> int:
    """Puts engine and data where the run was saved; returns the steps done."""
    from hexijax import checkpoint

    facts = _facts(experiment)
    saved = checkpoint.restore(folder.checkpoints, machine.engine, facts=facts)
    if saved.step >= experiment.steps:
        raise UserError(
            f"--resume: {folder.path} has done {saved.step} steps already and "
            f"{experiment.steps} were asked for. Ask for more: --set "
            f"steps={2 * saved.step}."
        )
    batches.set_state(saved.data_state)
    screen.say(f"resuming {folder.path} after step {saved.step}")
    then, now = saved.facts.get("versions", {}), versions()
    moved = [f"{k} {then[k]} -> {now.get(k)}" for k in then if then[k] != now.get(k)]
    if moved:
        screen.say(f"versions changed, so last digits may: {', '.join(moved)}")
    return saved.step


def _saver(
    folder: RunFolder,
    machine: Machine,
    experiment: Experiment,
    batches: BatchIterator,
) -> Callable[[int], None]:
    facts = {**_facts(experiment), "versions": versions()}

    def save(step: int) -> None:
        from hexijax import checkpoint  # imports Orbax: for those who save

        checkpoint.save(
            folder.checkpoints,
            machine.engine,
            step=step,
            data_state=batches.get_state(),
            facts=facts,
        )

    return save


def _facts(experiment: Experiment) -> Mapping[str, Any]:
    """What a resumed run must share with the saved one, besides its arrays."""
    return {
        "seed": experiment.seed,
        "batch size": experiment.batch_size,
        "data": experiment.data.fingerprint(),
    }


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
    )
    write_json(folder.report, report)
    if arguments.json:
        write_json(arguments.json, report)
    return render(report, str(folder.path))
