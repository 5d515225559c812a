"""The loop over steps: batches in, metrics out, whole at every moment.

Metrics are fetched one step late, so that a step is dispatched while the last one still
computes. Ctrl-C lets the step at hand end: state, metrics and report stay whole.
"""

import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from hexijax.cli.screen import Screen
from hexijax.experiment import Batch, BatchIterator, Experiment
from hexijax.report import Meter, Metrics

MAX_SKIPPED = 20
"""Steps in a row that ``skip_nonfinite`` may skip before the run counts as lost."""


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
class Trainee(Protocol):
    """What is trained: an engine."""

    def step(self, batch: Batch, step: int) -> Result:
        """One optimizer step, not waited for."""
        ...

    def evaluate(self, batch: Batch, step: int) -> dict[str, float]:
        """Loss and metrics without a gradient."""
        ...


@dataclasses.dataclass(kw_only=True)
class Loop:
    """One run's steps."""

    engine: Trainee
    experiment: Experiment
    batches: BatchIterator
    metrics: Metrics
    meter: Meter
    screen: Screen

    save: Callable[[int, Any], None] | None = None
    """``save(steps done, data position)``; None: nothing is saved."""

    save_every: int = 0
    """Steps between saves; the last step is always saved."""

    _skipped: int = dataclasses.field(default=0, init=False)
    _saved: int = dataclasses.field(default=0, init=False)

    def run(self, start: int = 0) -> bool:
        """Trains from step ``start``; False: Ctrl-C ended it early.

        Raises:
          Diverged: a loss or gradient is not finite.
        """
        steps, pending = self.experiment.steps, None
        done = self._saved = start
        self.screen.training(steps, start)
        with _asked_to_stop(self.screen) as stop:
            self.meter.start()
            for step in range(start, steps):
                batch = next(self.batches)
                began_s = self.meter.clock()
                result = self.engine.step(batch, step)
                dispatch_s = self.meter.clock() - began_s
                if pending is not None:
                    self._finish(*pending)
                pending, done = (step, result, dispatch_s), step + 1
                if self._evaluates(step) or self._saves(step):
                    self._finish(*pending)
                    pending = None
                    if self._saves(step):
                        self._save(done)
                    self.meter.start()
                if stop.is_set():
                    break
            if pending is not None:
                self._finish(*pending)
            if done > self._saved:
                self._save(done)
        self.screen.close()
        return done == steps

    def _evaluates(self, step: int) -> bool:
        every = self.experiment.eval_every
        return bool(every) and (step + 1) % every == 0

    def _saves(self, step: int) -> bool:
        return bool(self.save_every) and (step + 1) % self.save_every == 0

    def _save(self, done: int) -> None:
        if self.save:
            self.save(done, self.batches.get_state())
        self._saved = done

    def _finish(self, step: int, result: Result, dispatch_s: float) -> None:
        """Waits for a step, and tells of it."""
        values = result.fetch()
        speeds = self.meter.tick(dispatch_s)
        finite, weight = values.pop("finite", 1.0), values.pop("weight", None)
        line: dict[str, float | int | None] = {"step": step, **values, **speeds}
        if self._evaluates(step):
            line |= self._evaluate(step)
        self.metrics.write(line)
        self.screen.step(line, self.experiment.steps)
        if weight == 0.0:
            raise Diverged(
                f"The batch of step {step} has weight 0: there is nothing to average "
                "over. Look at the weights that the loss returns."
            )
        self._check_finite(step, values, finite=bool(finite))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Means over the same first batches of the held-out data, each time."""
        experiment, sums, total = self.experiment, dict[str, float](), 0.0
        batches = experiment.eval_data.batches(experiment.batch_size)
        for _ in range(experiment.eval_batches):
            values = self.engine.evaluate(next(batches), step)
            weight = values.pop("weight")
            total += weight
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + weight * value
        return {f"eval_{name}": value / total for name, value in sums.items()}

    def _check_finite(
        self, step: int, values: dict[str, float], *, finite: bool
    ) -> None:
        loss, experiment = values["loss"], self.experiment
        if finite and math.isfinite(loss):
            self._skipped = 0
            return
        self._skipped += 1
        if experiment.skip_nonfinite and self._skipped < MAX_SKIPPED:
            return
        what = (
            f"loss of step {step} is {loss}"
            if not math.isfinite(loss)
            else f"gradient of step {step} is not finite (loss {loss:.4g})"
        )
        if experiment.skip_nonfinite:
            ways = (
                f"{MAX_SKIPPED} steps in a row were skipped. Try a smaller learning "
                "rate or loss_scale, or look at the data."
            )
        else:
            clip = "" if experiment.clip_norm else "--set clip_norm=1, "
            ways = (
                f"Try {clip}a smaller learning rate or a longer warm-up, --set "
                "dtype=float32, or --set skip_nonfinite=true to leave such steps out. "
                "With --save-every N a run can go on from before it."
            )
        raise Diverged(f"The {what}. {ways}")


@contextmanager
def _asked_to_stop(screen: Screen) -> Generator[threading.Event]:
    """An event that the first Ctrl-C sets; the second interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals are the main thread's
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(signum: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)
        screen.say("Stopping after this step; Ctrl-C again stops at once.")

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
