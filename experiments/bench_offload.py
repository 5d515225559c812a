"""Models that do not fit: steps on one card under caps, beside what was predicted.

Run:     python -m experiments.bench_offload --parts profile llama --out FOLDER
         (--small, to see that it works, takes a CPU device)
Needs:   one Hopper card, 128 GB of host memory; a part takes two to five minutes
Expect:  docs/performance.md

``profile`` is measured first and read by every other part: rates of the host link and
of updates, times of layers. A plan is found from them; nothing of it is measured twice.
``--profile`` takes an earlier run's, or the file that ``hexijax profile`` has written.
With ``--plans FOLDER`` plans are kept there, and ``--plan-only`` runs none of them: a
machine with cards then needs no search (--profile, --plans).

A GPT's part is ours under every cap, then other systems under the largest:
``gpt-4B:ours`` and ``gpt-4B:stronghold-like`` are parts of it, each a process of its
own, since what one has pinned it keeps. ``gpt-6B:orders`` is one plan, most of it on
the card, with its updates in both orders.
"""

import argparse
import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benching import Bench
from experiments.emulated import predicting
from experiments.offloaded import cells, plans
from experiments.offloaded.measured import of_file
from experiments.offloaded.summary import summary
from hexijax.cluster import Cluster
from hexijax.costs.hosts import LIMIT_VARIABLE, host_bytes
from hexijax.costs.memory import plan_memory
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.job.intake import trace_chain
from hexijax.layers.chain import Chain, Remat
from hexijax.plan import text
from hexijax.plan.plan import Params, Plan, UpdateOrder
from hexijax.planner import PlanOptions
from hexijax.planner.baselines.offload import LATE_UPDATES, offload_baselines
from hexijax.program.lower import StepRules
from hexijax.simulator import predict

LAYERS = ("llama-3:4,8", "gpt-4B:8", "gpt-2B:8")
"""Models whose layers are timed, by microbatch and, after another colon, by policy."""

LLAMAS = ("llama-24", "llama-12", "llama-16")
"""5.1 B, what fits a card with its state, and what does with a little room."""

GPTS = ("gpt-2B", "gpt-4B", "gpt-6B")
"""Parts of their own: under the largest cap."""

OURS, ORDERS = "ours", "orders"

MOST_GIB = 130
"""Of an H200."""

PINNED, PASSING_GIB = 1.1, 4
"""Of what a plan pins, what XLA may, since its pool has gaps; and room for copies."""

CAPS = (12, 24, 40, 80)
"""GiB, the least first: peaks are counted from a process's start."""


class OffloadBench(Bench):
    """And a folder of plans."""

    plans: Path | None = None
    plan_only: bool = False
    as_found: bool = False


def profile(bench: OffloadBench, layers: Sequence[str]) -> None:
    """Of the card, its host, and layers."""
    result = bench.work / "profile.json"
    small = ["--small"] if bench.small else []
    command = bench.python("experiments.offloaded.profile", result, *small)
    child = bench.start("profile", [0], *command, "--layers", *layers)
    try:
        child.wait(480)
    finally:
        if result.exists():
            found = json.loads(result.read_text())
            bench.rows["what"]["cards"] = 1
            for name in ("card", "jax", "python"):
                bench.rows["what"][name] = found.pop(name)
            known = bench.found.get("profile", {}).get("rows", [])
            bench.found["profile"] = found | {"rows": [*known, *found["rows"]]}


class Cell:
    """A model and what is known of the card."""

    def __init__(self, bench: OffloadBench, model: str):
        self.bench, self.model = bench, model
        self.experiment: Experiment = cells.model(model)
        self.chain: Chain = trace_chain(self.experiment)

    def cluster(self, cap_gib: float) -> Cluster:
        """The card under a cap, with what was measured of it."""
        found = self.bench.found.get("profile", {})
        rates = None
        if found:
            both = found["links"]["both"]
            # Each way while the other is busy, too.
            rates = {"in": both, "out": both, "update": found["update_params_per_s"]}
            if found.get("way_back"):
                rates["return"] = found["way_back"]
            elif host := found.get("host"):  # an older profile: the way back is in it
                rates["update"] = 1 / (1 / rates["update"] + 2 / host["return"])
        rows = found.get("rows", ())
        return cells.cluster(cap_gib, rates=rates, rows=rows, small=self.bench.small)

    def ours(self, cap_gib: float) -> Plan:
        """What the planner finds under a cap."""
        cluster = self.cluster(cap_gib)
        made = self.kept(
            f"{self.model}_{cap_gib:g}",
            lambda: plans.ours(self.experiment, self.chain, cluster),
        )
        assert made is not None, "what fits nowhere is refused"
        return made

    def system(self, name: str, cap_gib: float) -> Plan | None:
        """What another system would place; None: it fits nowhere. Those that update
        when the backward is over do so here, too."""
        options = PlanOptions(clip=name in LATE_UPDATES)
        return self.kept(
            f"{self.model}_{cap_gib:g}_{name}",
            lambda: offload_baselines()[name](
                self.chain,
                self.cluster(cap_gib),
                batch_size=self.experiment.batch_size,
                dtype=self.experiment.dtype,
                options=options,
            ),
        )

    def kept(self, name: str, find: Callable[[], Plan | None]) -> Plan | None:
        """A plan from the folder of plans, or found and put there; empty: none."""
        folder = self.bench.plans
        if folder is None:
            return find()
        file = folder / f"{name}.plan.txt"
        if not file.exists():
            plan = find()
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text.render(plan) if plan else "")
        return text.read(file) if file.stat().st_size else None

    def run(
        self,
        made: Mapping[str, tuple[Plan, float]],
        *,
        traced: Sequence[str] = (),
        steps: int = 5,
        most_s: float = 400,
        clipped: Sequence[str] = (),
        watched: Sequence[str] = (),
    ) -> None:
        """Plans by name, each with its cap, in one process and in that order; some
        with a norm to clip at, which is never reached, some with a step watched."""
        bench = self.bench
        rows: dict[str, dict[str, Any]] = {}
        ran = len([*bench.work.glob(f"{self.model}_*.cluster.json")])
        result = bench.work / f"{self.model}_{ran}.json"
        arguments: list[str] = []
        for name, (plan, cap_gib) in made.items():
            cluster = self.cluster(cap_gib)
            row: dict[str, Any] = {"plan": text.render(plan), "cap_gib": cap_gib}
            rules = StepRules(clip=name in clipped)
            row |= predicting.predicted(plan, self.chain, cluster, rules)
            memory = plan_memory(plan, self.chain, cluster)
            rows[name] = row | {"promised_host_bytes": host_bytes(memory, cluster)}
            file = result.with_name(f"{result.stem}_{len(arguments)}.plan.txt")
            file.write_text(text.render(plan))
            arguments.append(f"{name}={file}")
        # The pool of pinned memory doubles while it may, needed or not.
        most = max(
            plans.pinned_bytes(plan, self.chain, self.cluster(cap_gib))
            for plan, cap_gib in made.values()
        )
        bench.environment[LIMIT_VARIABLE] = str(
            math.ceil(most * PINNED / 2**30) + PASSING_GIB
        )
        whole = result.with_suffix(".cluster.json")
        whole.write_text(json.dumps(self.cluster(max(CAPS)).to_json()))
        bench.found.setdefault("runs", {}).setdefault(self.model, {}).update(rows)
        bench.keep()
        if bench.plan_only:
            return
        command = bench.python(
            "experiments.offloaded.running",
            *(self.model, whole, result, *arguments, "--steps", steps),
            *("--trace", *traced, "--clipped", *clipped, "--watch", *watched),
        )
        try:
            bench.start(f"{self.model} {ran}", [0], *command).wait(most_s)
        finally:
            if result.exists():
                for name, row in json.loads(result.read_text()).items():
                    rows[name] |= row


def capped(bench: OffloadBench, model: str, caps: Sequence[float]) -> None:
    """A model under caps, its updates by need and in the order of gradients."""
    cell = Cell(bench, model)
    made: dict[str, tuple[Plan, float]] = {}
    for cap in caps:
        try:
            plan = cell.ours(cap)
        except UserError as error:
            bench.found["failed"][f"{model}, {cap:g} GiB"] = str(error)
            continue
        for order in [plan.order] if bench.as_found else UpdateOrder:
            ordered = plans.in_order(plan, order)
            if not any(ordered == other for other, _ in made.values()):
                made[f"{cap:g} GiB, {order}"] = (ordered, cap)
    cell.run(made, traced=[*made])


def sites(bench: OffloadBench, model: str, cap_gib: float) -> None:
    """The same plan with and without the host's cores, in both orders."""
    cell = Cell(bench, model)
    plan = cell.ours(cap_gib)
    both = {"": plan, ", no host updates": plans.without_host_updates(plan)}
    made = {
        f"{order}{words}": (plans.in_order(at, order), cap_gib)
        for words, at in both.items()
        for order in UpdateOrder
    }
    cell.run(made, traced=[*made], steps=4)


def streams(bench: OffloadBench, model: str, size: int) -> None:
    """Parameters in host memory, beside the same on the card."""
    cell = Cell(bench, model)
    made = {
        f"params {params}": (
            plans.resident(cell.experiment, cell.chain, size=size, params=params),
            max(CAPS),
        )
        for params in (Params.STREAMED, Params.KEPT)
    }
    cell.run(made, traced=[*made])


def losses(bench: OffloadBench, model: str, cap_gib: float, size: int) -> None:
    """Offloaded as under a cap, beside all on the card: the same losses."""
    cell = Cell(bench, model)
    plan = plans.resident(cell.experiment, cell.chain, size=size)
    made = {
        f"offloaded, {cap_gib:g} GiB": (cell.ours(cap_gib), cap_gib),
        "resident": (plan, max(CAPS)),
    }
    cell.run(made, steps=10)


def gpt(bench: OffloadBench, model: str, caps: Sequence[float], whose: str) -> None:
    """Ours under caps, or what another system would place under the largest; both as
    our Programs."""
    cell, most = Cell(bench, model), max(caps)
    made: dict[str, tuple[Plan, float]] = {}
    if whose == OURS:
        made = {f"{OURS}, {cap:g} GiB": (cell.ours(cap), cap) for cap in caps}
    elif plan := cell.system(whose, most):
        made = {whose: (plan, most)}
    if not made:
        raise UserError(f"Nothing of the form of {whose} fits.")
    cell.run(
        made,
        steps=3,
        clipped=[name for name in made if name in LATE_UPDATES],
        watched=[name for name in made if whose == OURS],
    )


def orders(bench: OffloadBench, model: str, size: int) -> None:
    """The state of so many layers streamed that the order of updates counts most, by
    the simulator; in both orders."""
    cell = Cell(bench, model)
    cluster = cell.cluster(MOST_GIB)

    def made(streamed: int) -> dict[UpdateOrder, Plan]:
        plan = plans.resident(
            cell.experiment,
            cell.chain,
            size=size,
            remat=Remat.DOTS,
            streamed=streamed,
        )
        return {order: plans.in_order(plan, order) for order in UpdateOrder}

    def gain(streamed: int) -> float:
        step_s = {
            order: predict(plan, cell.chain, cluster, events=False, folded=False).step_s
            for order, plan in made(streamed).items()
        }
        return step_s[UpdateOrder.FIFO] / step_s[UpdateOrder.PRIORITY]

    layers = len(cell.chain.layers)
    best = max(range(layers // 6, layers // 2), key=gain)
    cell.run({f"last {best}, {o}": (p, MOST_GIB) for o, p in made(best).items()})


def peers(bench: Bench, commands: Sequence[str]) -> None:
    """Other scripts for torchrun that say ``tokens_per_s=``."""
    from experiments.emulated.bench import peer, torch_command

    for words in commands:
        command = torch_command(1, *words.split())
        bench.part(words, lambda w=words, c=command: peer(bench, w, c, [0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["profile", "llama"])
    parser.add_argument("--layers", nargs="*", default=LAYERS)
    parser.add_argument("--caps", nargs="+", type=float, default=CAPS)
    parser.add_argument("--profile", type=Path, help="measured before")
    parser.add_argument("--plans", type=Path, help="folder of plans, read or written")
    parser.add_argument("--as-found", action="store_true", help="one order of updates")
    parser.add_argument("--plan-only", action="store_true", help="and run none")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_offload"))
    args = parser.parse_args()
    given = (("parts", args.parts), ("caps", [f"{cap:g}" for cap in args.caps]))
    words = " ".join(f"--{name} {' '.join(each)}" for name, each in given)
    command = f"bench_offload {words}"
    bench = OffloadBench(
        "offload", command, out=args.out, seconds=args.seconds, small=args.small
    )
    bench.plans, bench.plan_only = args.plans, args.plan_only
    bench.as_found = args.as_found
    small = args.small
    whole, half, most = LLAMAS if not small else ("small-4", "small-3", "small-3")
    caps = [cap / 100 for cap in args.caps] if small else args.caps
    layers = ["small-3:4"] if small else args.layers
    todo: Mapping[str, Callable[[], None]] = {
        "llama": lambda: capped(bench, whole, caps),
        "sites": lambda: sites(bench, whole, caps[-1]),
        "streams": lambda: streams(bench, most, 8),
        "losses": lambda: losses(bench, half, caps[0], 4),
    }

    def all_parts() -> None:
        if args.profile:
            bench.found["profile"] = found = of_file(args.profile)
            on = {name: found.pop(name) for name in ("card", "jax") if name in found}
            if on:
                python = platform.python_version()
                bench.rows["what"] |= {"cards": 1, **on, "python": python}
        for part in args.parts:
            if part == "profile":
                bench.part(part, lambda: profile(bench, layers))
            elif part.split(":")[0] in GPTS:
                model, *one = part.split(":")
                if one == [ORDERS]:
                    bench.part(part, lambda m=model: orders(bench, m, 4))
                    continue
                for whose in one or (OURS, *offload_baselines()):
                    bench.part(
                        f"{model}:{whose}",
                        lambda m=model, w=whose: gpt(bench, m, caps, w),
                    )
            elif part == "peers":
                peers(bench, args.peer)
            else:
                bench.part(part, todo[part])

    bench.run(all_parts, summary)


if __name__ == "__main__":
    main()
