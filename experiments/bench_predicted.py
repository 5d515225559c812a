"""Measures plans whose steps and memory were written down before.

Run:     python -m experiments.bench_predicted --plans LIST --out FOLDER
         (a list drawn with --small runs on forced CPU devices)
Needs:   the two cards that the list was drawn for; seven minutes for two dozen plans
Expect:  docs/performance.md

Each plan runs in a process of its own, since peaks of memory are counted from its
start: two steps to warm up, then ``--steps``. Plans of one card run two at a time. What
the time does not reach is said and kept; ``--before FILE`` goes on with it.
"""

import argparse
import json
from pathlib import Path

from experiments.benching import Bench
from experiments.predicted.cells import cell
from experiments.predicted.listing import digest, read_list
from experiments.predicted.measuring import known, measure_all
from experiments.predicted.table import summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plans", type=Path, required=True, help="the list")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--before", type=Path, help="results of an earlier run")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_predicted"))
    args = parser.parse_args()
    listed = read_list(args.plans)
    bench = Bench(
        "predicted",
        f"bench_predicted --plans {args.plans.name} --steps {args.steps}",
        out=args.out,
        seconds=args.seconds,
        small=listed.cell == "small",
    )
    bench.rows["what"]["cards"] = args.cards
    bench.found["list"] = {"file": args.plans.name, "digest": digest(args.plans)}

    def call() -> None:
        chain = bench.work / "chain.json"
        made = cell(listed.cell).chain()
        chain.write_text(json.dumps(made.to_json()))
        if args.before:
            known(bench, args.before)
        measure_all(bench, args.plans, listed, chain, args.cards, args.steps)

    bench.run(call, summary)


if __name__ == "__main__":
    main()
