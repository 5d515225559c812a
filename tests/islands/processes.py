"""Islands as processes of this machine, for tests that need real ones."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.islands.cases import cluster

ROOT = Path(__file__).parents[2]


class Islands:
    """Running workers, by name."""

    def __init__(self, workers: Mapping[str, "subprocess.Popen[str]"]):
        self.workers = workers

    def tell(self, **task: Any) -> None:
        """The same task to all."""
        self.tell_some(list(self.workers), **task)

    def tell_some(self, names: Sequence[str], **task: Any) -> None:
        """And to some."""
        for worker in map(self.workers.__getitem__, names):
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(task) + "\n")
            worker.stdin.flush()

    def hear(self, name: str) -> Any:
        """What one says next; arrays as arrays.

        Raises:
          EOFError: it has died.
        """
        stdout = self.workers[name].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise EOFError(name)
        said = json.loads(line)
        if isinstance(said, dict) and "file" in said:
            with np.load(said.pop("file")) as arrays:
                said |= dict(arrays)
        return said

    def all(self, **task: Any) -> dict[str, Any]:
        """What each says to a task."""
        self.tell(**task)
        return {name: self.hear(name) for name in self.workers}

    def send(self, name: str, number: signal.Signals) -> None:
        """A signal to one."""
        self.workers[name].send_signal(number)


@contextlib.contextmanager
def islands(
    count: int,
    folder: Path,
    *,
    pull_s: float = 120.0,
    python: Mapping[str, str] | None = None,
) -> Iterator[Islands]:
    """Workers that know of each other; none outlives the block.

    Args:
      count: how many, see ``cases.cluster``.
      folder: for arrays that they hand over.
      pull_s: how long each waits for another.
      python: interpreters of some of them.
    """
    key = secrets.token_hex(16)
    environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    if "XLA_FLAGS" in os.environ:
        flags = os.environ["XLA_FLAGS"].split()
        environ["XLA_FLAGS"] = " ".join(f for f in flags if "fusion_emitters" not in f)
    workers: dict[str, subprocess.Popen[str]] = {}
    try:
        for name in cluster(count).islands:
            given = {
                "island": name,
                "count": count,
                "key": key,
                "pull_s": pull_s,
                "folder": str(folder),
            }
            program = (python or {}).get(name, sys.executable)
            own = environ if program != sys.executable else dict(os.environ)
            workers[name] = subprocess.Popen(
                [program, "-m", "tests.islands.worker", json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=own,
            )
        made = Islands(workers)
        addresses = {name: made.hear(name) for name in workers}
        for name, worker in workers.items():
            assert worker.stdin is not None
            others = {k: v for k, v in addresses.items() if k != name}
            worker.stdin.write(json.dumps(others) + "\n")
            worker.stdin.flush()
        yield made
    finally:
        for worker in workers.values():
            worker.kill()
        for worker in workers.values():
            worker.communicate()
