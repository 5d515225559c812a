"""The steps of a run, and what they leave in its folder.

    Session, Chain, a job's machine -> Loop -> metrics, checkpoints, report

A job is a machine under one plan, an elastic one in this process, or one island's part.
"""

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

from hexijax.cli import elasticity
from hexijax.cli.session import Session
from hexijax.errors import UserError
from hexijax.experiment import BatchIterator, Experiment
from hexijax.job import saving
from hexijax.job.elastic import Elastic
from hexijax.job.islands import Islanded
from hexijax.job.loop import Diverged, Loop
from hexijax.job.machine import Fixed
from hexijax.job.screen import Screen
from hexijax.job.tracing import Traced, drift
from hexijax.layers.chain import Chain
from hexijax.report import Meter, Metrics, RunFolder
from hexijax.report.folder import write_json
from hexijax.report.judged import Judged
from hexijax.report.summary import make_report, render

DIVERGED, INTERRUPTED = 1, 130


def train(
    arguments: argparse.Namespace,
    session: Session,
    *,
    choices: saving.Choices,
    screen: Screen,
    chain: Chain,
    job: Elastic | Fixed | Islanded,
    resumed: RunFolder | None,
    judged: Judged | None = None,
    traced: Traced | None = None,
    started: Callable[[], None] | None = None,
) -> int:
    """Trains; returns the exit code. No machine of an elastic job is held here.

    What is ``judged`` is held against what was measured; ``traced`` is the job's engine
    where steps are watched; ``started`` is called when a first step is on its way.
    """
    experiment = session.experiment
    batches = experiment.data.batches(experiment.batch_size)
    fingerprint = experiment.data.fingerprint()
    shared = {**saving.facts(experiment), "data": fingerprint}
    islanded = job if isinstance(job, Islanded) else None
    start = 0
    if islanded is None:
        job.engine.init()
        if resumed:
            start = _resume(resumed, job.engine, experiment, shared, batches, screen)
    folder = resumed or RunFolder.new(arguments.out, experiment.name)

    def own() -> RunFolder:
        """Where this process writes its figures."""
        return folder if islanded is None else islanded.own_folder

    if job.plan and own() is folder:
        saving.write_plan(folder, job.plan, job.cluster, chain, experiment)
        if not arguments.emulate and islanded is None:
            # Stand-ins compile to other programs, and an island to its own alone.
            saving.write_temps(folder, job.machine)
    saver = None
    if not arguments.no_save:
        saver = saving.saver(
            folder,
            job.engine,
            {
                **saving.facts(experiment, chain),
                "data": fingerprint,
                saving.SETTINGS: dict(session.settings),
            },
            choices.tiers(folder),
            plan=job.plan,
            tell=screen.say,
        )
    if islanded is not None:
        islanded.saver = saver
        start = sys.maxsize  # the lines that are there stay until it is known
    meter = Meter(
        tokens_per_step=float(experiment.batch_size * experiment.tokens_per_sample),
        flops_per_step=job.machine.flops_per_step,
        peak_flops_per_s=job.machine.peak_flops_per_s,
    )
    with closing(Metrics(own().metrics, continue_at=start)) as metrics:
        stop = threading.Event()

        def make_loop() -> Loop:
            return Loop(
                engine=traced or job.engine,
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
                started=started,
            )

        def anew(changed: Elastic | Islanded) -> Loop:
            """For the plan of now."""
            meter.peak_flops_per_s = changed.machine.peak_flops_per_s
            if changed.changes and own() is folder:
                saving.write_plan(
                    folder, changed.plan, changed.cluster, chain, experiment
                )
            if saver:
                saver.plan = saving.plan_text(changed.plan, changed.engine)
            return make_loop()

        status = "failed"
        try:
            with contextlib.ExitStack() as stack:
                if islanded is not None:

                    def back(step: int) -> None:
                        metrics.move(own().metrics, step)

                    finished = islanded.run(anew, batches, back, shared)
                elif isinstance(job, Elastic):
                    stack.enter_context(
                        elasticity.watched(job, folder, saver, stop.set, screen.say)
                    )
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
            if islanded is None or status != "failed":
                report = _report(own(), session, job, metrics, meter, status)
                lines: list[str] = []
                if status == "done" and judged is not None and isinstance(job, Fixed):
                    lines = _compare(report, judged, traced, own())
                if arguments.json:
                    write_json(arguments.json, report)
                screen.say(render(report, str(own().path), lines))
    return 0 if status == "done" else INTERRUPTED


def _resume(
    folder: RunFolder,
    engine: Any,
    experiment: Experiment,
    shared: saving.Facts,
    batches: BatchIterator,
    screen: Screen,
) -> int:
    """Puts engine and data where the run was saved; returns the steps done."""
    restored = saving.restore(folder, engine, shared, screen.say)
    saved = restored.stand
    if saved.step >= experiment.steps:
        raise UserError(
            f"--resume: {folder.path} has done {saved.step} steps already and "
            f"{experiment.steps} were asked for. Ask for more: --set "
            f"steps={2 * saved.step}."
        )
    batches.set_state(saving.position(saved, folder.path))
    screen.say(f"resuming {folder.path} after step {saved.step}: {restored.moved}")
    if moved := saving.moved_versions(saved):
        screen.say(f"versions changed, so last digits may: {', '.join(moved)}")
    return saved.step


def _fingerprints(experiment: Experiment) -> dict[str, str]:
    """Of what is trained and evaluated on, by field."""
    fields = {"data": experiment.data, "eval_data": experiment.eval_data}
    return {k: v.fingerprint() for k, v in fields.items() if v is not None}


def _report(
    folder: RunFolder,
    session: Session,
    job: Elastic | Fixed | Islanded,
    metrics: Metrics,
    meter: Meter,
    status: str,
) -> dict[str, Any]:
    """Writes report.json, and gives it back."""
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
    return report


def _compare(
    report: dict[str, Any], judged: Judged, traced: Traced | None, folder: RunFolder
) -> list[str]:
    """Adds what was predicted to a run's report; returns lines for people."""
    if not report["measured_step_s"]:
        return []
    trace = folder.path / "trace.json"
    found = drift(
        judged,
        report["measured_step_s"],
        report["peak_bytes_by_device"],
        traced=traced,
        trace=trace,
    )
    report["prediction"] = found.report()
    write_json(folder.report, report)
    where = (
        [] if traced is None else [f"  trace   {trace}, for https://ui.perfetto.dev"]
    )
    return [*found.lines(), *where]
