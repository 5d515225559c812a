"""HexiScale's five FLOPs-matched cases: unlike cards against as many FLOP/s of A100.

    python -m experiments.golden matched        (needs HEXIJAX_DATA)

Both clusters are planned by us, under the nominal peaks of the published device table,
their machines joined at its 0.7 GB/s; utilisation is over all cards, those left out
included. What is held against the published figure is how much of it the mixed cluster
loses. Batches are not published: 256 sequences here.
"""

import os
import statistics

from experiments.golden.problem import Problem, mfu, ours, step_s
from experiments.golden.table import Check, Row, Table
from hexijax.errors import UserError
from hexijax.layers.known import known
from hexijax.planner.bound import bound_s
from hexijax.published import hexiscale

DATA = "HEXIJAX_DATA"
"""Environment variable: the folder of public measurements."""

BATCH_SIZE = 256
MODELS = {
    "Llama-2-7B": "llama-2-7b",
    "Llama-2-13B": "llama-2-13b",
    "Llama-30B": "llama-30b",
}
COLUMNS = ("mixed_s", "even_s", "mixed_mfu", "even_mfu", "gap", "published")


def cases() -> list[hexiscale.HexiscaleCase]:
    """The five that are matched by FLOP/s."""
    if not os.environ.get(DATA):
        raise UserError(
            f"The FLOPs-matched cases were asked for and {DATA} is not set; it names "
            "the folder that holds hexiscale/cases.json. Set it, or leave `matched` "
            "out."
        )
    found = hexiscale.cases(os.environ[DATA])
    return [case for case in found if case.gap_mfu is not None]


def make_table() -> Table:
    """A row and a check for every case."""
    done = [compare(case) for case in cases()]
    gaps = [row.figures["gap"] or 0.0 for row, _ in done]
    checks = tuple(check for _, check in done)
    return Table(
        title="HexiScale: mixed cards against A100 of as many nominal FLOP/s",
        columns=COLUMNS,
        rows=tuple(row for row, _ in done),
        checks=checks,
        notes=(
            f"mean gap {statistics.fmean(gaps):.3f}",
            f"{BATCH_SIZE} sequences of 4096, {hexiscale.BETWEEN_BYTES_PER_S / 1e9:g} "
            "GB/s between machines on either side; in brackets: share of the bound, "
            "mixed and even",
        ),
    )


def compare(case: hexiscale.HexiscaleCase) -> tuple[Row, Check]:
    """One case, both clusters planned by us."""
    chain = known(MODELS[case.model], length=4096)
    sides = [
        Problem(chain=chain, cluster=cluster, batch_size=BATCH_SIZE)
        for cluster in (case.cluster, case.baseline)
    ]
    plans = [ours(side) for side in sides]
    mixed, even = plans
    assert mixed, "the published system trained on these cards"
    assert even, "the published system trained on these cards"
    used = [mfu(side, plan) for side, plan in zip(sides, (mixed, even), strict=True)]
    gap = used[1] - used[0]
    record = case.record
    near = [
        bound_s(side.chain, side.cluster, batch_size=BATCH_SIZE, dtype="bfloat16")
        / (step_s(plan) or 1.0)
        for side, plan in zip(sides, (mixed, even), strict=True)
    ]
    row = Row(
        name=case.name,
        figures={
            "mixed_s": step_s(mixed),
            "even_s": step_s(even),
            "mixed_mfu": used[0],
            "even_mfu": used[1],
            "gap": gap,
            "published": case.gap_mfu,
        },
        note=f"({near[0]:.2f}, {near[1]:.2f}); published mixed "
        f"{record['heterogeneous_mfu']:.3f}, even {record['baseline_mfu']:.3f}",
    )
    assert case.gap_mfu is not None
    check = Check(
        what=f"{case.name}: utilisation lost to the even cluster",
        found=gap,
        limit=case.gap_mfu,
        at_least=False,
        published=case.gap_mfu,
    )
    return row, check
