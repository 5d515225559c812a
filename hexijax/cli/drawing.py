"""A plan's pictures, drawn by a process of their own while this one is at work.

    Drawing() --Judged, by a pipe--> its process --PNG by name--> pictures()

matplotlib takes a second to load and another to draw four pictures. Where it is loaded
already, or the process fails, they are drawn here.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Self

from hexijax.report.judged import Judged

_DRAWS = "hexijax.report.pictures"


class Drawing:
    """Draws one plan."""

    def __init__(self) -> None:
        self._process = None if _DRAWS in sys.modules else _start()
        self._judged: Judged | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: Any) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def begin(self, judged: Judged) -> None:
        """The plan that is drawn."""
        self._judged = judged
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # it died, which pictures() finds out
                pickle.dump(judged, self._process.stdin)
                self._process.stdin.flush()

    def pictures(self) -> Mapping[str, bytes]:
        """Waits for them."""
        assert self._judged is not None, "begin first"
        if self._process is not None:
            assert self._process.stdout is not None
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                return pickle.load(self._process.stdout)
        from hexijax.report.pictures import draw

        return draw(self._judged)


def _start() -> "subprocess.Popen[bytes] | None":
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "hexijax.cli.drawing"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except OSError:
        return None


def _main() -> None:
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but pictures goes out
    from hexijax.report.pictures import draw

    pickle.dump(draw(pickle.load(stdin)), stdout)


if __name__ == "__main__":
    _main()
