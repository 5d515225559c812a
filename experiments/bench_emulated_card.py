"""One card as three kinds in turn: rates, layer times, predictions, flat memory.

Run:     python -m experiments.bench_emulated_card --out FOLDER
         (--setting small, to see that it works, takes forced CPU devices, none slowed)
Needs:   one Hopper card with NVIDIA MPS, CuPy; five minutes
Expect:  docs/performance.md

What ``bench_emulated`` measures of cards alone, for who has one: the card whole, then
with 66 and with 99 of its 132 multiprocessors held. Each kind's layers are timed, and
steps predicted from them beside steps measured; then layered accumulation with 4 and
with 32 microbatches, whose peaks of memory are to be equal.
"""

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.bench_llama import make_chain
from experiments.emulated import predicting
from experiments.emulated.bench import (
    Bench,
    add_arguments,
    alone,
    check,
    flat_memory,
    measured_cluster,
    run_bench,
)
from experiments.emulated.cards import LARGE
from experiments.emulated.slowing import holding, mps


def bench_card(bench: Bench, parts: Sequence[str]) -> None:
    """The parts asked for, one after another."""
    made = bench.setting
    files = (bench.work / "chain.json", bench.work / "cluster.json")
    chain = make_chain(made.size)
    files[0].write_text(json.dumps(chain.to_json()))
    with contextlib.ExitStack() as stack:
        if not bench.small:
            bench.environment = dict(stack.enter_context(mps(bench.work)))
            bench.found["mps"] = bool(bench.environment)
        for part in parts:
            if part == "memory":
                cluster = made.cluster()
                files[1].write_text(json.dumps(cluster.to_json()))
                bench.part(
                    part,
                    lambda cluster=cluster: flat_memory(bench, chain, cluster, files),
                )
            else:
                number = made.first_of_kind[part]
                bench.part(part, lambda number=number: as_kind(bench, number, files[0]))

    def predict() -> None:
        bench.found["predicted_alone"] = predicting.alone(
            made, chain, measured_cluster(bench), bench.found
        )

    bench.part("predictions", predict)


def as_kind(bench: Bench, number: int, chain: Path) -> None:
    """The first card, held as card ``number`` of the emulated cluster is."""
    hold = bench.setting.cards[number].hold
    holds = (dataclasses.replace(hold, card=0, keep_gib=None),)
    slowed = hold.multiprocessors and not bench.small
    with holding(holds if slowed else (), bench.environment, bench.left_s + 30):
        found = check(bench, [0])
        rates = bench.found.setdefault("check", found)["product_flops_per_s"]
        if rates is not found["product_flops_per_s"]:
            rates += found["product_flops_per_s"]
        alone(bench, chain, {number: 0})
    time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    choices = (*LARGE.first_of_kind, "memory")
    parser.add_argument("--parts", nargs="+", choices=choices, default=choices)
    add_arguments(parser, "bench_emulated_card")
    args = parser.parse_args()
    command = f"bench_emulated_card --parts {' '.join(args.parts)}"
    run_bench(args, command, lambda bench: bench_card(bench, args.parts))


if __name__ == "__main__":
    main()
