"""Four equal cards made unlike: our plan beside its bound, its variants and FSDP2.

Run:     python -m experiments.bench_emulated --out FOLDER
         (--setting small, to see that it works, takes forced CPU devices, none slowed;
         --setting pair the first two cards alone, 1-1-0.54-0.28 cards of those speeds,
         1-1-0.54-0.28-2.7B a larger model on them)
Needs:   4 Hopper cards of one host with NVIDIA MPS, CuPy; PyTorch for the peer; 10 min
Expect:  docs/performance.md

Speeds are 1 : 0.54 : 0.28 : 1. Multiprocessors of two cards are held, then memory of
all until 80, 40, 24 and 80 GiB are free (experiments/peers/slow_card.py). Each card is
measured alone, uncapped: the bound is the sum of their rates. Its layers' times go into
a cluster, from which the plan is made and its step predicted. Every plan runs in a
process of its own. What fails or finds no time left is said; the rest goes on.

``symmetric`` are the best even data parallelism and the best even pipeline that a
search finds. ``--measured FILE`` takes an earlier run's ``check`` and ``alone`` for
cards of the same kinds; with ``--plans FOLDER`` plans are kept there, and
``--plan-only`` runs none of them: a machine with cards then needs no search.
"""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.bench_llama import make_chain
from experiments.emulated import plans, predicting
from experiments.emulated.bench import (
    Bench,
    add_arguments,
    alone,
    check,
    flat_memory,
    fsdp,
    given_peers,
    kept,
    known,
    measure_plan,
    measured_cluster,
    peers,
    run_bench,
)
from experiments.emulated.slowing import Hold, holding, mps
from experiments.emulated.table import BEST_EVEN, BEST_PIPELINE
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan

FIRST = ("check", "alone")
THEN = ("ours", "symmetric", "peers", "even", "memory", "layered", "fsdp")
"""Parts, in an order of one's own; those of ``FIRST`` come before memory is held."""


def look(bench: Bench) -> None:
    """All cards as they are held."""
    bench.found["check"] = check(bench, range(len(bench.setting.cards)))


def bench_all(
    bench: Bench,
    parts: Sequence[str],
    others: Sequence[str],
    measured: Path | None = None,
) -> None:
    """Every part, one after another."""
    held = not bench.small and not bench.plan_only
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

        if held:
            bench.environment = dict(stack.enter_context(mps(bench.work)))
            bench.found["mps"] = bool(bench.environment)
            bench.part("slowed", lambda: hold("slowed", slow))
            if "slowed" not in bench.found:
                return
        if "check" in parts:
            bench.part("check", lambda: look(bench))
        if "alone" in parts:
            bench.part("alone", lambda: alone(bench, files[0]))
        if measured is not None:
            known(bench, measured)
        cluster = measured_cluster(bench)
        files[1].write_text(json.dumps(cluster.to_json()))
        (bench.out / "cluster.json").write_text(files[1].read_text())
        if held:
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
        plan = kept(bench, "ours", lambda: plans.ours(made, chain, cluster))
        found.append(plan)
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
        BEST_EVEN: lambda: plans.best_even(made, chain, cluster),
        BEST_PIPELINE: lambda: plans.best_pipeline(made, chain, cluster),
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
                    bench, name, kept(bench, name, make), chain, cluster, files
                ),
            )

    todo: Mapping[str, Callable[[], None]] = {
        "ours": lambda: run_all("ours"),
        "symmetric": lambda: run_all(BEST_EVEN, BEST_PIPELINE),
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
    parser.add_argument("--measured", type=Path, help="an earlier run's JSON")
    add_arguments(parser, "bench_emulated")
    args = parser.parse_args()
    command = f"bench_emulated --setting {args.setting} --parts {' '.join(args.parts)}"
    run_bench(
        args,
        command,
        lambda bench: bench_all(bench, args.parts, args.peer, args.measured),
    )


if __name__ == "__main__":
    main()
