"""HetHub (arXiv 2405.16256): 140 B on 768 cards of two vendors, and six small mixes.

    python -m experiments.golden hethub        (hundreds of CPU seconds)
    python -m experiments.golden hethub-files  (the six alone)

Published: 97.49% of the bound on 640 cards of 'A' and 128 of AMD, the bound being what
each kind's cards train alone, summed. 'A' is taken for an A100-80 and AMD for a MI210.
Both sides are planned by us, so a ratio above 1 means that kinds are better together:
one kind's memory or place in the pipeline serves the other.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.golden.machines import make_cluster
from experiments.golden.problem import Problem, devices, ours, step_s
from experiments.golden.table import Check, Row, Table
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.layers.known import known
from hexijax.planner.bound import bound_s

FOLDER = Path(__file__).parents[1] / "clusters/hethub"
FILES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
COUNTS = {"a100-80g-sxm": 640, "mi210-64g": 128}
BETWEEN_BYTES_PER_S = 25e9
"""A network card of 200 Gbit/s for each node; not published."""

BATCH_SIZE, SMALL_BATCH_SIZE = 4096, 512
"""Sequences of a step; not published."""

LIMIT, PUBLISHED = 0.975, 0.9749
"""Of the bound."""

COLUMNS = ("cards", "step_s", "per_s", "of_bound", "of_ideal")


def make_table() -> Table:
    """140 B on 768 cards."""
    cluster = make_cluster(COUNTS, BETWEEN_BYTES_PER_S)
    chain = known("llama-140b", length=2048)
    rows = tuple(_rows(chain, cluster, BATCH_SIZE))
    return Table(
        title="HetHub: Llama 140 B on 640 A100-80 and 128 MI210",
        columns=COLUMNS,
        rows=rows,
        checks=(
            Check(
                what="both together, of what each kind's cards train alone",
                found=rows[-1].figures["of_bound"],
                limit=LIMIT,
                published=PUBLISHED,
            ),
        ),
        notes=(
            f"{BATCH_SIZE} sequences of 2048, {BETWEEN_BYTES_PER_S / 1e9:g} GB/s "
            "between nodes: assumed",
            IDEAL,
        ),
    )


def make_small_table(files: Sequence[str] = FILES) -> Table:
    """13 B on each of the six cluster files; printed, held against nothing."""
    chain = known("llama-2-13b", length=2048)
    rows = tuple(
        row
        for name in files
        for row in _rows(
            chain, Cluster.from_toml(FOLDER / f"{name}.toml"), SMALL_BATCH_SIZE
        )
    )
    return Table(
        title="HetHub: Llama-2 13B on six mixes, a node of eight cards of each kind",
        columns=COLUMNS,
        rows=rows,
        checks=(),
        notes=(f"{SMALL_BATCH_SIZE} sequences of 2048", IDEAL),
    )


IDEAL = (
    "of_bound is over the sum of what each kind trains alone, as HetHub counts; "
    "of_ideal over every card computing all the time"
)


def _rows(chain: Chain, cluster: Cluster, batch_size: int) -> Iterator[Row]:
    """Each kind alone, then all together."""
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    alone_per_s = 0.0
    for kind in kinds:
        others = [
            node.name
            for node in cluster.nodes
            if cluster.device(f"{node.name}/0").kind != kind
        ]
        row = _row(kind, chain, cluster.without(*others), batch_size)
        alone_per_s += row.figures["per_s"] or 0.0
        yield row
    between = cluster.link(cluster.nodes[0].name + "/0", cluster.nodes[-1].name + "/0")
    name = f"{cluster.name}, {between.bytes_per_s / 1e9:g} GB/s"
    yield _row(name, chain, cluster, batch_size, alone_per_s)


def _row(
    name: str,
    chain: Chain,
    cluster: Cluster,
    batch_size: int,
    alone_per_s: float | None = None,
) -> Row:
    plan = ours(Problem(chain=chain, cluster=cluster, batch_size=batch_size))
    if plan is None:
        return Row(name=name, figures={}, note="does not fit")
    seconds = step_s(plan)
    assert seconds is not None
    ideal_s = bound_s(chain, cluster, batch_size=batch_size, dtype="bfloat16")
    per_s = batch_size / seconds
    return Row(
        name=name,
        figures={
            "cards": float(len(devices(plan))),
            "step_s": seconds,
            "per_s": per_s,
            "of_bound": per_s / alone_per_s if alone_per_s else None,
            "of_ideal": ideal_s / seconds,
        },
    )
