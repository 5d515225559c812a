"""Figures of each step as it goes by, and of the run so far.

The clock runs from one finished step to the next and stands still in between for
evaluation and saving. Speeds of the whole run come from one figure, the median step, so
that they agree with each other and a hiccup does not move them.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hexijax.report.folder import write_atomically

WARM_UP_STEPS = 2
"""First steps left out of the speed where there are more: they load programs."""


@dataclasses.dataclass(slots=True)
class Meter:
    """Turns the moments at which steps end into speeds."""

    tokens_per_step: float
    """Tokens of the global batch."""

    flops_per_step: float
    """Of the model: recomputation and padding do not count."""

    peak_flops_per_s: float | None
    """Peaks of all devices of the plan together; None: unknown."""

    clock: Callable[[], float] = time.perf_counter
    """Seconds since some moment."""

    _since: float = dataclasses.field(default=0.0, init=False)
    _step_s: list[float] = dataclasses.field(default_factory=list, init=False)

    def start(self) -> None:
        """A step begins now; time since the last ``tick`` is not counted."""
        self._since = self.clock()

    def tick(self, at_least_s: float = 0.0) -> dict[str, float | None]:
        """A step has ended: its ``step_s``, ``tokens_per_s`` and ``mfu``.

        Where dispatch blocks, as on CPUs, a step has ended before the last one is
        ticked off: ``at_least_s``, the time of its dispatch, is then its time.
        """
        now = self.clock()
        step_s, self._since = max(now - self._since, at_least_s), now
        self._step_s.append(step_s)
        return self._speeds(step_s)

    def summary(self) -> dict[str, float | None]:
        """``measured_step_s``, ``tokens_per_s``, ``mfu``; None before any step."""
        kept = self._step_s[WARM_UP_STEPS:] or self._step_s
        if not kept:
            return {"measured_step_s": None, "tokens_per_s": None, "mfu": None}
        speeds = self._speeds(statistics.median(kept))
        return {"measured_step_s": speeds.pop("step_s"), **speeds}

    def _speeds(self, step_s: float) -> dict[str, float | None]:
        rate = 1.0 / max(step_s, 1e-9)
        peak = self.peak_flops_per_s
        return {
            "step_s": step_s,
            "tokens_per_s": self.tokens_per_step * rate,
            "mfu": self.flops_per_step * rate / peak if peak else None,
        }


class Metrics:
    """``metrics.jsonl``: a line a step, on disk when the step is over.

    A line holds ``step``, ``loss``, ``grad_norm``, ``step_s``, ``tokens_per_s``,
    ``mfu`` and the loss's own metrics; ``eval_loss`` in steps with an evaluation;
    ``skipped`` (1 or 0) where a step may be left out, and ``scale``, a dynamic loss
    scale. An
    evaluation before the first step is a line of step -1 without a ``loss``.
    Numbers that are not finite are written as text (``"nan"``): JSON has none.
    """

    def __init__(self, path: Path, *, continue_at: int = 0):
        """Opens the file; lines of ``continue_at`` and later are dropped first."""
        self._path = path
        self._open(continue_at)

    def _open(self, continue_at: int) -> None:
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.steps = self.skipped = 0
        kept = [line for line in _read(self._path) if line["step"] < continue_at]
        for line in kept:
            self._count(line)
        write_atomically(self._path, "".join(map(_render, kept)))
        self._file = self._path.open("a", buffering=1)

    def write(self, line: Mapping[str, float | int | None]) -> None:
        """Adds a step's line."""
        self._count(line)
        self._file.write(_render(line))

    def go_back(self, step: int) -> None:
        """Lines of ``step`` and later are dropped: these steps are done again."""
        self._file.close()
        self._open(step)

    def move(self, path: Path, step: int) -> None:
        """Goes on in another file, whose lines of ``step`` and later are dropped."""
        self._file.close()
        self._path = path
        self._open(step)

    def close(self) -> None:
        """Nothing is written after it."""
        self._file.close()

    def _count(self, line: Mapping[str, Any]) -> None:
        if "loss" not in line:
            return
        loss = float(line["loss"])
        if self.first_loss is None:
            self.first_loss = loss
        self.last_loss = loss
        self.steps = int(line["step"]) + 1
        self.skipped += int(line.get("skipped") or 0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, numbers that are not finite included."""
    return [
        {k: float(v) if isinstance(v, str) else v for k, v in line.items()}
        for line in _read(path)
    ]


def _read(path: Path) -> list[dict[str, Any]]:
    """The whole lines; one cut short by a crash is not one."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _render(line: Mapping[str, Any]) -> str:
    plain = {
        key: str(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in line.items()
    }
    return json.dumps(plain) + "\n"
