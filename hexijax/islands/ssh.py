"""Commands on other hosts, by ssh: whatever `ssh HOST` reaches without a question.

    run(host, words, secret) -> its output         a question to a host
    Remote(name, host, words, ...) -> Started      an island there

A secret goes in by the first line of standard input, never by a command line, which
everybody on the host can read.
"""

import contextlib
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from hexijax.errors import UserError
from hexijax.islands.processes import Started
from hexijax.islands.wire import TOKEN, family

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""BatchMode: it fails where it would ask."""


_NO_CODE = 255
"""What ssh ends with where there is no exit code: after a signal there, too."""


class Remote(Started):
    """An island on another host."""

    def __init__(
        self,
        name: str,
        host: str,
        words: Sequence[str],
        *,
        folder: str,
        token: str,
        log: Path,
        process: Callable[[], int | None],
        tell: Callable[[str, str], None],
    ):
        """
        Args:
          name: of the island.
          host: as ssh knows it.
          words: of its command there.
          folder: there, where it is started.
          token: of the run.
          log: here, takes its lines.
          process: gives its number there, once it is known.
          tell: takes (name, line).
        """
        self._host, self._there = _plain(host), process
        command = [*SSH, host, script(words, folder=folder, secret=TOKEN)]
        super().__init__(name, command, log=log, environ={}, secret=token, tell=tell)

    def poll(self) -> int | None:
        """Its exit code, -9 if it has none; None: it runs."""
        code = super().poll()
        return -signal.SIGKILL if code == _NO_CODE else code

    def ended(self) -> str:
        """How, where ssh has no exit code; else empty."""
        if super().poll() != _NO_CODE:
            return ""
        return (
            f"ssh {self._host} ended without an exit code: it was killed there, or "
            "there is no connection"
        )

    def kill(self) -> None:
        """Ends it at once there, stopped or not, and here."""
        pid = self._there()
        if pid is not None and self.poll() is None:
            words = f"kill -KILL -{pid} 2>/dev/null || kill -KILL {pid}"
            command = [*SSH, self._host, words]
            # If it fails: it ends when it finds that nobody is at the rendezvous.
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=15.0)
        super().kill()

    def signal(self, number: int) -> None:
        """SIGKILL, here alone: ssh hands none on, and while it lives ``kill`` knows
        that the island does."""
        if number == signal.SIGKILL:
            super().signal(number)


def script(words: Sequence[str], *, folder: str, secret: str = "") -> str:
    """A line for a host's shell that runs ``words`` in ``folder``, with the first line
    that it reads in the variable ``secret``."""
    take = f"IFS= read -r {secret} && export {secret} && " if secret else ""
    return f"cd {shlex.quote(folder)} && {take}exec {shlex.join(words)}"


def run(
    host: str, words: Sequence[str], *, folder: str, secret: str = "", seconds: float
) -> str:
    """What a command says on a host.

    Raises:
      UserError: it cannot be reached, or the command failed.
    """
    line = script(words, folder=folder, secret=TOKEN if secret else "")
    try:
        done = subprocess.run(
            [*SSH, _plain(host), line],
            input=f"{secret}\n" if secret else "",
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except FileNotFoundError as error:
        raise UserError("There is no ssh here; install OpenSSH's client.") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{host} did not answer within {seconds:g} s ({shlex.join(words)})."
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(
            f"{host}: `{shlex.join(words)}` in {folder} failed: "
            f"{said[-1] if said else f'exit code {done.returncode}'}. ssh {host} must "
            "work without a question, and hexijax must be there, in the same folder: "
            "--folder and --python name others."
        )
    return done.stdout


def _plain(host: str) -> str:
    """A host, and no flag of ssh, which may run a command here.

    Raises:
      UserError: it begins as a flag does.
    """
    if host.startswith("-"):
        raise UserError(
            f"{host!r} is no host: ssh would take it for a flag. Name hosts as in "
            "`ssh HOST`."
        )
    return host


def address_of(host: str) -> str:
    """The IP address behind what ssh calls a host; version 4 where it has both.

    Raises:
      UserError: there is none.
    """
    try:
        asked = subprocess.run(
            ["ssh", "-G", _plain(host)], capture_output=True, text=True, timeout=10.0
        )
        lines = dict(x.split(" ", 1) for x in asked.stdout.splitlines() if " " in x)
        name = lines.get("hostname", host.rpartition("@")[2]).strip("[]")
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return str(min(found, key=lambda x: x[0] != socket.AF_INET)[4][0])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"No address is known of {host!r} ({error}). Give it one in ~/.ssh/config."
        ) from error


def own_address(towards: str) -> str:
    """This machine's address, as a machine at another one would use it."""
    with socket.socket(family(towards), socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
