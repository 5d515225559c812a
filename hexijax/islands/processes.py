"""An island as a process of this machine: started, logged, ended with all it started.

    start(name, command, log) -> Started: poll, end;   its lines -> log, tell

Each has a session of its own, so that Ctrl-C at a terminal reaches the launcher alone,
and so that what an island starts ends with it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

PARENT = "HEXIJAX_LAUNCHER_PID"
"""The environment variable by which a process knows who started it here."""

_PR_SET_PDEATHSIG = 1
_LAST_LINES = 12


class Process(Protocol):
    """A started island."""

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        ...

    def ended(self) -> str:
        """How, where more is known than its exit code says; else empty."""
        ...

    def signal(self, number: int) -> None:
        """Sends a signal to it and all it started."""
        ...

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within ``seconds``."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...

    def last_lines(self) -> str:
        """The end of its log."""
        ...


class Started:
    """A process of ours."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environ: Mapping[str, str],
        secret: str = "",
        tell: Callable[[str, str], None] = lambda name, line: None,
    ):
        """
        Args:
          name: of the island.
          command: its words.
          log: takes its lines; what stands there stays.
          environ: beside this process's own environment.
          secret: the first line of what it reads; empty: it reads nothing.
          tell: takes (name, line), from a thread.
        """
        self.name, self.log = name, log
        self._tell = tell
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environ, PARENT: str(os.getpid())},
            stdin=subprocess.PIPE if secret else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if secret:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError), self._process.stdin as pipe:
                pipe.write(f"{secret}\n".encode())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, -N after signal N; None: it runs."""
        return self._process.poll()

    def ended(self) -> str:
        """How, where more is known than its exit code says; else empty."""
        return ""

    def signal(self, number: int) -> None:
        """Sends a signal to it and all it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within ``seconds``; then all it said is in its log."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self.signal(signal.SIGKILL)  # what it started and left
        self._reader.join(2.0)
        return True

    def kill(self) -> None:
        """Ends it at once, stopped or not."""
        self.signal(signal.SIGKILL)
        self.wait(10.0)

    def last_lines(self) -> str:
        """The end of its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self.log.open("ab") as log, self._process.stdout as pipe:
            for line in pipe:
                log.write(line)
                log.flush()
                self._tell(self.name, line.decode(errors="replace").rstrip("\n"))


def end_with_launcher() -> None:
    """In an island: the system ends it when the process that started it is gone.

    Only where that is a launcher of this machine, and on Linux; elsewhere an island
    ends because nobody is at the rendezvous any more.
    """
    parent = os.environ.get(PARENT)
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it went before we asked
        print(
            f"The launcher (process {parent}) is not what started this island (process "
            f"{os.getppid()}): it has gone, or its Python is a script that does not "
            "`exec`.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(3)


def ended_how(code: int) -> str:
    """What an exit code says of an end nobody asked for."""
    if code >= 0:
        return f"it ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it was killed by signal {-code}"
