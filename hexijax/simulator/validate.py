"""How far predictions are from iterations that others measured.

    python -m hexijax.simulator.validate FOLDER

    measured plans -> Case -> predict -> Row -> table; exit 1 past the limits

FOLDER is that of the public measurements, or its ``sailor`` folder. What ran there was
Megatron-DeepSpeed, so the step is played as that system makes it: in its pipeline's
order (``published.deepspeed``), its messages cut over the lane's devices, and
``MESSAGE_S`` with each. All else is the cost model as it is: layer times and links as
the folder has them, a ring's bytes for gradients, the network card shared by all cards
of a node. Nothing else is set, and the constants are the same for every row.

The order matters: of one stage's moves some wait for others, and what another order
hides shows here. Gradients are summed when a stage has run all its microbatches, since
each stage is one segment; 2 (n - 1) / n of its bytes leave each of n replicas, whether
as a ring or as ours, a reduce-scatter and an all-gather.
"""

import argparse
import collections
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hexijax.costs.borders import Carriage
from hexijax.costs.memory import plan_memory
from hexijax.errors import UserError
from hexijax.published.deepspeed import pipeline_order
from hexijax.published.sailor import Case, measured_cases
from hexijax.simulator.predict import predict

MESSAGE_S = 4e-3
"""What DeepSpeed's pipeline adds to each message beside its bytes.

At either end Python cuts or joins a partitioned tensor, and sends its shape as a
message of its own, which the receiver reads on the host before it goes on. Reckoned:
each end is about as many small calls as one layer's forward, which takes 1.5 ms where
launches are all there is (GH200, degree 4, two samples), so 3 ms; and the device starts
from nothing after each read. Seen: each of three GH200 pipelines alone would say 2.3,
3.9 and 4.2 ms. From 2.5 to 4.5 ms the mean error over GH200 is 6.5 to 7.5%. On the
mixed nodes, whose messages take 150 ms, it hardly counts: 3.1 to 3.3%."""

DEEPSPEED = Carriage(in_parts=True, message_s=MESSAGE_S)
"""A rank sends its part of the border, and the receiving ranks gather the parts."""

MIXED, EVEN = "mixed kinds", "one kind"
LIMITS = {MIXED: 0.05, EVEN: 0.07}
"""Largest mean error of a group; measured again, the same GH200 plans differ by 5%."""

RANKING_LIMIT = 0.04
"""How much slower than the best measured plan the one ranked first may be."""

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured plan and what is predicted of it."""

    name: str
    """Its id."""

    group: str
    """Whether its cards are of several kinds."""

    measured_s: float
    """Seconds of an iteration."""

    predicted_s: float
    """The same, played."""

    valid: bool
    """False: the data's keepers reject it; it is shown and counts nowhere."""

    contest: tuple[object, ...]
    """Rows that are equal here are plans for the same cards and batch."""

    promised_bytes: int
    """Peak on the fullest device, by this project's memory model and runtime."""

    peak_bytes: int | None
    """Peak measured, the driver's context included; None where it is in doubt."""

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_s / self.measured_s - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Plans for the same cards and batch, of which one is predicted to be fastest."""

    first: Row
    """Ranked first."""

    best: Row
    """Measured fastest."""

    num_plans: int
    """How many there are."""

    @property
    def loss(self) -> float:
        """How much slower the plan ranked first was than the best."""
        return self.first.measured_s / self.best.measured_s - 1


def rows(folder: Path) -> list[Row]:
    """Every measured plan of the folder, predicted."""
    return [_row(case) for case in measured_cases(folder)]


def _row(case: Case) -> Row:
    record = case.record
    timeline = predict(
        case.plan,
        case.chain,
        case.cluster,
        events=False,
        carriage=DEEPSPEED,
        order=pipeline_order,
    )
    kinds = collections.Counter(device.kind for device in case.cluster.devices)
    parts = plan_memory(case.plan, case.chain, case.cluster)
    doubted = record["peak_memory_caveat"] or record["suspect"]
    return Row(
        name=case.name,
        group=MIXED if len(kinds) > 1 else EVEN,
        measured_s=record["iteration_s"],
        predicted_s=timeline.step_s,
        valid=not record["suspect"],
        contest=(case.chain.name, record["global_batch"], tuple(sorted(kinds.items()))),
        promised_bytes=max(part.total_bytes for part in parts.values()),
        peak_bytes=None if doubted else record["peak_memory_bytes"],
    )


def mean_errors(found: Iterable[Row]) -> dict[str, float]:
    """Mean of the absolute errors of each group's valid rows."""
    by_group: dict[str, list[float]] = {}
    for row in found:
        if row.valid:
            by_group.setdefault(row.group, []).append(abs(row.error))
    return {group: statistics.fmean(errors) for group, errors in by_group.items()}


def rankings(found: Iterable[Row]) -> list[Ranking]:
    """One for each set of cards and batch with several valid plans."""
    contests: dict[tuple[object, ...], list[Row]] = {}
    for row in found:
        if row.valid:
            contests.setdefault(row.contest, []).append(row)
    return [
        Ranking(
            first=min(plans, key=lambda row: row.predicted_s),
            best=min(plans, key=lambda row: row.measured_s),
            num_plans=len(plans),
        )
        for plans in contests.values()
        if len(plans) > 1
    ]


def faults(found: Sequence[Row]) -> list[str]:
    """What is past its limit, for people."""
    said = [
        f"The mean error over {group} is {error:.2%}; the limit is {LIMITS[group]:.0%}."
        for group, error in mean_errors(found).items()
        if error > LIMITS[group]
    ]
    return said + [
        f"{r.first.name} is ranked first of {r.num_plans} plans for the same cards and "
        f"was {r.loss:.1%} slower than {r.best.name}; the limit is {RANKING_LIMIT:.0%}."
        for r in rankings(found)
        if r.loss > RANKING_LIMIT
    ]


def table(found: Sequence[Row]) -> str:
    """All rows, the mean of each group, and the rankings."""
    width = max(len(row.name) for row in found)
    head = f"{'plan':{width}}  measured s  predicted s    error  peak GiB  promised GiB"
    lines = [head]
    for row in found:
        peak = "in doubt" if row.peak_bytes is None else f"{row.peak_bytes / GIB:8.1f}"
        lines.append(
            f"{row.name:{width}}  {row.measured_s:10.4f}  {row.predicted_s:11.4f}  "
            f"{row.error:+7.1%}  {peak}  {row.promised_bytes / GIB:12.1f}"
            f"{'' if row.valid else '  suspect, not counted'}"
        )
    lines.append("")
    for group, error in mean_errors(found).items():
        count = sum(row.valid and row.group == group for row in found)
        limit = f"limit {LIMITS[group]:.0%}"
        lines.append(f"mean error, {group}: {error:.2%} of {count} rows ({limit})")
    lines += [
        f"ranked first of {r.num_plans}: {r.first.name}, {r.loss:.1%} slower than the "
        f"best (limit {RANKING_LIMIT:.0%})"
        for r in rankings(found)
    ]
    lines.append(
        "promised: by this project's runtime, which divides optimizer states; the "
        "peaks are of a system that keeps them whole"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 0 within the limits, 1 past them, 2 if it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m hexijax.simulator.validate",
        description="Compares predicted steps with iterations that others measured.",
    )
    parser.add_argument("folder", type=Path, help="public measurements, or its sailor/")
    try:
        found = rows(parser.parse_args(arguments).folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found))
    said = faults(found)
    for fault in said:
        print(fault, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
