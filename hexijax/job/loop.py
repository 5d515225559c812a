"""The loop over steps: batches in, metrics out, whole at every moment.

Metrics are fetched one step late, so that a step is dispatched while the last one still
computes. Ctrl-C lets the step at hand end: state, metrics and report stay whole.
"""

import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, runtime_checkable

from hexijax.errors import UserError
from hexijax.experiment import Batch, Experiment
from hexijax.job.evaluation import Evaluator, evaluate
from hexijax.plan.precision import LEAST_SCALE
from hexijax.report import Meter

Line = Mapping[str, float | int | None]
"""What is told of a step."""

MAX_SKIPPED = 20
"""Steps in a row that may be skipped before the run counts as lost. Those in which a
dynamic loss scale had room to fall do not count: they look for it."""


class Diverged(Exception):
    """The loss or the gradient is not finite: the run is lost, and this says where."""


@runtime_checkable
class Result(Protocol):
    """A step's numbers, perhaps still being computed."""

    @property
    def fetch(self) -> Callable[[], dict[str, float]]:
        """Waits for them."""
        ...


@runtime_checkable
class Trainee(Evaluator, Protocol):
    """What is trained: an engine."""

    def step(self, batch: Batch, step: int) -> Result:
        """One optimizer step, not waited for."""
        ...


@runtime_checkable
class Watcher(Protocol):
    """Who is told how a run goes: a screen, a person's own code."""

    def say(self, text: str) -> None:
        """Something worth a line."""
        ...

    def training(self, steps: int, start: int) -> None:
        """Steps follow, from ``start``."""
        ...

    def step(self, line: Line, steps: int) -> None:
        """A step has ended, or an evaluation before the first."""
        ...

    def close(self) -> None:
        """No more steps follow."""
        ...


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One run's steps."""

    engine: Trainee
    experiment: Experiment
    batches: Iterator[Batch]
    meter: Meter
    screen: Watcher

    write: Callable[[Line], None] | None = None
    """Takes each line, for a file."""

    save: Callable[[int], None] | None = None
    """``save(steps done)``; None: nothing is saved."""

    save_every: int = 0
    """Steps between saves; the last step is always saved."""

    due: Callable[[int], bool] | None = None
    """Whether so many steps done are to be saved; None: ``save_every`` says it."""

    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Ends the run after the step at hand, once it is set; Ctrl-C sets it."""

    pause: Callable[[int], bool] | None = None
    """Asked before each step, with the steps done, before a batch is taken for it;
    True: the loop is left there, and ``paused``. Nothing is saved."""

    paused: bool = dataclasses.field(default=False, init=False)
    """Whether it was; ``run`` may go on from ``done`` steps, or from before."""

    started: Callable[[], None] | None = None
    """Called when the first step has been dispatched: its programs are made by then."""

    done: int = dataclasses.field(default=0, init=False)
    """Steps dispatched."""

    flag: str = "--set "
    """How a field of the experiment is set by whoever reads the messages."""

    _skipped: int = dataclasses.field(default=0, init=False)
    _saved: int = dataclasses.field(default=0, init=False)
    _told_end: bool = dataclasses.field(default=False, init=False)

    def run(self, start: int = 0) -> bool:
        """Trains from step ``start``; False: ``stop`` ended it early.

        Raises:
          Diverged: a loss or gradient is not finite.
          UserError: the data ended early; what was trained stands.
        """
        steps, pending = self.experiment.steps, None
        done = self.done = self._saved = start
        self.paused = False
        self.screen.training(steps, start)
        if start == 0 and self.experiment.eval_ends:
            self._tell({"step": -1, **self._evaluate()})
        with _asked_to_stop(self.screen, self.stop):
            self.meter.start()
            for step in range(start, steps):
                if self.pause and self.pause(done):
                    self.paused = True
                    break
                batch = next(self.batches, None)
                if batch is None:
                    break
                began_s = self.meter.clock()
                result = self.engine.step(batch, step)
                dispatch_s = self.meter.clock() - began_s
                if self.started and step == start:
                    self.started()
                if pending is not None:
                    self._finish(*pending)
                pending, done = (step, result, dispatch_s), step + 1
                self.done = done
                if self._evaluates(step) or self._saves(step):
                    self._finish(*pending)
                    pending = None
                    if self._saves(step):
                        self._save(done)
                    self.meter.start()
                if self.stop.is_set():
                    break
            if pending is not None:
                self._finish(*pending)
            if done > self._saved and not self.paused:
                self._save(done)
        self.screen.close()
        if done < steps and not self.stop.is_set() and not self.paused:
            raise UserError(ended(done - start, steps - start, start))
        return done == steps

    def _evaluates(self, step: int) -> bool:
        every, last = self.experiment.eval_every, step + 1 == self.experiment.steps
        if self.experiment.eval_ends and last:
            return True
        return bool(every) and (step + 1) % every == 0

    def _saves(self, step: int) -> bool:
        if self.due is not None:
            return bool(self.save) and self.due(step + 1)
        return bool(self.save_every) and (step + 1) % self.save_every == 0

    def _save(self, done: int) -> None:
        if self.save:
            self.save(done)
        self._saved = done

    def _finish(self, step: int, result: Result, dispatch_s: float) -> None:
        """Waits for a step, and tells of it."""
        values = result.fetch()
        speeds = self.meter.tick(dispatch_s)
        finite, weight = values.pop("finite", 1.0), values.pop("weight", None)
        line = {"step": step, **values, **speeds}
        if self._evaluates(step):
            line |= self._evaluate()
        self._tell(line)
        if weight == 0.0:
            raise Diverged(
                f"The batch of step {step} has weight 0: there is nothing to average "
                "over. Look at the weights that the loss returns."
            )
        self._check_finite(step, values, finite=bool(finite))

    def _tell(self, line: Line) -> None:
        if self.write:
            self.write(line)
        self.screen.step(line, self.experiment.steps)

    def _evaluate(self) -> dict[str, float]:
        """Means over the same first batches of the held-out data, each time."""
        experiment = self.experiment
        batches = experiment.eval_data.batches(experiment.batch_size)
        found = evaluate(self.engine, batches, experiment.eval_batches)
        if found.batches < experiment.eval_batches and not self._told_end:
            self._told_end = True
            self.screen.say(
                f"The evaluation's data ended after {found.batches} of "
                f"{experiment.eval_batches} batches: all its {found.samples} samples "
                "are evaluated each time."
            )
        return {f"eval_{name}": value for name, value in found.means.items()}

    def _check_finite(
        self, step: int, values: dict[str, float], *, finite: bool
    ) -> None:
        loss, experiment = values["loss"], self.experiment
        if finite and math.isfinite(loss):
            self._skipped = 0
            return
        scale = values.get("scale")
        if scale is not None and scale > LEAST_SCALE and math.isfinite(loss):
            return
        self._skipped += 1
        skips = experiment.skip_nonfinite or scale is not None
        if skips and self._skipped < MAX_SKIPPED:
            return
        what = (
            f"loss of step {step} is {loss}"
            if not math.isfinite(loss)
            else f"gradient of step {step} is not finite (loss {loss:.4g})"
        )
        if skips:
            at = "" if scale is None else f", the last at a loss scale of {scale:g}"
            smaller = self._search() if scale is None else ", --set dtype=float32"
            ways = (
                f"{MAX_SKIPPED} steps in a row were skipped{at}. Try a smaller "
                f"learning rate{smaller}, or look at the data."
            )
        else:
            flag, yes = self.flag, "true" if self.flag else "True"
            save = "--save-every N" if flag else "save_every=N"
            clip = "" if experiment.clip_norm else f"{flag}clip_norm=1, "
            ways = (
                f"Try {clip}a smaller learning rate or a longer warm-up"
                f"{self._search()}, {flag}dtype=float32, or {flag}skip_nonfinite={yes} "
                f"to leave such steps out. With {save} a run can go on from before it."
            )
        raise Diverged(f"The {what}. {ways}")

    def _search(self) -> str:
        """Advice for whoever fixed the loss scale: what overflows at one may not at
        another."""
        if self.experiment.loss_scale is None:
            return ""
        word = "dynamic" if self.flag else "'dynamic'"
        return f", {self.flag}loss_scale={word}"


def ended(batches: int, asked: int, start: int) -> str:
    """Says that data ended early."""
    return (
        f"The data ended after {batches} batches, and {asked} steps were asked for. "
        f"The first {start + batches} steps of the run are done and stand. Give data "
        "that starts over (a Data's batches are endless), or ask for fewer steps."
    )


@contextmanager
def _asked_to_stop(screen: Watcher, stop: threading.Event) -> Generator[None]:
    """The first Ctrl-C sets ``stop``; the second interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(signum: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)
        screen.say("Stopping after this step; Ctrl-C again stops at once.")

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
