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

from experiments.benching import Bench, Child
from experiments.emulated.bench import torch_command
from experiments.equal.table import summary
from experiments.predicted.cells import cell
from experiments.predicted.listing import Listed, digest, read_before, read_list

SWEEP = ("none:8", "none:16", "full:8", "full:16")
"""Checkpointing and microbatches of FSDP2."""

PARTS = ("ours", "plain", "fsdp")

MOST_S = {"ours": 100.0, "plain": 100.0, "fsdp": 220.0}
"""Of each part."""


class Equal:
    """The parts, each a child that is started at once and uses cards at its turn."""

    def __init__(self, bench: Bench, path: Path, steps: int):
        self._bench, self._path, self._steps = bench, path, steps
        self._listed: Listed = read_list(path)
        self._children: dict[str, Child] = {}

    @property
    def sequences(self) -> int:
        """Of a step."""
        return cell(self._listed.cell).batch_size

    def start(self, name: str, command: Sequence[str]) -> None:
        """A part's child, which waits for its gate."""
        gate = self._gate(name)
        self._children[name] = self._bench.start(
            name, [0, 1], *command, "--gate", str(gate)
        )

    def start_ours(self) -> None:
        """The plan of the list."""
        ((name, _),) = self._listed.promises.items()
        chain = self._bench.work / "chain.json"
        chain.write_text(json.dumps(cell(self._listed.cell).chain().to_json()))
        command = self._bench.python(
            "experiments.predicted.running",
            *(self._path, name, chain, self._result("ours")),
            *("--steps", self._steps, "--warm", 0),
        )
        self.start("ours", command)

    def start_plain(self, sizes: Sequence[int] | None) -> None:
        """One program for both cards, in plain JAX."""
        command = self._bench.python(
            "experiments.equal.plain",
            *(self._listed.cell, self._result("plain"), "--steps", self._steps),
            *("--microbatches", *(sizes or [a_card(self._listed)])),
        )
        self.start("plain", command)

    def start_fsdp(self, cells: Sequence[str]) -> None:
        """PyTorch's FSDP2."""
        script = str(Path(__file__).parent / "peers" / "torch_fsdp.py")
        command = torch_command(
            2,
            script,
            *("--model", "1.35B" if self._listed.cell == "llama" else "small"),
            *("--sequences", self.sequences // 2, "--steps", self._steps),
            *("--sweep", *cells),
        )
        self.start("fsdp", command)

    def finish(self, name: str) -> None:
        """Opens a part's gate, waits, and keeps what it wrote or printed, also of a run
        that fails."""
        child, found = self._children[name], self._bench.found
        self._gate(name).touch()
        try:
            child.wait(MOST_S[name])
        finally:
            if name == "fsdp":
                lines = child.log.read_text(errors="replace").splitlines()
                found[name] = [read(x) for x in lines if "tokens_per_s=" in x]
            elif self._result(name).exists():
                found[name] = json.loads(self._result(name).read_text())
        if name == "ours":
            ((_, promise),) = self._listed.promises.items()
            for word in ("card", "jax"):
                self._bench.rows["what"][word] = found[name].pop(word)
            found[name]["predicted_s"] = promise.step_s
            found[name]["promised_bytes"] = dict(promise.memory_bytes)

    def stop(self) -> None:
        """Ends what still runs."""
        for child in self._children.values():
            child.stop()

    def _gate(self, name: str) -> Path:
        return self._bench.work / f"{name}.gate"

    def _result(self, name: str) -> Path:
        return self._bench.work / f"{name}.json"


def a_card(listed: Listed) -> int:
    """Sequences of a card's largest microbatch under the plan of the list."""
    ((_, promise),) = listed.promises.items()
    return max(
        replica.microbatch_size // stage.lanes
        for replica in promise.plan.replicas
        for stage in replica.stages
    )


def known(bench: Bench, before: Path, parts: Sequence[str]) -> None:
    """Takes over the other parts of an earlier run of the same list.

    Raises:
      UserError: it was of another list.
    """
    rows = read_before(before, "equal", bench.found["list"])
    others = {part: rows["equal"].get(part) for part in PARTS if part not in parts}
    bench.found.update({part: row for part, row in others.items() if row})
    bench.rows["what"].update({k: rows["what"][k] for k in ("card", "jax")})


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
    parser.add_argument("--before", type=Path, help="an earlier run's other parts")
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

    if args.before:
        known(bench, args.before, args.parts)

    def call() -> None:
        equal = Equal(bench, args.plans, args.steps)
        bench.found["batch_size"] = equal.sequences
        starts: Mapping[str, Callable[[], None]] = {
            "ours": equal.start_ours,
            "plain": functools.partial(equal.start_plain, args.plain_microbatches),
            "fsdp": functools.partial(equal.start_fsdp, args.sweep),
        }
        try:
            for part in args.parts:
                starts[part]()
            for part in args.parts:
                bench.part(part, functools.partial(equal.finish, part))
        finally:
            equal.stop()

    bench.run(call, summary)


if __name__ == "__main__":
    main()
