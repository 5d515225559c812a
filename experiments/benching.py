"""What benchmarks of several processes share: results that are kept, children, parts.

    Bench -> part(name, call) -> a child of its own -> its result -> Bench.found

Each child has its cards, compiled programs and deadline from the Bench; what a part
found is written at once, so that one that fails costs the others nothing.
"""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from hexijax.costs.hosts import host_parts

LEAST_S = 15.0
"""With less left, nothing more is begun."""


class Bench:
    """What is known so far, and how children are run.

    Args:
      name: of the results in the file, and of the file.
      command: after ``python -m experiments.``.
      out: folder of results and logs.
      seconds: for all of it.
      small: on forced CPU devices, to see that it works.
      named: arguments that every child of ``python`` gets.
    """

    def __init__(
        self,
        name: str,
        command: str,
        *,
        out: Path,
        seconds: float,
        small: bool,
        named: Sequence[str] = (),
    ):
        self.name, self.small, self._named = name, small, named
        self.out: Path = out
        self.until = time.monotonic() + seconds
        self.environment: dict[str, str] = {}
        self.rows: dict[str, Any] = {
            "what": {
                "date": datetime.date.today().isoformat(),
                "command": f"python -m experiments.{command}",
            },
            name: {"failed": {}, "seconds": {}},
        }
        self.work = Path()

    @property
    def found(self) -> dict[str, Any]:
        """The results."""
        return self.rows[self.name]

    def run(self, call: Callable[[], None], say: Callable[[Any], str]) -> None:
        """``call`` within its time; results and logs are written whatever happens."""
        jax.config.update("jax_platforms", "cpu")  # cards are the children's
        self.out.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(int(self.left_s) + 8)
        with tempfile.TemporaryDirectory() as work:
            self.work = Path(work)
            try:
                call()
            finally:
                self.keep()
                logs = [
                    f"==== {log.name}\n{log.read_text(errors='replace')[-20_000:]}"
                    for log in sorted(self.work.glob("*.log"))
                ]
                (self.out / "log.txt").write_text("\n".join(logs))
                print(say(self.rows))

    @property
    def left_s(self) -> float:
        """Until the end."""
        return self.until - time.monotonic()

    def keep(self) -> None:
        """Writes what is known."""
        path = self.out / f"{self.name}.json"
        path.write_text(json.dumps(self.rows, indent=1))

    def part(self, name: str, call: Callable[[], None]) -> None:
        """A part, which may fail."""
        began = time.monotonic()
        print(f"[{self.left_s:5.0f} s left] {name}", flush=True)
        try:
            if self.left_s < LEAST_S:
                raise TimeoutError("no time left")
            call()
        except Exception as error:  # said and kept; the other parts still run
            print(f"  failed: {error}", flush=True)
            if not isinstance(error, RuntimeError | TimeoutError):
                traceback.print_exc()
            self.found["failed"][name] = str(error)[-600:]
        self.found["seconds"][name] = round(time.monotonic() - began, 1)
        self.keep()

    def child_environment(self, cards: Sequence[int]) -> dict[str, str]:
        """Of a process that sees some cards."""
        made = {**os.environ, **self.environment}
        made |= {
            "JAX_COMPILATION_CACHE_DIR": str(self.work / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.98",
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        if self.small:
            count = f"--xla_force_host_platform_device_count={len(cards)}"
            return made | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": count}
        made.setdefault("JAX_NUM_CPU_DEVICES", str(host_parts(os.cpu_count())))
        return made | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, cards))}

    def start(self, name: str, cards: Sequence[int], *command: str) -> "Child":
        """A child, its output in the log."""
        return Child(self, name, cards, command)

    def python(self, module: str, *arguments: object) -> list[str]:
        """The command of one of our modules."""
        return [sys.executable, "-m", module, *map(str, arguments), *self._named]


class Child:
    """A process of its own group."""

    def __init__(
        self, bench: Bench, name: str, cards: Sequence[int], command: Sequence[str]
    ):
        self._bench = bench
        self.log = bench.work / f"{name.replace(' ', '_').replace(',', '')}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=bench.child_environment(cards),
                start_new_session=True,
            )

    def wait(self, most_s: float) -> str:
        """What it printed.

        Raises:
          RuntimeError: it failed, or took too long; with its last lines.
        """
        try:
            code = self._process.wait(max(1.0, min(most_s, self._bench.left_s - 10)))
            said = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            said = "too long"
        finally:
            self.stop()
        output = self.log.read_text(errors="replace")
        if said:
            raise RuntimeError(f"{said}: {output.strip()[-500:]}")
        return output

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends it and what it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _late(*_: object) -> None:
    raise TimeoutError("no time left")
