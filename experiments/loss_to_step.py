"""From the loss of a node to the first new step, with and without programs ahead.

Run:     python -m experiments.loss_to_step
Needs:   eight forced CPU devices, ten minutes of two cores
Expect:  half a minute with what was compiled ahead, minutes without

A run of eight blocks on four nodes of two devices, each step copied to a neighbour. One
node is lost as soon as the run trains, before anything was compiled ahead; in another
run, whose cache of programs is as empty at its begin, when the plan without that node
has been compiled ahead.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLUSTER = "experiments/clusters/four_nodes.toml"
DEPTH = 8
LOST = "a"

RUN = (
    *(sys.executable, "-m", "hexijax.cli.main", "run", "experiments/quickstart.py"),
    *("--cluster", CLUSTER, "--elastic", "--neighbour-every", "1"),
    *("--set", f"depth={DEPTH}", "--set", "steps=100000"),
)


def steps(folder: Path) -> int:
    """Lines of metrics so far."""
    found = list(folder.glob("*/metrics.jsonl"))
    return len(found[0].read_text(encoding="utf-8").splitlines()) if found else 0


def measure(folder: Path, *, ahead: bool) -> dict[str, object]:
    """A run that loses a node; what it said, and the seconds until it stepped again."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    out, said = folder / "runs", folder / "said.txt"
    with (
        said.open("w") as file,
        subprocess.Popen([*RUN, "--out", str(out)], stdout=file, env=environ) as run,
    ):
        try:
            while steps(out) < 3 or (
                ahead and f"without {LOST}" not in said.read_text()
            ):
                assert run.poll() is None, said.read_text()
                time.sleep(0.05)
            (members,) = out.glob("*/members.txt")
            members.write_text(f"{LOST} gone\n", encoding="utf-8")
            began_s, before = time.monotonic(), steps(out)
            while "noticed in" not in said.read_text():
                assert run.poll() is None, said.read_text()
                time.sleep(0.05)
            # The step at hand may have ended meanwhile.
            before = steps(out)
            while steps(out) <= before:
                time.sleep(0.05)
            took_s = time.monotonic() - began_s
        finally:
            run.kill()
    lines = said.read_text().splitlines()
    return {
        "ahead": ahead,
        "from loss to step, s": round(took_s, 1),
        "said": [line for line in lines if "noticed in" in line or "ahead in" in line],
    }


def main() -> None:
    """Both, a line of JSON each."""
    for ahead in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), ahead=ahead)), flush=True)


if __name__ == "__main__":
    main()
