"""What a person sees of a run: a bar on a terminal, plain lines in a pipe."""

import logging
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 5.0
"""Least time between two plain lines."""


class Screen:
    """Messages and progress; one thing is in progress at a time."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)
        self._live = self.console.is_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._what, self._printed_at, self._start = "", 0.0, 0

    def say(self, text: str) -> None:
        """Prints ``text`` as it is, above the bar."""
        if self._live:
            self.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def compiling(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` programs are compiled; the engine calls it."""
        if what != self._what:
            self._begin(what, total, "", f"{what}: {total}")
        if self._progress:
            self._progress.update(self._task, completed=done, total=total)
        if done >= total:
            self.close()

    def training(self, steps: int, start: int) -> None:
        """Steps follow, from ``start``."""
        self._start = start
        self._begin("training", steps, "", f"training: {steps - start} steps")
        if self._progress:
            self._progress.update(self._task, completed=start)

    def step(self, line: Mapping[str, float | int | None], steps: int) -> None:
        """A step has ended, with these metrics."""
        done = int(line["step"] or 0) + 1
        if "loss" not in line:  # an evaluation before the first step
            self.say(f"step {done}  held-out loss {_show(line['eval_loss'], '.4f')}")
            return
        parts = [f"loss {_show(line['loss'], '.4f')}"]
        parts += [f"{_show(line['tokens_per_s'], ',.0f')} tokens/s"]
        if "eval_loss" in line:
            parts += [f"held-out loss {_show(line['eval_loss'], '.4f')}"]
        if line.get("skipped"):
            parts += ["skipped"]
        text = "  ".join(parts)
        if self._progress:
            self._progress.update(self._task, completed=done, figures=text)
            if "eval_loss" in line:
                self.say(f"step {done}  {text}")
            return
        now = time.monotonic()
        due = now - self._printed_at >= PLAIN_EVERY_S
        if due or done in (1, steps) or "eval_loss" in line:
            self._printed_at = now
            left_s = (steps - done) * (line["step_s"] or 0.0)
            # The first step loads programs: it says nothing of the next ones.
            left = "" if done == self._start + 1 else f"  {_duration(left_s)} left"
            self.say(f"step {done}/{steps}  {text}{left}")

    def close(self) -> None:
        """Takes the bar away."""
        if self._progress:
            self._progress.stop()
        self._progress, self._what = None, ""

    def _begin(self, what: str, total: int, figures: str, plain: str) -> None:
        self.close()
        self._what, self._printed_at = what, 0.0
        if not self._live:
            self.say(plain)
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self._task = self._progress.add_task(what, total=total, figures=figures)
        self._progress.start()


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    )


class Quiet:
    """Shows nothing; what is worth a line goes to the log ``hexijax``."""

    def say(self, text: str) -> None:
        """Logs it."""
        logging.getLogger("hexijax").info("%s", text)

    def training(self, steps: int, start: int) -> None:
        """Steps follow."""

    def step(self, line: Mapping[str, float | int | None], steps: int) -> None:
        """A step has ended."""

    def close(self) -> None:
        """No more steps follow."""
