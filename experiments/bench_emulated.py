"""Four equal cards made unlike: our plan beside its bound, its variants and FSDP2.

Run:     python -m experiments.bench_emulated --out FOLDER
         (--small, to see that it works, takes forced CPU devices, none of them slowed)
Needs:   4 Hopper cards of one host with NVIDIA MPS, CuPy; PyTorch for the peer; 10 min
Expect:  docs/performance.md

Speeds are 1 : 0.54 : 0.28 : 1. Multiprocessors of two cards are held, then memory of
all until 80, 40, 24 and 80 GiB are free (experiments/peers/slow_card.py). Each card is
measured alone, uncapped: the bound is the sum of their rates. Its layers' times go into
a cluster, from which the plan is made and its step predicted. Every plan runs in a
process of its own. What fails or finds no time left is said; the rest goes on.
"""

import argparse
import contextlib
import dataclasses
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

from experiments.bench_llama import make_chain
from experiments.emulated import plans, predicting
from experiments.emulated.cards import Setting, setting
from experiments.emulated.slowing import Hold, holding, mps
from experiments.emulated.summary import summary
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan import text
from hexijax.plan.plan import Plan

FIRST = ("check", "alone")
THEN = ("ours", "peers", "even", "memory", "layered", "fsdp")
"""Parts, in an order of one's own; those of ``FIRST`` come before memory is held."""

PEERS = {
    "FSDP2, no checkpointing": ("none", 2),
    "FSDP2, full checkpointing": ("full", 4),
}
"""Remat and microbatch of what PyTorch runs."""

TRACED = ("ours", "layered accumulation")
"""Plans whose copies are looked at beside their kernels."""

MOST_S = 170.0
"""For one plan, compiled and run."""

LEAST_S = 25.0
"""With less left, nothing more is begun."""


class Bench:
    """What is known so far, and how children are run."""

    def __init__(self, args: argparse.Namespace, work: Path):
        self.setting: Setting = setting(args.small)
        self.small: bool = args.small
        self.out: Path = args.out
        self.work = work
        self.until = time.monotonic() + args.seconds
        self.environment: dict[str, str] = {}
        self.rows: dict[str, Any] = {
            "what": {
                "date": datetime.date.today().isoformat(),
                "command": "python -m experiments.bench_emulated --parts "
                + " ".join(args.parts),
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
        path = self.out / "bench_emulated.json"
        path.write_text(json.dumps(self.rows, indent=1))

    def part(self, name: str, call: Callable[[], None]) -> None:
        """A part, which may fail."""
        began = time.monotonic()
        print(f"[{self.left_s:5.0f} s left] {name}", flush=True)
        try:
            if self.left_s < LEAST_S:
                raise TimeoutError("no time left")
            call()
        except Exception as error:
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
        small = ["--small"] if self.small else []
        return [sys.executable, "-m", module, *map(str, arguments), *small]


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


def check(bench: Bench) -> None:
    """Products and links of the cards as they are held."""
    result = bench.work / "check.json"
    cards = range(len(bench.setting.cards))
    command = bench.python("experiments.emulated.checking", result)
    bench.start("check", cards, *command).wait(90)
    found = json.loads(result.read_text())
    for name in ("card", "cards", "jax", "python"):
        bench.rows["what"][name] = found.pop(name)
    bench.found["check"] = found


def alone(bench: Bench, chain: Path) -> None:
    """All cards at once, each in a process that sees no other."""
    children = []
    for number in range(len(bench.setting.cards)):
        result = bench.work / f"alone{number}.json"
        command = bench.python("experiments.emulated.alone", number, chain, result)
        children.append((result, bench.start(f"alone {number}", [number], *command)))
    found: list[Any] = []
    try:
        for number, (result, child) in enumerate(children):
            try:
                child.wait(240)
            except RuntimeError as error:
                bench.found["failed"][f"alone {number}"] = str(error)
            found.append(json.loads(result.read_text()) if result.exists() else {})
    finally:
        for _, child in children:
            child.stop()
    bench.found["alone"] = found


def measured_cluster(bench: Bench) -> Cluster:
    """The cluster with what was measured of it."""
    alone = bench.found.get("alone", [])
    check = bench.found.get("check", {})
    rows = {
        kind: alone[number].get("rows", ())
        for kind, number in bench.setting.first_of_kind.items()
        if number < len(alone)
    }
    link = None
    if check:
        rates = sorted(check["link_bytes_per_s"].values())
        link = {
            "latency_us": round(check["link_latency_s"] * 1e6, 1),
            "bandwidth_gb_per_s": round(rates[len(rates) // 2] / 1e9, 1),
        }
    return bench.setting.cluster(rows, link)


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
    """Peaks with 4 and with 32 microbatches, on two cards at once."""
    setting = bench.setting
    first, last = 0, len(setting.cards) - 1
    runs = []
    for card, count in ((first, 4), (last, 32)):
        plan = plans.flat(setting, chain, setting.devices[card], count)
        name = f"{count} microbatches"
        child = run_plan(bench, name, plan, files, cards=[card], steps=2)
        runs.append((name, predicting.promised(plan, chain, cluster), child))
    for name, promised, child in runs:
        row: dict[str, Any] = {"promised_bytes": promised}
        bench.found.setdefault("memory", {})[name] = row
        try:
            child.wait(MOST_S)
        except RuntimeError as error:
            bench.found["failed"][name] = str(error)
        row |= result_of(bench, name)


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
    script = str(Path(__file__).parent / "peers" / "torch_fsdp.py")
    found: dict[str, list[str]] = {}
    for name, (remat, size) in PEERS.items():
        counts = ("--microbatch", size, "--microbatches", a_card // size)
        found[name] = torch_command(bench, script, *counts, "--remat", remat)
    return found


def bench_all(bench: Bench, parts: Sequence[str], others: Sequence[str]) -> None:
    """Every part, one after another."""
    made = bench.setting
    files = (bench.work / "chain.json", bench.work / "cluster.json")
    chain = make_chain(made.size)
    files[0].write_text(json.dumps(chain.to_json()))
    slow = [dataclasses.replace(c.hold, keep_gib=None) for c in made.cards]
    slow = [hold for hold in slow if hold.multiprocessors]
    caps = [dataclasses.replace(c.hold, multiprocessors=0) for c in made.cards]
    with contextlib.ExitStack() as stack:

        def hold(name: str, holds: Sequence[Hold]) -> None:
            given = holding(holds, bench.environment, bench.left_s + 30)
            bench.found[name] = stack.enter_context(given)

        if not bench.small:
            bench.environment = dict(stack.enter_context(mps(bench.work)))
            bench.found["mps"] = bool(bench.environment)
            bench.part("slowed", lambda: hold("slowed", slow))
            if "slowed" not in bench.found:
                return
        if "check" in parts:
            bench.part("check", lambda: check(bench))
        if "alone" in parts:
            bench.part("alone", lambda: alone(bench, files[0]))
        cluster = measured_cluster(bench)
        files[1].write_text(json.dumps(cluster.to_json()))
        (bench.out / "cluster.json").write_text(files[1].read_text())
        if not bench.small:
            bench.part("capped", lambda: hold("capped", caps))
        plan_all(bench, parts, others, chain, cluster, files)


def plan_all(
    bench: Bench,
    parts: Sequence[str],
    others: Sequence[str],
    chain: Chain,
    cluster: Cluster,
    files: tuple[Path, Path],
) -> None:
    """The parts of ``THEN`` that are asked for, in that order."""
    made = bench.setting
    found: list[Plan] = []

    def planning() -> None:
        found.append(plans.ours(made, chain, cluster))
        bench.found["predicted_alone"] = predicting.alone(
            made, chain, cluster, bench.found
        )

    def ours() -> Plan:
        if not found:
            raise RuntimeError("there is no plan of ours")
        return found[0]

    def even_state() -> Plan:
        return plans.ours(made, chain, cluster, even_state=True)

    variants: Mapping[str, Callable[[], Plan]] = {
        "ours": ours,
        "even batch": lambda: plans.even_batch(made, chain),
        "even state": even_state,
        "layered accumulation": lambda: plans.layered(chain, ours()),
        "layered accumulation off": lambda: plans.plain_order(chain, ours()),
    }

    def run_all(*names: str) -> None:
        for name in names:
            make = variants[name]
            bench.part(
                name,
                lambda name=name, make=make: measure_plan(
                    bench, name, make(), chain, cluster, files
                ),
            )

    todo: Mapping[str, Callable[[], None]] = {
        "ours": lambda: run_all("ours"),
        "even": lambda: run_all("even batch", "even state"),
        "layered": lambda: run_all("layered accumulation", "layered accumulation off"),
        "memory": lambda: bench.part(
            "memory", lambda: flat_memory(bench, chain, cluster, files)
        ),
        "peers": lambda: peers(bench, given_peers(bench, others)),
        "fsdp": lambda: peers(bench, fsdp(bench)),
    }
    bench.part("planning", planning)
    for part in parts:
        if part in todo:
            todo[part]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=FIRST + THEN, default=FIRST + THEN
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        help="another script for torchrun, and its arguments, that says tokens_per_s=",
    )
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_emulated"))
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # cards are the children's
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(int(args.seconds) + 8)
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, Path(work))
        try:
            bench_all(bench, args.parts, args.peer)
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


if __name__ == "__main__":
    main()
