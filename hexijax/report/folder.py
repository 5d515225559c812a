"""The folder of one run: ``runs/<name>-<number>/``.

plan.txt, plan.json    what was run
temps.json             what its programs took when compiled, for later plans' promises
metrics.jsonl          a line a step
report.json            the whole in figures
checkpoints/<step>/    the last, and others if asked for
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from hexijax.costs.temp import Temps
from hexijax.errors import UserError

TEMPS = "temps.json"


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's files."""

    path: Path
    """The folder."""

    @classmethod
    def new(cls, out: Path, name: str) -> "RunFolder":
        """A new folder in ``out``, numbered one past the last of that name."""
        try:
            out.mkdir(parents=True, exist_ok=True)
            number = max(map(_number, _runs(out, name)), default=0)
            while True:  # another run may take the number meanwhile
                number += 1
                path = out / f"{name}-{number:03d}"
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                return cls(path)
        except OSError as error:
            raise UserError(
                f"The run folder cannot be made in {out}: {error.strerror}. Name a "
                "folder that can be written: --out DIR."
            ) from error

    @classmethod
    def find(cls, out: Path, name: str, run: str | None) -> "RunFolder":
        """The run to resume: ``run``, a path or a name in ``out``; None: the last.

        Raises:
          UserError: there is none with a checkpoint.
        """
        if run is not None:
            for path in (Path(run), out / run):
                if path.is_dir():
                    return cls(path)
            raise UserError(
                f"--resume {run}: there is no such run (looked for {Path(run)} and "
                f"{out / run})."
            )
        runs = sorted(_runs(out, name), key=_number, reverse=True)
        for path in runs:
            if (path / "checkpoints").is_dir():
                return cls(path)
        raise UserError(
            f"--resume: {len(runs)} runs named {name!r} are in {out}, none with a "
            "checkpoint. Runs write one at their end, unless told --no-save."
        )

    @property
    def plan_text(self) -> Path:
        """The plan for people."""
        return self.path / "plan.txt"

    @property
    def plan_json(self) -> Path:
        """The plan with its cluster and chain."""
        return self.path / "plan.json"

    @property
    def temps(self) -> Path:
        """What the plan's compiled programs have alive within."""
        return self.path / TEMPS

    @property
    def metrics(self) -> Path:
        """A line a step."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The run in figures."""
        return self.path / "report.json"

    @property
    def checkpoints(self) -> Path:
        """A folder a saved step."""
        return self.path / "checkpoints"


def write_atomically(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Writes the file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            unfinished.unlink()


def write_json(path: Path, data: Any) -> None:
    """Writes ``data`` as JSON, whole or not at all."""
    write_atomically(path, json.dumps(data, indent=2) + "\n")


def temps_beside(plan: Path) -> Temps:
    """What the programs of a plan's run took; nothing, where it never ran."""
    file = plan.with_name(TEMPS)
    if not file.is_file():
        return Temps()
    try:
        return Temps.from_json(json.loads(file.read_text()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{file} is not what a run writes beside its plan ({error}). Delete it: "
            "promises then follow from the model again."
        ) from error


def _runs(out: Path, name: str) -> list[Path]:
    """The numbered folders of that name."""
    found = out.glob(f"{name}-*") if out.is_dir() else ()
    return [p for p in found if p.name.removeprefix(f"{name}-").isdigit()]


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
