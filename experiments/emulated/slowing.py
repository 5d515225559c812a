"""Equal cards made unlike, for as long as a ``with`` lasts: NVIDIA MPS and holders.

    with mps(folder) as environment, holding([...], environment): ...

No clock, power, MIG or compute mode is touched. What was started is stopped, whatever
happens inside.
"""

import contextlib
import dataclasses
import os
import select
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

SLOW_CARD = Path(__file__).parents[1] / "peers" / "slow_card.py"

STARTING_S = 60.0
"""Within which a holder must hold."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """What is kept of a card."""

    card: int
    """Its number, as CUDA counts."""

    multiprocessors: int = 0
    """That spin."""

    keep_gib: float | None = None
    """Memory that stays free; None: all."""


@contextlib.contextmanager
def mps(folder: Path) -> Generator[Mapping[str, str]]:
    """NVIDIA MPS for what runs with the environment it gives; empty if there is none.

    Without it, programs take turns on a card.
    """
    pipes = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps" / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps" / "log"),
    }
    for path in pipes.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **pipes}
    control = "nvidia-cuda-mps-control"
    try:
        subprocess.run([control, "-d"], env=environment, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MPS: {error}", flush=True)
        yield {}
        return
    try:
        yield pipes
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [control], input="quit\n", text=True, env=environment, timeout=30
            )


@contextlib.contextmanager
def holding(
    holds: Sequence[Hold], environment: Mapping[str, str], seconds: float
) -> Generator[list[str]]:
    """Parts of cards held; gives what each holder said.

    Raises:
      RuntimeError: a holder did not come to hold.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        for hold in holds:
            keep = [] if hold.keep_gib is None else ["--keep-gib", str(hold.keep_gib)]
            command = [
                *(sys.executable, str(SLOW_CARD), str(hold.card)),
                *("--hold", str(hold.multiprocessors), "--seconds", str(seconds)),
                *keep,
            ]
            started.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, **environment},
                )
            )
        yield [_said(process) for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _said(process: subprocess.Popen[str]) -> str:
    """The line that says it holds."""
    assert process.stdout
    lines: list[str] = []
    until = time.monotonic() + STARTING_S
    while (left_s := until - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left_s)[0]:
            break
        line = process.stdout.readline()
        lines.append(line.strip())
        if line.startswith("holding"):
            return lines[-1]
        if not line:
            break
    raise RuntimeError(f"a holder did not come to hold: {' '.join(lines)[-400:]}")
