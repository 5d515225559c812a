"""Two equal cards: the planner's plan beside plain JAX and FSDP2 at its best.

Run:     python -m experiments.bench_equal --plans LIST --out FOLDER
         (a list written with --small runs on forced CPU devices, without FSDP2)
Needs:   two cards, the list of experiments.predicted_plans --equal; PyTorch for FSDP2;
         four minutes
Expect:  docs/performance.md

All train the same Llama on as many sequences a step; none clips. The plain program has
our microbatches unless others are named; checkpointing and microbatches of FSDP2 are
tried on short steps first, and the fastest is measured.
"""

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benching import Bench
from experiments.emulated.bench import torch_command
from experiments.equal.table import summary
from experiments.predicted.cells import cell
from experiments.predicted.listing import Listed, digest, read_list

SWEEP = ("none:8", "none:16", "half:16", "full:8", "full:16")
"""Checkpointing and microbatches of FSDP2."""

PARTS = ("ours", "plain", "fsdp")

MOST_S = {"ours": 120.0, "plain": 150.0, "fsdp": 260.0}
"""Of each part."""


def ours(bench: Bench, listed: Listed, path: Path, steps: int) -> None:
    """The plan of the list."""
    ((name, promise),) = listed.promises.items()
    chain, gate = bench.work / "chain.json", bench.work / "gate"
    chain.write_text(json.dumps(cell(listed.cell).chain().to_json()))
    gate.touch()
    result = bench.work / "ours.json"
    command = bench.python(
        "experiments.predicted.running",
        *(path, name, chain, result, "--gate", gate, "--steps", steps),
    )
    try:
        bench.start("ours", [0, 1], *command).wait(MOST_S["ours"])
    finally:
        found = json.loads(result.read_text()) if result.exists() else {}
        for word in ("card", "jax"):
            bench.rows["what"][word] = found.pop(word, "")
        bench.found["ours"] = {
            "predicted_s": promise.step_s,
            "promised_bytes": dict(promise.memory_bytes),
            **found,
        }


def a_card(listed: Listed) -> int:
    """Sequences of a card's largest microbatch under the plan of the list."""
    ((_, promise),) = listed.promises.items()
    return max(
        replica.microbatch_size // stage.lanes
        for replica in promise.plan.replicas
        for stage in replica.stages
    )


def plain(bench: Bench, listed: Listed, sizes: Sequence[int], steps: int) -> None:
    """One program for both cards, in plain JAX."""
    result = bench.work / "plain.json"
    command = bench.python(
        "experiments.equal.plain",
        *(listed.cell, result, "--cards", 2, "--steps", steps),
        *("--microbatches", *sizes),
    )
    bench.start("plain", [0, 1], *command).wait(MOST_S["plain"])
    bench.found["plain"] = json.loads(result.read_text())


def fsdp(bench: Bench, listed: Listed, cells: Sequence[str], steps: int) -> None:
    """PyTorch's FSDP2; every line it printed is kept, also of a run that fails."""
    script = str(Path(__file__).parent / "peers" / "torch_fsdp.py")
    sequences = cell(listed.cell).batch_size // 2
    command = torch_command(
        2,
        script,
        *("--model", "1.35B" if listed.cell == "llama" else "small"),
        *("--sequences", sequences, "--steps", steps, "--sweep", *cells),
    )
    child = bench.start("fsdp", [0, 1], *command)
    try:
        child.wait(MOST_S["fsdp"])
    finally:
        lines = child.log.read_text(errors="replace").splitlines()
        bench.found["fsdp"] = [read(x) for x in lines if "tokens_per_s=" in x]


def read(line: str) -> dict[str, Any]:
    """A line of ``torch_fsdp.py``: ``whole remat=full microbatch=8 step_s=...``."""
    what, *words = line.split()
    found: dict[str, Any] = {"what": what}
    for word in words:
        name, value = word.split("=", 1)
        found[name] = value if name in ("remat", "torch") else float(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plans", type=Path, required=True, help="the list")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--plain-microbatches",
        type=int,
        nargs="+",
        help="of a card, of which the fastest is measured (default: ours)",
    )
    parser.add_argument("--sweep", nargs="+", default=SWEEP)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_equal"))
    args = parser.parse_args()
    listed = read_list(args.plans)
    bench = Bench(
        "equal",
        f"bench_equal --plans {args.plans.name} --parts {' '.join(args.parts)}",
        out=args.out,
        seconds=args.seconds,
        small=listed.cell == "small",
    )
    bench.rows["what"]["cards"] = 2
    bench.found["list"] = {"file": args.plans.name, "digest": digest(args.plans)}
    bench.found["batch_size"] = cell(listed.cell).batch_size
    todo: Mapping[str, Callable[[], None]] = {
        "ours": functools.partial(ours, bench, listed, args.plans, args.steps),
        "plain": functools.partial(
            plain,
            bench,
            listed,
            args.plain_microbatches or [a_card(listed)],
            args.steps,
        ),
        "fsdp": functools.partial(fsdp, bench, listed, args.sweep, args.steps),
    }

    def call() -> None:
        for part in args.parts:
            bench.part(part, todo[part])

    bench.run(call, summary)


if __name__ == "__main__":
    main()
