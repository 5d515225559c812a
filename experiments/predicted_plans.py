"""Draws plans and writes down what each will take, before any is measured.

Run:     python -m experiments.predicted_plans --profile profile.toml --out list.json
         (--small, to see that it works, draws for two forced CPU devices)
Needs:   no device (--equal: OR-Tools); a profile file of two cards, and, where this JAX
         is not the one that measured it, the chain: --chain-out chain.json there,
         --chain chain.json here
Expect:  a list to be committed, then measured by experiments.bench_predicted

The seed is drawn, too, unless it is given. ``--equal`` writes instead the one plan that
the planner finds for the two cards, which experiments.bench_equal measures.
"""

import argparse
import dataclasses
import datetime
import json
import random
from pathlib import Path

from experiments.predicted.cells import Cell, cell
from experiments.predicted.drawing import KINDS, Drawing
from experiments.predicted.listing import Listed, Promise, check_measured, promised
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.planner import PlanOptions, make_plan
from hexijax.report.judged import judge

LARGEST = 16
"""Samples of a microbatch that a profile has by itself."""


def drawn(of: Cell, chain: Chain, cluster: Cluster, seed: int) -> dict[str, Promise]:
    """Plans of all kinds by name."""
    found: dict[str, Promise] = {}
    for name, judged in Drawing(of, chain, cluster, seed).all(KINDS):
        found[name] = promised(judged)
        memory = max(found[name].memory_bytes.values()) / 2**30
        print(f"{name:18} {judged.step_s:7.4f} s {memory:7.2f} GiB", flush=True)
    return found


def equal(of: Cell, chain: Chain, cluster: Cluster) -> dict[str, Promise]:
    """The planner's plan for equal cards, without a norm to wait for."""
    problem = of.problem(chain, cluster, of.batch_size, clip=False)
    plan = make_plan(
        chain,
        cluster,
        batch_size=of.batch_size,
        dtype=problem.training.dtype,
        options=dataclasses.replace(
            PlanOptions.of(problem.training), max_microbatch_size=LARGEST
        ),
    )
    return {"ours": promised(judge("ours", plan, problem))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile", type=Path, help="of the two cards")
    parser.add_argument("--chain", type=Path, help="the model's layers, traced before")
    parser.add_argument("--chain-out", type=Path, help="write them, and draw nothing")
    parser.add_argument("--seed", type=int, help="otherwise one is drawn")
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/predicted/list.json"))
    args = parser.parse_args()
    name = "small" if args.small else "llama"
    of = cell(name)
    if args.chain:
        chain = Chain.from_json(json.loads(args.chain.read_text()))
    else:
        chain = of.chain()
    if args.chain_out:
        args.chain_out.write_text(json.dumps(chain.to_json()))
        return
    cluster = of.measured_cluster(args.profile)
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    what = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m experiments.predicted_plans",
    }
    if args.equal:
        what["command"] += " --equal"
        promises = equal(of, chain, cluster)
    else:
        what["command"] += f" --seed {seed}"
        promises = drawn(of, chain, cluster, seed)
    if args.profile:
        for promise in promises.values():
            check_measured(promise.plan, chain, cluster)
    Listed(
        cell=name,
        clip=not args.equal,
        cluster=cluster,
        what={**what, "profile": bool(args.profile)},
        promises=promises,
    ).write(args.out)
    print(f"{len(promises)} plans in {args.out}")


if __name__ == "__main__":
    main()
