"""The emulated cluster's part of docs/performance.md, from what a run has written."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from experiments.emulated.cards import LARGE
from experiments.emulated.summary import GIB, bound_tokens_per_s

OURS, EVEN = "ours", "even batch"
BEST_EVEN, BEST_PIPELINE = "best even data parallel", "best symmetric pipeline"
SPEEDS = {card.kind: card.speed for card in LARGE.cards}
FEW, MANY = "4 microbatches", "32 microbatches"

ABOUT = """\
Equal cards, made unlike for the time of the run: under NVIDIA MPS a program held
multiprocessors of some cards, and another allocated memory of all until the cap was
left (`experiments/peers/slow_card.py`). Memory bandwidth and links stay the cards' own,
so what a card reaches on the model is more than its share of products. *Alone* is our
runtime on one card, all memory free, the other cards busy with the same; the bound is
the sum of the best rates. The plan was made, and every step predicted, from layers,
updates and links that were timed in the same run."""

ABOUT_KINDS = """\
One card, whole and then with multiprocessors held by another program under NVIDIA MPS
(`experiments/peers/slow_card.py`): what is left of its products, and our runtime's rate
on the model. Memory bandwidth stays the card's own, so what it reaches on the model is
more than its share of products."""

ABOUT_PLANS = """\
*Even batch*: as many sequences for every card, as data parallelism has it.
*Layered accumulation*: our batches, with parameters gathered for each pass, layers
outside and microbatches inside; *off*: gathered for every microbatch. Both compute
activations again in the backward, which the plan of ours has no need to. FSDP2 is
PyTorch's, with compiled blocks, equal batches on all cards."""

ABOUT_BEST = """\
*Best*: of all such plans that a search finds, cards left out where that is better."""

ABOUT_OVERLAP = """\
Time of a step in which bytes cross between cards, and the part of it in which the card
computes as well: as simulated, and by JAX's profiler. A profiled step takes longer than
others; its own length is not compared."""

ABOUT_MEMORY = """\
Peaks of `memory_stats`. A promise counts all parts of a device at once."""

ABOUT_FLAT = """\
One whole card, the same model, microbatches of 2 sequences under layered accumulation,
every layer's activations waiting in host memory."""


MISSING = "What the command below was to measure too and did not:"


class Figure(NamedTuple):
    """What was aimed at."""

    name: str
    measured: float
    bound: float
    at_most: bool = False


def figures(found: Mapping[str, Any]) -> Iterator[Figure]:
    """Those that a run has."""
    made, bound = ran(found), bound_tokens_per_s(found)
    kinds = [card["kind"] for card in found.get("cards", ())]
    cards = " : ".join(f"{SPEEDS[kind]:g}" for kind in kinds)
    if found.get("model", "1.35B") != "1.35B":
        cards += f", {found['model'].removesuffix('B')} B"
    if OURS in made and bound:
        rate = made[OURS]["tokens_per_s"]
        yield Figure(f"{cards}: part of the bound", rate / bound, 0.95)
        ratio = made[OURS]["predicted_s"] / made[OURS]["step_s"]
        name = f"{cards}: predicted step off by"
        yield Figure(name, abs(ratio - 1), 0.05, at_most=True)
    for name in (BEST_EVEN, BEST_PIPELINE):
        if {OURS, name} <= made.keys():
            rate = made[OURS]["tokens_per_s"] / made[name]["tokens_per_s"]
            yield Figure(f"{cards}: ours over the {name}", rate, 1)
    peers = [row["tokens_per_s"] for row in found.get("peers", {}).values()]
    if OURS in made and peers:
        rate = made[OURS]["tokens_per_s"] / max(peers)
        yield Figure(f"{cards}: ours over FSDP2's best", rate, 1)
    if EVEN in made and peers:
        rate = made[EVEN]["tokens_per_s"] / max(peers)
        yield Figure("the same, equal batches: ours over FSDP2's best", rate, 1)
    if {FEW, MANY} <= found.get("memory", {}).keys():
        few, many = (_peak(found["memory"][name]) for name in (FEW, MANY))
        if few and many:
            name = "peak of 32 microbatches over that of 4, layered"
            yield Figure(name, many / few, 1.03, at_most=True)


def ran(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Plans that ran, by name."""
    return {k: v for k, v in found.get("plans", {}).items() if "step_s" in v}


def section(found: Mapping[str, Any]) -> Iterator[str]:
    """Everything there is to show."""
    parts = (_cards, _plans, _overlap, _memory, _flat)
    shown = [lines for part in parts if (lines := "\n".join(part(found)))]
    if failed := found.get("failed"):
        shown.append(f"{MISSING} {', '.join(failed)}.")
    yield "\n\n".join(shown)


def _cards(found: Mapping[str, Any]) -> Iterator[str]:
    if "check" not in found or not found.get("alone"):
        return
    yield ABOUT if found.get("plans") else ABOUT_KINDS
    yield ""
    yield "| card | held | cap | products | alone, by microbatch and remat |"
    yield "|---|---|---|---|---|"
    rates = found["check"]["product_flops_per_s"]
    for number, card in enumerate(found["cards"][: len(rates)]):
        alone = ", ".join(
            f"{rate['microbatch']} {rate['remat']}: {rate['tokens_per_s']:,.0f}"
            for rate in found["alone"][number].get("rates", ())
        )
        cap = f"{card['keep_gib']:g} GiB" if found.get("plans") else "none"
        yield (
            f"| {number} | {card['held'] or 'none'} of 132 multiprocessors | {cap} "
            f"| {rates[number] / 1e12:.0f} TFLOP/s "
            f"| {f'{alone} tokens/s' if alone else 'did not end'} |"
        )


def _plans(found: Mapping[str, Any]) -> Iterator[str]:
    if not found.get("plans"):
        return
    bound = bound_tokens_per_s(found)
    yield ABOUT_PLANS
    if BEST_EVEN in found["plans"]:
        yield ABOUT_BEST
    yield ""
    yield (
        "| | tokens/s | of the bound | step, median | least | most | predicted "
        "| over measured |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    if bound:
        yield f"| the bound | {bound:,.0f} | 1 | | | | | |"
    for name, row in found.get("plans", {}).items():
        if "same_as" in row:
            yield f"| {name} | the same plan as {row['same_as']} | | | | | | |"
        elif "step_s" not in row:
            yield f"| {name} | did not run | | | | | {row['predicted_s']:.3f} s | |"
        else:
            times = " | ".join(
                f"{row[k]:.3f} s"
                for k in ("step_s", "least_s", "most_s", "predicted_s")
            )
            yield (
                f"| {name} | {row['tokens_per_s']:,.0f} "
                f"| {_part(row['tokens_per_s'], bound)} | {times} "
                f"| {row['predicted_s'] / row['step_s']:.3f} |"
            )
    for name, row in found.get("peers", {}).items():
        part = _part(row["tokens_per_s"], bound)
        yield f"| {name} | {row['tokens_per_s']:,.0f} | {part} | | | | | |"


def _part(rate: float, bound: float | None) -> str:
    return f"{rate / bound:.3f}" if bound else ""


def _overlap(found: Mapping[str, Any]) -> Iterator[str]:
    rows = {k: v for k, v in ran(found).items() if v.get("overlap")}
    if not rows:
        return
    yield ABOUT_OVERLAP
    yield ""
    yield "| plan | card | simulated | beside compute | profiled | beside compute |"
    yield "|---|---|---|---|---|---|"
    for name, row in rows.items():
        for device, simulated in row["predicted_overlap"].items():
            number = device.split("/")[-1]
            seen = row["overlap"].get(f"GPU:{number}", {})
            cells = [
                f"{each.get(what, 0.0) * 1e3:.1f} ms"
                for each in (simulated, seen)
                for what in ("peer", "peer beside compute")
            ]
            yield f"| {name} | {number} | {' | '.join(cells)} |"


def _memory(found: Mapping[str, Any]) -> Iterator[str]:
    rows = {k: v for k, v in ran(found).items() if v.get("peak_bytes")}
    if not rows:
        return
    yield ABOUT_MEMORY
    yield ""
    cards = found["cards"]
    heads = [f"card {i}, {card['keep_gib']:g} GiB" for i, card in enumerate(cards)]
    yield f"| peak of promised | {' | '.join(heads)} |"
    yield "|---|" + "---|" * len(heads)
    for name, row in rows.items():
        cells = [
            f"{row['peak_bytes'][d] / GIB:.2f} of {row['promised_bytes'][d] / GIB:.2f}"
            for d in sorted(row["peak_bytes"])
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _flat(found: Mapping[str, Any]) -> Iterator[str]:
    rows = {k: v for k, v in found.get("memory", {}).items() if v.get("peak_bytes")}
    if not rows:
        return
    yield ABOUT_FLAT
    yield ""
    yield "| | peak | promised |"
    yield "|---|---|---|"
    for name, row in rows.items():
        promised = sum(row["promised_bytes"].values()) / GIB
        yield f"| {name} | {_peak(row) / GIB:.2f} GiB | {promised:.2f} GiB |"


def _peak(row: Mapping[str, Any]) -> int:
    return sum(row.get("peak_bytes", {}).values())
