"""AutoHet (arXiv 2512.20953): A100, H800 and H20 in pairs and all three, 7 to 30 B.

    python -m experiments.golden autohet

Published: up to 1.79 times the throughput of Megatron-LM and Whale. Those train on the
cards they are given, so here both are planned twice, on every card and free to leave
some out; only the first is what was published. Sizes of clusters, batch and links are
assumed: spot cards come in uneven numbers, so some clusters are uneven.

The last columns are AutoHet's other point: the plan that fills memory most is not the
fastest. It is the fullest that fits of ours, the runners-up, the baselines' and those
one number away from them.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from experiments.golden.machines import make_cluster
from experiments.golden.problem import Problem, baseline, found, step_s
from experiments.golden.table import Check, Figure, Row, Table, ratio
from hexijax.layers.known import known
from hexijax.plan.plan import Plan
from hexijax.planner.judge import Judge
from hexijax.planner.refine import variants
from hexijax.planner.search import Found

MODELS = {
    "llama-2-7b": {"length": 2048},
    "llama-2-13b": {"length": 2048},
    "llama-30b": {"length": 2048},
}
A100, H800, H20 = "a100-80g-sxm", "h800-80g-sxm", "h20-96g-sxm"
CLUSTERS: tuple[Mapping[str, int], ...] = (
    {A100: 4, H800: 4},
    {A100: 5, H800: 3},
    {A100: 8, H800: 8},
    {A100: 4, H20: 4},
    {A100: 8, H20: 8},
    {H800: 4, H20: 4},
    {H800: 8, H20: 8},
    {A100: 3, H800: 5, H20: 4},
    {A100: 8, H800: 8, H20: 8},
)
BATCH_SIZE = 256
"""Sequences of a step."""

BETWEEN_BYTES_PER_S = 25e9
"""A network card of 200 Gbit/s for each node."""

LIMIT = 1.79
"""Times the step of Megatron-style or Whale-style over ours, at its greatest."""

RIVALS = ("megatron-style", "whale-style")
COLUMNS = (
    "step_s",
    "megatron",
    "whale",
    "megatron_any",
    "whale_any",
    "autohet_any",
    "full",
    "fullest",
    "fullest_x",
)


def make_table(
    models: Sequence[str] = tuple(MODELS),
    clusters: Sequence[Mapping[str, int]] = CLUSTERS,
) -> Table:
    """A row for each model on each cluster."""
    rows = tuple(
        compare(
            Problem(
                chain=known(model, **MODELS[model]),
                cluster=make_cluster(counts, BETWEEN_BYTES_PER_S),
                batch_size=BATCH_SIZE,
            )
        )
        for model in models
        for counts in clusters
    )
    every, free = _ratios(rows, ""), _ratios(rows, "_any")
    autohet = [x for row in rows if (x := row.figures["autohet_any"]) is not None]
    return Table(
        title="AutoHet: A100, H800 and H20, 7 to 30 B; steps over ours",
        columns=COLUMNS,
        rows=rows,
        checks=(
            Check(
                what="greatest ratio of Megatron-style and Whale-style, on all cards",
                found=max(every, default=None),
                limit=LIMIT,
                published=LIMIT,
            ),
            Check(
                what="least ratio of any row, AutoHet-style included",
                found=min([*every, *free, *autohet], default=None),
                limit=1.0,
            ),
        ),
        notes=(
            f"mean ratio {statistics.fmean(every):.3f} on all cards, "
            f"{statistics.fmean(free):.3f} where they are free to leave cards out "
            f"(there at most {max(free):.3f})",
            f"{BATCH_SIZE} sequences of 2048, one kind a node of up to eight, "
            f"{BETWEEN_BYTES_PER_S / 1e9:g} GB/s between nodes: assumed",
            "full, fullest: promised over usable memory of all cards, by our plan and "
            "by the fullest one, whose step over ours is fullest_x",
        ),
    )


def _ratios(rows: Sequence[Row], suffix: str) -> list[float]:
    names = ("megatron" + suffix, "whale" + suffix)
    return [
        figure
        for row in rows
        for name in names
        if (figure := row.figures[name]) is not None
    ]


def compare(problem: Problem) -> Row:
    """Ours, the rivals on every card and as they like, and the fullest plan."""
    made = found(problem)
    mine = step_s(made.plan) if made else None
    whole = problem.change(use_all_devices=True)
    every = {name: baseline(name, whole) for name in RIVALS}
    free = {name: baseline(name, problem) for name in (*RIVALS, "autohet-style")}

    def over_ours(plan: Plan | None) -> Figure:
        return ratio(step_s(plan), mine)

    figures: dict[str, Figure] = {"step_s": mine}
    for name, plan in every.items():
        figures[name.removesuffix("-style")] = over_ours(plan)
    for name, plan in free.items():
        figures[name.removesuffix("-style") + "_any"] = over_ours(plan)
    if made:
        plans = [plan for plan in (*every.values(), *free.values()) if plan]
        full, fullest, fullest_s = _fullest(problem, made, plans)
        figures |= {
            "full": full,
            "fullest": fullest,
            "fullest_x": ratio(fullest_s, mine),
        }
    return Row(name=f"{problem.chain.name} on {problem.cluster.name}", figures=figures)


def _fullest(
    problem: Problem, made: Found, others: Sequence[Plan]
) -> tuple[float, float, float]:
    """How full ours is, how full the fullest is, and its step."""
    judge = Judge(problem.chain, problem.cluster, problem.options)
    usable = sum(device.usable_memory_bytes for device in problem.cluster.devices)

    def fullness(plan: Plan) -> float:
        held = judge.memory_bytes(plan)
        return sum(held.values()) / usable if judge.fits(plan) else 0.0

    some = [*_near(made, others, problem)]
    best = max(some, key=fullness)
    mine = dataclasses.replace(made.plan, prediction=None)
    return fullness(mine), fullness(best), judge.step_s(best)


def _near(made: Found, others: Sequence[Plan], problem: Problem) -> Iterator[Plan]:
    for plan in (made.plan, *made.runners_up, *others):
        plain = dataclasses.replace(plan, prediction=None)
        yield plain
        for variant in variants(plain, problem.options):
            if all(replica.samples > 0 for replica in variant.replicas):
                yield variant
