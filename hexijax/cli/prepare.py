"""What the launcher needs to know of an experiment, found in a process of its own.

    flags (stdin, JSON) -> begin -> folder, plan -> brief (a file, JSON)

Tracing imports JAX, which the launcher does not; and what is wrong with the input is
said here, once, before an island is started.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexijax.cli import flags as cli_flags
from hexijax.errors import UserError

FAULT, INTERRUPTED = 70, 130

Brief = dict[str, Any]
"""What islands are told: ``plan`` (a plan.json), ``folder``, ``resume``, ``flags``."""


class Unprepared(Exception):
    """The process has said why, and ended with ``code``."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def prepare(flags: Mapping[str, Any], islands: int) -> Brief:
    """The brief of a new run, by a process that says what it does.

    Args:
        flags: of ``flags.to_json``.
        islands: nodes are put together to so many; 0: they stay as they are.

    Raises:
      Unprepared: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "brief.json"
        words = [sys.executable, "-m", "hexijax.cli.prepare", str(file), str(islands)]
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        process = subprocess.run(
            words,
            input=json.dumps(flags),
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        if process.returncode:
            raise Unprepared(process.returncode)
        return json.loads(file.read_text())


def _prepare(flags: Mapping[str, Any], islands: int) -> Brief:
    from hexijax.cli.beginning import begin
    from hexijax.job.intake import training_facts
    from hexijax.job.screen import Screen
    from hexijax.plan import serial
    from hexijax.report import RunFolder

    arguments = cli_flags.from_json(flags)
    begun = begin(arguments, Screen(), islands=islands)
    session = begun.session
    if begun.plan is None:
        raise UserError(
            "--plan single is the plain program on one device, which no islands share. "
            "Use hexijax run, or name another plan."
        )
    found = begun.resumed or RunFolder.new(arguments.out, session.experiment.name)
    training = training_facts(session.experiment)
    return {
        "plan": serial.dumps(begun.plan, session.cluster, begun.chain, training),
        "folder": str(found.path.resolve()),
        "resume": begun.resumed is not None,
        "flags": dict(flags),
    }


def _main(file: str, islands: str) -> int:
    try:
        brief = _prepare(json.load(sys.stdin), int(islands))
    except UserError as error:
        kind = "Error" if type(error) is UserError else type(error).__name__
        print(f"{kind}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:  # 1 would read as a diverged run
        traceback.print_exc()
        return FAULT
    Path(file).write_text(json.dumps(brief))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
