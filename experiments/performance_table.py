"""docs/performance.md, from what the benchmarks have written.

    docs/measured/*.json (one run each) -> tables and targets, as Markdown

Run:     python -m experiments.performance_table docs/measured > docs/performance.md
Needs:   nothing; a new run is a new file in the folder
Expect:  the page as it is committed, which tests/docs holds it to
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cold import table as cold
from experiments.emulated import table as emulated
from experiments.equal import table as equal
from experiments.islanded import table as islanded
from experiments.offloaded import table as offloaded
from experiments.predicted import table as predicted

PLAIN, ONE, PLAIN_AGAIN = "plain", "one card", "plain again"
LANES = "4 lanes"
PIPELINE = "pipeline of 4"
MIXED = "card and CPU"
DRAWN = "drawn plans"
EMULATED = "emulated"
OFFLOAD = "offload"
ISLANDS = "islands"
PREDICTED = "predicted"
EQUAL = "equal"
COLD = "cold"

ASKED_BY = {
    "one": (PLAIN, ONE, PLAIN_AGAIN),
    "lanes": (LANES,),
    "pipeline": (PIPELINE,),
    "mixed": (MIXED,),
}
"""Words of bench_llama's command, and the rows each makes."""

HEAD = """\
# Performance

Written by `python -m experiments.performance_table docs/measured > docs/performance.md`
from the files in `docs/measured`, each of which one run of a benchmark has written.
Nothing here was measured on unlike cards; equal ones have been made unlike.

The model of the speed tables is a Llama of 1.35 billion parameters (24 layers, width
2048, feed-forward 5504, vocabulary 32000) in bfloat16 with fp32 master weights and
AdamW, on random tokens: sequences of 2048, 16 a card and step. Plain JAX is
`experiments/peers/plain_llama.py`: one `jit` a microbatch over the whole model, on one
card. A step's time is the median of 8, from the end of one to the end of the next,
beside the least and the most; an end that is seen late makes the next interval short.
Model FLOPs are 6 a parameter and token and causal attention's; what is recomputed does
not count."""

ABOUT_PIPELINE = """\
16 microbatches of 4 sequences. The ideal is 1F1B in which nothing takes time but the
stages' own forward and backward, measured on one card in plain JAX, 16 in a row as the
pipeline runs them: no optimizer, no sums of gradients, no transfers. *Apart*: a forward
that returns what its backward needs, and a backward that takes it, as every pipeline
must; the last stage is one program. *Together*: forward and backward in one program,
less the forward alone; no pipeline can run so, it bounds them all. The weights and
activations are random: on equal numbers a card draws less power, keeps its clocks up
and would be a seventh faster."""

ABOUT_MIXED = """\
A pipeline whose first stage is on the card and whose second is on the CPU, in fp32 with
the highest matmul precision, against the plain program on the CPU. The limit of each
leaf's gradient error is 1e-5 of its norm plus 1e-7 of the global norm. Worst error over
its limit:"""

ABOUT_DRAWN = """\
Llamas of 1024 to 4096 features on one card, in bfloat16 with AdamW; length,
microbatches, schedule, segments and remat of the layers are drawn too. *Promised* is
what the planner says the plan takes, before anything is compiled; the peak is that of
`memory_stats` over three steps. Seconds are predicted from the data sheet."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one file holds."""

    what: Mapping[str, Any]
    """Card, versions, date and command."""

    rows: Mapping[str, Mapping[str, Any]]
    """Results by name."""

    def source(self) -> str:
        """Where its figures come from."""
        what = self.what
        facts = [f"A host with {what['cards']} x {what['card']}", f"JAX {what['jax']}"]
        if "python" in what:
            facts.append(f"Python {what['python']}")
        if "driver" in what:
            facts.append(f"driver {what['driver']}")
        lines = [f"{', '.join(facts)}, {what['date']}:", "", f"    {what['command']}"]
        if missing := self._missing():
            lines += ["", f"The command's other rows are not in the file: {missing}."]
        return "\n".join(lines)

    def _missing(self) -> str:
        words = self.what["command"].split()
        if "experiments.bench_llama" not in words:
            return ""
        asked = [row for word in words for row in ASKED_BY.get(word, ())]
        return "; ".join(row for row in asked if row not in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A figure that was aimed at."""

    name: str
    """What is compared with what."""

    measured: float
    """The figure."""

    bound: float
    """What was aimed at."""

    at_most: bool = False
    """Whether lower is better."""

    run: Run
    """Where it was measured."""

    cards: int
    """How many cards it took."""

    @property
    def reached(self) -> bool:
        """Whether it holds."""
        if self.at_most:
            return self.measured <= self.bound
        return self.measured >= self.bound

    def row(self) -> str:
        """Its line of the table."""
        digits = 0 if self.bound >= 10 else 3
        sign = "<=" if self.at_most else ">="
        answer = "reached" if self.reached else "**not reached**"
        card = f"{self.cards} x {self.run.what['card']}"
        return (
            f"| {self.name} | {self.measured:.{digits}f} | {sign} {self.bound:g} "
            f"| {answer} | {card} | `{self.run.what['command']}` |"
        )


def read_runs(folder: Path) -> list[Run]:
    """The runs in ``folder``, by file name."""
    runs = []
    for file in sorted(folder.glob("*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))
        runs.append(Run(what=rows.pop("what"), rows=rows))
    return runs


def targets(runs: Sequence[Run]) -> Iterator[Target]:
    """All targets that the runs have figures for."""
    for run in runs:
        if ONE in run.rows:
            yield from _one_card_targets(run)
        if LANES in run.rows:
            four = run.rows[LANES]["tokens_per_s"]
            yield Target(
                name=f"{LANES}: part of four times one card",
                measured=four / (4 * run.rows[ONE]["tokens_per_s"]),
                bound=0.97,
                run=run,
                cards=4,
            )
        if PIPELINE in run.rows:
            yield Target(
                name=f"{PIPELINE}: part of ideal 1F1B, stages apart",
                measured=run.rows[PIPELINE]["fraction_of_ideal_apart"],
                bound=0.97,
                run=run,
                cards=4,
            )
        if MIXED in run.rows:
            yield Target(
                name=f"{MIXED}: worst gradient error over its limit",
                measured=run.rows[MIXED]["worst_error_over_limit"],
                bound=1,
                at_most=True,
                run=run,
                cards=1,
            )
        if DRAWN in run.rows:
            ratios = [x["promised_bytes"] / x["peak_bytes"] for x in _drawn(run)]
            for word, measured, bound in (
                ("least", min(ratios), 1),
                ("most", max(ratios), 1.08),
            ):
                yield Target(
                    name=f"{len(ratios)} {DRAWN}: promised memory over peak, {word}",
                    measured=measured,
                    bound=bound,
                    at_most=word == "most",
                    run=run,
                    cards=1,
                )

        for figure in (
            *emulated.figures(run.rows.get(EMULATED, {})),
            *offloaded.figures(run.rows.get(OFFLOAD, {})),
            *islanded.figures(run.rows.get(ISLANDS, {})),
            *predicted.figures(run.rows.get(PREDICTED, {})),
            *equal.figures(run.rows.get(EQUAL, {})),
            *cold.figures(run.rows.get(COLD, {})),
        ):
            yield Target(**figure._asdict(), run=run, cards=run.what["cards"])


def _drawn(run: Run) -> Sequence[Mapping[str, Any]]:
    plans: Sequence[Mapping[str, Any]] = run.rows[DRAWN]["plans"]
    return plans


def _one_card_targets(run: Run) -> Iterator[Target]:
    rows = run.rows
    yield Target(
        name=f"{ONE}: model TFLOP/s",
        measured=rows[ONE]["model_tflops"],
        bound=500,
        run=run,
        cards=1,
    )
    plain = max(rows[name]["tokens_per_s"] for name in (PLAIN, PLAIN_AGAIN))
    yield Target(
        name=f"{ONE}: part of plain JAX (its better run)",
        measured=rows[ONE]["tokens_per_s"] / plain,
        bound=0.98,
        run=run,
        cards=1,
    )


def target_table(runs: Sequence[Run]) -> str:
    """Every target, what was measured, and how; the README shows it too."""
    lines = [
        "| what | measured | target | | cards | command |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [target.row() for target in targets(runs)])


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    parts = [HEAD, "## Targets", target_table(runs)]
    for title, section in (
        ("One card beside plain JAX", _one_card),
        ("Four cards, a lane each", _lanes),
        ("Four cards, a stage each", _pipeline),
        ("A card and the CPU in one process", _mixed),
        ("Equal cards made unlike", _emulated),
        ("State and parameters in host memory", _offloaded),
        ("Islands on one host", _islands),
        ("Two equal cards", _equal),
        ("What plans promise", _promises),
        ("Predicted before it was measured", _predicted),
        ("From a cold start", _cold),
    ):
        found = [lines for run in runs if (lines := list(section(run)))]
        if found:
            parts.append(f"## {title}")
            parts += ["\n".join(lines) for lines in found]
    return "\n\n".join(parts)


def _speeds(rows: Mapping[str, Mapping[str, Any]], ratio: str) -> Iterator[str]:
    """A table of speeds; ``ratio`` heads the last column."""
    yield (
        "| | tokens/s | model TFLOP/s | step, median | least | most "
        f"| memory peak | {ratio} |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        times = " | ".join(f"{row[k]:.3f} s" for k in ("step_s", "least_s", "most_s"))
        peak = f"{row['peak_gib']:.1f} GiB" if "peak_gib" in row else "not read"
        yield (
            f"| {name} | {row['tokens_per_s']:,.0f} | {row['model_tflops']:,.0f} "
            f"| {times} | {peak} | {row['ratio']} |"
        )


def _one_card(run: Run) -> Iterator[str]:
    if ONE not in run.rows:
        return
    rate = run.rows[ONE]["tokens_per_s"]
    rows = {
        name: {
            **run.rows[name],
            "ratio": ""
            if name == ONE
            else f"{rate / run.rows[name]['tokens_per_s']:.3f}",
        }
        for name in (PLAIN, ONE, PLAIN_AGAIN)
    }
    yield from _speeds(rows, "one card over it")
    yield ""
    yield "Plain JAX ran before and after, in the same process on the same card."
    yield ""
    yield run.source()


def _lanes(run: Run) -> Iterator[str]:
    if LANES not in run.rows:
        return
    row, whole = run.rows[LANES], 4 * run.rows[ONE]["tokens_per_s"]
    ratio = f"{row['tokens_per_s'] / whole:.3f}"
    yield from _speeds({LANES: {**row, "ratio": ratio}}, "over four times one card")
    yield ""
    yield (
        f"Four times one card is {whole:,.0f} tokens/s, by the run above. All layers "
        "are compiled as\none. The peak is the fullest card's."
    )
    yield ""
    yield run.source()


def _pipeline(run: Run) -> Iterator[str]:
    if PIPELINE not in run.rows:
        return
    row = run.rows[PIPELINE]
    ratio = f"{row['fraction_of_ideal_apart']:.3f}"
    yield from _speeds({PIPELINE: {**row, "ratio": ratio}}, "of ideal, apart")
    yield ""
    yield (
        "| one microbatch | ideal step | part of it | "
        + " | ".join(f"stage {s}, forward + backward" for s in range(4))
        + " |"
    )
    yield "|---|---|---|---|---|---|---|"
    for how in ("apart", "together"):
        stages = " | ".join(
            f"{forward_s * 1e3:.2f} + {backward_s * 1e3:.2f} ms"
            for forward_s, backward_s in row[f"stages_{how}_s"]
        )
        yield (
            f"| {how} | {row[f'ideal_{how}_s']:.3f} s "
            f"| {row[f'fraction_of_ideal_{how}']:.3f} | {stages} |"
        )
    yield ""
    yield ABOUT_PIPELINE
    yield ""
    yield run.source()


def _mixed(run: Run) -> Iterator[str]:
    if MIXED not in run.rows:
        return
    worst = run.rows[MIXED]["worst_error_over_limit"]
    yield f"{ABOUT_MIXED} {worst:.3f}."
    yield ""
    yield run.source()


def _promises(run: Run) -> Iterator[str]:
    if DRAWN not in run.rows:
        return
    yield ABOUT_DRAWN
    yield ""
    yield "| plan | promised | peak | over it | predicted | measured | over it |"
    yield "|---|---|---|---|---|---|---|"
    for row in _drawn(run):
        promised, peak = row["promised_bytes"], row["peak_bytes"]
        predicted_s, measured_s = row["predicted_s"], row["measured_s"]
        yield (
            f"| {row['plan']} | {promised / 2**30:.2f} GiB | {peak / 2**30:.2f} GiB "
            f"| {promised / peak:.3f} | {predicted_s * 1e3:.1f} ms "
            f"| {measured_s * 1e3:.1f} ms | {predicted_s / measured_s:.3f} |"
        )
    yield ""
    yield run.source()


def _emulated(run: Run) -> Iterator[str]:
    yield from _of(run, EMULATED, emulated.section)


def _offloaded(run: Run) -> Iterator[str]:
    yield from _of(run, OFFLOAD, offloaded.section)


def _islands(run: Run) -> Iterator[str]:
    yield from _of(run, ISLANDS, islanded.section)


def _predicted(run: Run) -> Iterator[str]:
    yield from _of(run, PREDICTED, predicted.section)


def _equal(run: Run) -> Iterator[str]:
    yield from _of(run, EQUAL, equal.section)


def _cold(run: Run) -> Iterator[str]:
    yield from _of(run, COLD, cold.section)


def _of(run: Run, rows: str, section: Callable[[Any], Iterator[str]]) -> Iterator[str]:
    """A benchmark's part of the page, by a module of its own."""
    if rows not in run.rows:
        return
    yield from section(run.rows[rows])
    yield ""
    yield run.source()


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the benchmarks' files lie")
    print(page(read_runs(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
