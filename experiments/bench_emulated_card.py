"""One card as three kinds in turn: rates, layer times, predictions, flat memory.

Run:     python -m experiments.bench_emulated_card --out FOLDER
         (--small, to see that it works, takes forced CPU devices, none of them slowed)
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
from experiments.emulated.slowing import holding, mps


def bench_card(bench: Bench) -> None:
    """Every part, one after another."""
    made = bench.setting
    files = (bench.work / "chain.json", bench.work / "cluster.json")
    chain = make_chain(made.size)
    files[0].write_text(json.dumps(chain.to_json()))
    with contextlib.ExitStack() as stack:
        if not bench.small:
            bench.environment = dict(stack.enter_context(mps(bench.work)))
            bench.found["mps"] = bool(bench.environment)
        for kind, number in made.first_of_kind.items():
            bench.part(kind, lambda number=number: as_kind(bench, number, files[0]))
        cluster = measured_cluster(bench)
        files[1].write_text(json.dumps(cluster.to_json()))

        def predict() -> None:
            found = predicting.alone(made, chain, cluster, bench.found)
            bench.found["predicted_alone"] = found

        bench.part("predictions", predict)
        bench.part("memory", lambda: flat_memory(bench, chain, cluster, files))


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
    add_arguments(parser, "bench_emulated_card")
    run_bench(parser.parse_args(), "bench_emulated_card", bench_card)


if __name__ == "__main__":
    main()
