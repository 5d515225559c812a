"""From nothing to the first step: profile, plan, first launch, second launch.

Run:     python -m experiments.bench_cold --out FOLDER
         (--small, to see that it works, takes two forced CPU devices)
Needs:   two H200, OR-Tools for the plan (else --plan FILE); five minutes
Expect:  docs/performance.md

Every part is the `hexijax` command in a process of its own, timed from its start with
empty caches: of JAX's compiled programs, of CUDA's kernels. The launches share theirs,
which the first finds empty; the profile has its own. A launch's first step has ended
when its first line is in metrics.jsonl; the second launch is watched (--trace), and its
trace.json is kept. With ``--list`` and ``--name`` a listed plan is launched, too.
"""

import argparse
import dataclasses
import functools
import json
import shutil
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benching import Bench
from experiments.cold.table import summary
from experiments.predicted.cells import CLUSTERS, cell
from experiments.predicted.listing import read_list
from hexijax.plan import text

PARTS = ("profile", "plan", "first", "second", "listed")

MOST_S = {"profile": 330.0, "plan": 120.0, "first": 240.0, "second": 120.0}
"""Of each part; 240 of a listed plan."""

A_CARD = {"llama": 16, "small": 4}
"""Sequences of a card and step."""

STEPS = 8
"""Of a launch."""

OWN = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
"""What `hexijax` sets, or leaves, by itself."""

EXPERIMENTS = {
    "llama": "experiments/llama_1b.py",
    "small": "experiments/predicted/small.py",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cold:
    """One machine's cold start."""

    bench: Bench
    """Where figures go."""

    name: str
    """Of the cell."""

    @property
    def profile(self) -> Path:
        """What is measured first."""
        return self.bench.out / "profile.toml"

    def command(self, cache: str, verb: str, *arguments: object) -> list[str]:
        """A `hexijax` command with a cache folder of its own."""
        folder = self.bench.work / cache
        return [
            "env",
            *(word for name in OWN for word in ("-u", name)),
            f"XDG_CACHE_HOME={folder}",
            f"CUDA_CACHE_PATH={folder / 'cuda'}",
            *self.bench.python("hexijax.cli.main", verb, EXPERIMENTS[self.name]),
            *("--cluster", str(CLUSTERS / cell(self.name).cluster)),
            *map(str, arguments),
        ]

    def timed(self, part: str, *command: str, most_s: float) -> float:
        """Seconds of a command from its start to its end."""
        began = time.perf_counter()
        self.bench.start(part, [0, 1], *command).wait(most_s)
        return time.perf_counter() - began


def profile(cold: Cold) -> None:
    """`hexijax profile`, with the sizes it takes by itself."""
    command = cold.command("profiled", "profile", "--out", cold.profile)
    took_s = cold.timed("profile", *command, most_s=MOST_S["profile"])
    cold.bench.found["profile_s"] = took_s


def plan(cold: Cold) -> None:
    """`hexijax plan`: from its start to the plan, its pictures and its words."""
    figures = cold.bench.work / "plan.json"
    command = cold.command(
        "planned",
        "plan",
        *("--profile", cold.profile, "--json", figures),
        *("--out", cold.bench.work / "plans"),
        *("--set", f"batch_size={2 * A_CARD[cold.name]}"),
    )
    took_s = cold.timed("plan", *command, most_s=MOST_S["plan"])
    searched_s = json.loads(figures.read_text())["search_s"]
    cold.bench.found.update(plan_s=took_s, search_s=searched_s)
    (made,) = (cold.bench.work / "plans").glob("*/plan.txt")
    shutil.copy(made, cold.bench.out / "plan.txt")


def launch(
    cold: Cold, part: str, file: Path, batch_size: int, *, traced: bool, most_s: float
) -> None:
    """`hexijax run`: its first step, and what it says of the others."""
    runs = cold.bench.work / f"runs {part}"
    command = cold.command(
        "launched",
        "run",
        *("--plan", file, "--no-save", "--out", runs),
        *(("--profile", cold.profile) if cold.profile.is_file() else ()),
        *("--set", f"batch_size={batch_size}", "--set", f"steps={STEPS}"),
        *(("--trace",) if traced else ()),
    )
    began = time.perf_counter()
    child = cold.bench.start(part, [0, 1], *command)
    first_s = None
    try:
        while child.running and time.perf_counter() - began < most_s:
            lines = [path.stat().st_size for path in runs.glob("*/metrics.jsonl")]
            if any(lines):
                first_s = time.perf_counter() - began
                break
            time.sleep(0.05)
        child.wait(most_s)
    finally:
        child.stop()
        row: dict[str, Any] = {"first_step_s": first_s}
        row["whole_s"] = time.perf_counter() - began
        for path in runs.glob("*/report.json"):
            report = json.loads(path.read_text())
            row["step_s"] = report["measured_step_s"]
            prediction = report.get("prediction") or {}
            row["predicted_s"] = prediction.get("predicted_step_s")
        for path in runs.glob("*/trace.json"):
            shutil.copy(path, cold.bench.out / f"trace_{part}.json")
        cold.bench.found[part] = row


def cold_start(
    cold: Cold, parts: Sequence[str], given: Path | None, listed: Path, name: str
) -> None:
    """The parts asked for, one after another."""
    batch_size = 2 * A_CARD[cold.name]
    file = given or cold.bench.out / "plan.txt"

    def again(part: str, *, traced: bool) -> None:
        launch(cold, part, file, batch_size, traced=traced, most_s=MOST_S[part])

    def of_the_list() -> None:
        chosen = read_list(listed).promises[name].plan
        at = cold.bench.work / "listed.plan.txt"
        at.write_text(text.render(chosen))
        launch(cold, "listed", at, chosen.batch_size, traced=True, most_s=240)

    todo: Mapping[str, Callable[[], None]] = {
        "profile": functools.partial(profile, cold),
        "plan": functools.partial(plan, cold),
        "first": functools.partial(again, "first", traced=False),
        "second": functools.partial(again, "second", traced=True),
        "listed": of_the_list,
    }
    for part in parts:
        cold.bench.part(part, todo[part])


def measured_on(profile: Path) -> dict[str, str]:
    """Card and version of JAX, as a profile file has them."""
    (about,) = tomllib.loads(profile.read_text())["measured"].values()
    return {name: about[name] for name in ("card", "jax")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--plan", type=Path, help="a plan.txt to launch")
    parser.add_argument("--profile", type=Path, help="one that was measured before")
    parser.add_argument("--list", type=Path, help="of experiments.predicted_plans")
    parser.add_argument("--name", default="pipeline 1", help="of a plan in it")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_cold"))
    args = parser.parse_args()
    bench = Bench(
        "cold",
        f"bench_cold --parts {' '.join(args.parts)}",
        out=args.out,
        seconds=args.seconds,
        small=args.small,
    )
    bench.rows["what"]["cards"] = 2
    cold = Cold(bench=bench, name="small" if args.small else "llama")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.profile and args.profile.resolve() != cold.profile.resolve():
        shutil.copy(args.profile, cold.profile)

    def call() -> None:
        cold_start(cold, args.parts, args.plan, args.list, args.name)
        if cold.profile.is_file():
            bench.rows["what"].update(measured_on(cold.profile))

    bench.run(call, summary)


if __name__ == "__main__":
    main()
