"""What the emulated benchmarks share: results that are kept, children, and each part.

Bench -> part(name, call) -> a child of its own -> its result -> Bench.found
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import benching
from experiments.benching import Child
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


class Bench(benching.Bench):
    """One of the emulated settings."""

    def __init__(self, args: argparse.Namespace, command: str):
        super().__init__(
            "emulated",
            command,
            out=args.out,
            seconds=args.seconds,
            small=args.setting == "small",
            named=["--setting", args.setting],
        )
        self.setting_name: str = args.setting
        self.setting: Setting = SETTINGS[args.setting]
        self.plans: Path | None = args.plans
        self.plan_only: bool = args.plan_only
        self.found["model"] = "2.7B" if args.setting.endswith("2.7B") else "1.35B"
        self.found["cards"] = [
            {
                "kind": card.kind,
                "held": card.hold.multiprocessors,
                "keep_gib": card.memory_gib,
            }
            for card in self.setting.cards
        ]


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


def known(bench: Bench, file: Path) -> None:
    """What an earlier run has measured of cards of the same kinds, by kind."""
    before = json.loads(file.read_text())
    found = before["emulated"]
    cards = zip(found["cards"], found["alone"], strict=True)
    by_kind = {card["kind"]: row for card, row in cards if row.get("rows")}
    kinds = [card.kind for card in bench.setting.cards]
    if missing := sorted(set(kinds) - by_kind.keys()):
        raise RuntimeError(f"{file} has no layers of {', '.join(missing)}")
    bench.found["check"] = found["check"]
    bench.found["alone"] = [by_kind[kind] for kind in kinds]
    bench.found["measured_before"] = before["what"]


def kept(bench: Bench, name: str, make: Callable[[], Plan]) -> Plan:
    """A plan from the folder of plans, or one that is made and put there."""
    if bench.plans is None:
        return make()
    file = bench.plans / f"{bench.setting_name}_{name.replace(' ', '_')}.plan.txt"
    if not file.exists():
        bench.plans.mkdir(parents=True, exist_ok=True)
        file.write_text(text.render(make()))
    return text.read(file)


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
) -> Child:
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
    if bench.plan_only:
        return
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


def peer(
    bench: benching.Bench, name: str, command: Sequence[str], cards: Sequence[int]
) -> None:
    """A command of another's that says ``tokens_per_s=``."""
    output = bench.start(name, cards, *command).wait(200)
    line = next(x for x in output.splitlines()[::-1] if "tokens_per_s=" in x)
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    bench.found.setdefault("peers", {})[name] = {
        "line": line,
        "tokens_per_s": float(words["tokens_per_s"]),
    }


def torch_command(count: int, script: str, *arguments: object) -> list[str]:
    """``script`` on some cards by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return [sys.executable, *launcher, script, *map(str, arguments)]


def peers(bench: Bench, commands: Mapping[str, list[str]]) -> None:
    """Other programs by name, each on all cards."""
    cards = range(len(bench.setting.cards))
    for name, command in commands.items():
        if not bench.small:
            bench.part(name, functools.partial(peer, bench, name, command, cards))


def given_peers(bench: Bench, others: Sequence[str]) -> dict[str, list[str]]:
    """What the command line names."""
    return {
        Path(words.split()[0]).name: torch_command(
            len(bench.setting.cards), *words.split()
        )
        for words in others
    }


def fsdp(bench: Bench) -> dict[str, list[str]]:
    """PyTorch's FSDP2, equal batches on all cards."""
    a_card = bench.setting.batch_size // len(bench.setting.cards)
    script = str(Path(__file__).parents[1] / "peers" / "torch_fsdp.py")
    found: dict[str, list[str]] = {}
    for name, (remat, size) in PEERS.items():
        size = size // 2 if bench.found["model"] == "2.7B" else size
        counts = (
            "--model",
            bench.found["model"],
            "--microbatch",
            size,
            "--microbatches",
            a_card // size,
        )
        found[name] = torch_command(
            len(bench.setting.cards), script, *counts, "--remat", remat
        )
    return found


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """What every one of these commands takes."""
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--setting", choices=SETTINGS, default="four")
    parser.add_argument("--plans", type=Path, help="folder of plans, read or written")
    parser.add_argument("--plan-only", action="store_true", help="and run none")
    parser.add_argument("--out", type=Path, default=Path("runs") / out)


def run_bench(
    args: argparse.Namespace, command: str, call: Callable[[Bench], None]
) -> None:
    """``call`` within its time; results and logs are written whatever happens."""
    bench = Bench(args, command)
    bench.run(lambda: call(bench), summary)
