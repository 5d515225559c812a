"""HexiScale's case study: Llama-2 13B on 3 A800, 3 RTX 4090 and 2 RTX 3090.

    python -m experiments.golden hexiscale

Published: 25.55 s against 41.52 s of the best symmetric plan on the same eight cards,
1.6 times. Memory decides what symmetric plans there are. HexiScale's planner counts
four arrays of two bytes for each parameter; we train with two bytes of parameter, four
of gradient and twelve of Adam's state, and so much fits no symmetric plan. So both
sides are planned twice: as we train, and without moments (ten bytes a parameter, the
nearest to their eight).
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments.golden.draws import drawn_steps_s
from experiments.golden.problem import Problem, baseline, devices, ours, step_s
from experiments.golden.symmetric import closest, lifted, symmetric
from experiments.golden.table import Check, Figure, Row, Table, ratio
from hexijax.cluster import Cluster
from hexijax.layers.known import known
from hexijax.plan.plan import Plan
from hexijax.report.limits import faster_kind

CLUSTER = Path(__file__).parents[1] / "clusters/hexiscale.toml"
BATCH_SIZES = (64, 32, 128)
"""Sequences of a step; not published. Most rows are of the first."""

LIMIT, PUBLISHED = 1.6, 41.52 / 25.55
"""Times that a symmetric step takes of ours."""

FACTORS = (0.8, 1.2)
"""On one kind's speed at a time."""

NO_MOMENTS = 0
SEED, DRAWS = 0, 60
COLUMNS = ("step_s", "ratio", "cards")


def make_table() -> Table:
    """All rows and checks."""
    case = Problem(
        chain=known("llama-2-13b", length=4096),
        cluster=Cluster.from_toml(CLUSTER),
        batch_size=BATCH_SIZES[0],
    )
    rows: list[Row] = []
    checks: list[Check] = []
    for batch_size in BATCH_SIZES:
        problem = dataclasses.replace(case, batch_size=batch_size)
        for bytes_each, moments in ((18, 2), (10, NO_MOMENTS)):
            name = f"{batch_size} sequences, {bytes_each} bytes a parameter"
            found = _against_symmetric(name, problem.change(moments=moments))
            rows += found.rows
            checks += found.checks
    rows += _lifted(case)
    rows += _others(case.change(moments=NO_MOMENTS))
    for kind, factor, cluster in _faster(case.cluster):
        problem = dataclasses.replace(case, cluster=cluster)
        name = f"{kind} at {factor:g} of its speed, 10 bytes"
        found = _against_symmetric(name, problem.change(moments=NO_MOMENTS))
        rows += found.rows
        checks += found.checks
    return Table(
        title="HexiScale: Llama-2 13B on 3x A800, 3x 4090, 2x 3090, sequence 4096",
        columns=COLUMNS,
        rows=tuple(rows),
        checks=tuple(checks),
        notes=(
            _why_none(case),
            "ratio is the row's step over ours of the same batch and bytes; `any "
            "cards` may leave some out, as ours may",
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]


def _against_symmetric(name: str, problem: Problem) -> _Found:
    mine = ours(problem)
    others = {
        "symmetric, all cards": symmetric(problem, every_card=True),
        "symmetric, any cards": symmetric(problem, every_card=False),
    }
    return _Found(
        rows=(
            _row(f"{name}: ours", mine, mine),
            *(_row(f"{name}: {what}", plan, mine) for what, plan in others.items()),
        ),
        checks=tuple(
            Check(
                what=f"{name}: {what} over ours",
                found=ratio(step_s(plan), step_s(mine)),
                limit=LIMIT,
                published=round(PUBLISHED, 3),
            )
            for what, plan in others.items()
        ),
    )


def _lifted(case: Problem) -> Iterator[Row]:
    """What symmetric plans would take with room for anything, ours without it."""
    room, mine = dataclasses.replace(case, cluster=lifted(case.cluster)), ours(case)
    for what, every_card in (("all cards", True), ("any cards", False)):
        plan = symmetric(room, every_card=every_card)
        name = f"{case.batch_size} sequences: symmetric, {what}, memory lifted"
        note = f"needs {_most_gb(plan):.0f} GB on a card" if plan else ""
        yield _row(name, plan, mine, note)


def _others(problem: Problem) -> Iterator[Row]:
    """What each freedom is worth, without moments: HexiScale's ablations."""
    mine = ours(problem)
    name = f"{problem.batch_size} sequences, 10 bytes a parameter"
    plan = _even_search(problem)
    yield _row(f"{name}: our search, symmetric only", plan, mine)
    yield _row(f"{name}: HexiScale-style", baseline("hexiscale-style", problem), mine)
    steps = drawn_steps_s(problem, seed=SEED, draws=DRAWS)
    kept = f"{len(steps)} of {DRAWS} draws fit"
    for what, seconds in (
        ("best", min(steps, default=None)),
        ("median", statistics.median(steps) if steps else None),
    ):
        figures: Mapping[str, Figure] = {
            "step_s": seconds,
            "ratio": ratio(seconds, step_s(mine)),
            "cards": float(len(problem.cluster.devices)),
        }
        yield Row(name=f"{name}: random grouping, {what}", figures=figures, note=kept)


def _even_search(problem: Problem) -> Plan | None:
    """Our search where each stage must have as many layers, at each tensor degree.

    On devices alone: HexiScale puts nothing in host memory, and looking for what goes
    there where nothing else fits takes most of the time.
    """
    problem = problem.change(offload=False)
    num_layers = len(problem.chain.layers)
    found: list[Plan] = []
    for count in range(1, len(problem.cluster.devices) + 1):
        edges = [num_layers * k // count for k in range(count + 1)]
        split = tuple(b - a for a, b in itertools.pairwise(edges))
        for degree in (1, 2):
            plan = ours(
                problem.change(layers_per_stage=(split,), tensor_degrees=(degree,))
            )
            found += [plan] if plan else []
    return min(found, key=lambda plan: step_s(plan) or 0.0, default=None)


def _faster(cluster: Cluster) -> Iterator[tuple[str, float, Cluster]]:
    for profile in cluster.profiles:
        for factor in FACTORS:
            yield profile.kind, factor, faster_kind(cluster, profile.kind, factor)


def _row(name: str, plan: Plan | None, mine: Plan | None, note: str = "") -> Row:
    figures: Mapping[str, Figure] = {
        "step_s": step_s(plan),
        "ratio": ratio(step_s(plan), step_s(mine)),
        "cards": float(len(devices(plan))) if plan else None,
    }
    return Row(name=name, figures=figures, note=note if plan else "none fits")


def _most_gb(plan: Plan) -> float:
    assert plan.prediction
    return max(plan.prediction.memory_bytes.values()) / 1e9


def _why_none(case: Problem) -> str:
    """The symmetric plan that lacks least, in bytes."""
    plan, held = closest(case)
    name = max(held, key=lambda n: held[n] / _usable(case.cluster, n))
    return (
        f"at 18 bytes a parameter no symmetric plan fits: the one that lacks least, "
        f"over {len(devices(plan))} cards at full remat and one sequence a microbatch, "
        f"needs {held[name]:,} bytes on {name}, which has "
        f"{_usable(case.cluster, name):,}; all eight in equal parts hold "
        f"{18 * case.chain.num_params // 8:,} each before any activation"
    )


def _usable(cluster: Cluster, name: str) -> int:
    return cluster.device(name).usable_memory_bytes
