"""What the emulated benchmarks share: results that are kept, children, and each part.

Bench -> part(name, call) -> a child of its own -> its result -> Bench.found
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.emulated import plans, predicting
from experiments.emulated.cards import SETTINGS, Setting
from experiments.emulated.summary import summary
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan import text
from hexijax.plan.plan import Plan

PEERS = {
    "FSDP2, no checkpointing": ("none", 2),
    "FSDP2, full checkpointing": ("full", 4),
}
"""Remat and microbatch of what PyTorch runs."""

TRACED = ("ours", "layered accumulation")
"""Plans whose copies are looked at beside their kernels."""

MOST_S = 170.0
"""For one plan, compiled and run."""

LEAST_S = 15.0
"""With less left, nothing more is begun."""


class Bench:
    """What is known so far, and how children are run."""

    def __init__(self, args: argparse.Namespace, work: Path, command: str):
        self.setting: Setting = SETTINGS[args.setting]
        self.small: bool = args.setting == "small"
        self._named = ["--setting", args.setting]
        self.out: Path = args.out
        self.work = work
        self.until = time.monotonic() + args.seconds
        self.environment: dict[str, str] = {}
        self.rows: dict[str, Any] = {
            "what": {
                "date": datetime.date.today().isoformat(),
                "command": f"python -m experiments.{command}",
            },
            "emulated": {"failed": {}, "seconds": {}},
        }
        self.found["cards"] = [
            {
                "kind": card.kind,
                "held": card.hold.multiprocessors,
                "keep_gib": card.memory_gib,
            }
            for card in self.setting.cards
        ]

    @property
    def found(self) -> dict[str, Any]:
        """The results."""
        return self.rows["emulated"]

    @property
    def left_s(self) -> float:
        """Until the end."""
        return self.until - time.monotonic()

    def keep(self) -> None:
        """Writes what is known."""
        path = self.out / "emulated.json"
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


def check(bench: Bench, cards: Sequence[int]) -> dict[str, Any]:
    """Products and links of some cards as they are held."""
    result = bench.work / "check.json"
    command = bench.python("experiments.emulated.checking", result)
    bench.start("check", cards, *command).wait(90)
    found: dict[str, Any] = json.loads(result.read_text())
    for name in ("card", "cards", "jax", "python"):
        bench.rows["what"][name] = found.pop(name)
    return found


def alone(bench: Bench, chain: Path, at: Mapping[int, int] | None = None) -> None:
    """All cards at once, each in a process that sees no other.

    ``at``: some of them only, and on which card each is.
    """
    count = len(bench.setting.cards)
    children: dict[int, tuple[Path, Child]] = {}
    for number, card in (at or {i: i for i in range(count)}).items():
        result = bench.work / f"alone{number}.json"
        command = bench.python("experiments.emulated.alone", number, chain, result)
        child = bench.start(f"alone {number}", [card], *command)
        children[number] = (result, child)
    found: list[Any] = bench.found.setdefault("alone", [{} for _ in range(count)])
    try:
        for number, (result, child) in children.items():
            try:
                child.wait(240)
            except RuntimeError as error:
                bench.found["failed"][f"alone {number}"] = str(error)
            found[number] = json.loads(result.read_text()) if result.exists() else {}
    finally:
        for _, child in children.values():
            child.stop()


def measured_cluster(bench: Bench) -> Cluster:
    """The cluster with what was measured of it."""
    alone = bench.found.get("alone", [])
    check = bench.found.get("check", {})
    rows = {
        kind: alone[number].get("rows", ())
        for kind, number in bench.setting.first_of_kind.items()
        if number < len(alone)
    }
    link, host = None, 46.0
    if check:
        rates = sorted(check["link_bytes_per_s"].values())
        if rates:
            link = {
                "latency_us": round(check["link_latency_s"] * 1e6, 1),
                "bandwidth_gb_per_s": round(rates[len(rates) // 2] / 1e9, 1),
            }
        host = round(check["host_bytes_per_s"] / 1e9, 1)
    return bench.setting.cluster(rows, link, host)


def run_plan(
    bench: Bench,
    name: str,
    plan: Plan,
    files: tuple[Path, Path],
    *,
    cards: Sequence[int] | None = None,
    steps: int | None = None,
) -> "Child":
    """Starts a plan; its result will lie where ``result_of`` reads it."""
    stem = bench.work / name.replace(" ", "_").replace(",", "")
    stem.with_suffix(".plan.txt").write_text(text.render(plan))
    command = bench.python(
        "experiments.emulated.running",
        *(stem.with_suffix(".plan.txt"), *files, stem.with_suffix(".json")),
        *("--steps", steps or bench.setting.steps),
        *(("--trace", stem) if name in TRACED else ("--brief",)),
    )
    every = range(len(bench.setting.cards))
    return bench.start(name, every if cards is None else cards, *command)


def result_of(bench: Bench, name: str) -> dict[str, Any]:
    """What a plan's process has written; empty if nothing."""
    path = (bench.work / name.replace(" ", "_").replace(",", "")).with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else {}


def measure_plan(
    bench: Bench, name: str, plan: Plan, chain: Chain, cluster: Cluster, files: Any
) -> None:
    """One plan: what was predicted, and what was measured."""
    rows = bench.found.setdefault("plans", {})
    for other, seen in rows.items():
        if seen.get("plan") == text.render(plan):
            rows[name] = {"same_as": other}
            return
    row: dict[str, Any] = {"plan": text.render(plan)}
    rows[name] = row
    row |= predicting.predicted(plan, chain, cluster)
    try:
        run_plan(bench, name, plan, files).wait(MOST_S)
    finally:
        row |= result_of(bench, name)


def flat_memory(bench: Bench, chain: Chain, cluster: Cluster, files: Any) -> None:
    """Peaks with 4 and with 32 microbatches, side by side on the first card: each
    process counts its own."""
    setting = bench.setting
    children: dict[str, Child] = {}
    for count in (4, 32):
        plan = plans.flat(setting, chain, setting.devices[0], count)
        name = f"{count} microbatches"
        promised = predicting.promised(plan, chain, cluster)
        bench.found.setdefault("memory", {})[name] = {"promised_bytes": promised}
        children[name] = run_plan(bench, name, plan, files, cards=[0], steps=2)
    for name, child in children.items():
        try:
            child.wait(MOST_S)
        except RuntimeError as error:
            bench.found["failed"][name] = str(error)
        bench.found["memory"][name] |= result_of(bench, name)


def peer(bench: Bench, name: str, command: Sequence[str]) -> None:
    """A command of another's that says ``tokens_per_s=``."""
    cards = range(len(bench.setting.cards))
    output = bench.start(name, cards, *command).wait(200)
    line = next(x for x in output.splitlines()[::-1] if "tokens_per_s=" in x)
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    bench.found.setdefault("peers", {})[name] = {
        "line": line,
        "tokens_per_s": float(words["tokens_per_s"]),
    }


def torch_command(bench: Bench, script: str, *arguments: object) -> list[str]:
    """``script`` on all cards by torchrun."""
    count = str(len(bench.setting.cards))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", count]
    return [sys.executable, *launcher, script, *map(str, arguments)]


def peers(bench: Bench, commands: Mapping[str, list[str]]) -> None:
    """Other programs by name, each on all cards."""
    for name, command in commands.items():
        if not bench.small:
            bench.part(name, functools.partial(peer, bench, name, command))


def given_peers(bench: Bench, others: Sequence[str]) -> dict[str, list[str]]:
    """What the command line names."""
    return {
        Path(words.split()[0]).name: torch_command(bench, *words.split())
        for words in others
    }


def fsdp(bench: Bench) -> dict[str, list[str]]:
    """PyTorch's FSDP2, equal batches on all cards."""
    a_card = bench.setting.batch_size // len(bench.setting.cards)
    script = str(Path(__file__).parents[1] / "peers" / "torch_fsdp.py")
    found: dict[str, list[str]] = {}
    for name, (remat, size) in PEERS.items():
        counts = ("--microbatch", size, "--microbatches", a_card // size)
        found[name] = torch_command(bench, script, *counts, "--remat", remat)
    return found


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """What every one of these commands takes."""
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--setting", choices=SETTINGS, default="four")
    parser.add_argument("--out", type=Path, default=Path("runs") / out)


def run_bench(
    args: argparse.Namespace, command: str, call: Callable[[Bench], None]
) -> None:
    """``call`` within its time; results and logs are written whatever happens."""
    jax.config.update("jax_platforms", "cpu")  # cards are the children's
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(int(args.seconds) + 8)
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, Path(work), command)
        try:
            call(bench)
        finally:
            bench.keep()
            logs = [
                f"==== {log.name}\n{log.read_text(errors='replace')[-20_000:]}"
                for log in sorted(bench.work.glob("*.log"))
            ]
            (args.out / "log.txt").write_text("\n".join(logs))
            print(summary(bench.rows))


def _late(*_: object) -> None:
    raise TimeoutError("no time left")
