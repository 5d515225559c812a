"""A short table of what a run of ``bench_emulated`` has found."""

from collections.abc import Iterator, Mapping
from typing import Any

GIB = 2**30


def bound_tokens_per_s(found: Mapping[str, Any]) -> float | None:
    """What the cards reach alone, together; None where one was not measured."""
    cards = found.get("alone", ())
    if not cards or not all(card.get("rates") for card in cards):
        return None
    return sum(max(r["tokens_per_s"] for r in card["rates"]) for card in cards)


def summary(rows: Mapping[str, Any]) -> str:
    """Lines of at most a hundred letters."""
    return "\n".join(_lines(rows["emulated"]))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    check = found.get("check", {})
    if check:
        rates = " ".join(f"{x / 1e12:.0f}" for x in check["product_flops_per_s"])
        links = [*check["link_bytes_per_s"].values(), 0.0]
        yield (
            f"products {rates} TFLOP/s; links up to "
            f"{max(links) / 1e9:.0f} GB/s, "
            f"{check['link_latency_s'] * 1e6:.0f} us; host "
            f"{check['host_bytes_per_s'] / 1e9:.0f} GB/s; MPS {found.get('mps')}"
        )
    for number, card in enumerate(found.get("alone", ())):
        for rate in card.get("rates", ()):
            yield (
                f"card {number} alone by {rate['microbatch']} {rate['remat']}: "
                f"{rate['tokens_per_s']:,.0f} tokens/s, step {rate['step_s']:.3f} "
                f"({rate['least_s']:.3f} to {rate['most_s']:.3f}), "
                f"compiled in {rate['compile_s']:.0f} s"
            )
    for name, row in found.get("predicted_alone", {}).items():
        ratio = row["predicted_s"] / row["measured_s"]
        yield f"{name}: predicted over measured {ratio:.3f}"
    bound = bound_tokens_per_s(found)
    if bound:
        yield f"bound {bound:,.0f} tokens/s"
    for name, row in found.get("plans", {}).items():
        yield _plan(name, row, bound)
    for name, row in found.get("memory", {}).items():
        yield f"{name}: {_peaks(row)}"
    for name, row in found.get("peers", {}).items():
        yield f"{name}: {row['line']}"
    yield "seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in found["seconds"].items())
    for name, error in found["failed"].items():
        yield f"FAILED {name}: {error[-300:]}"


def _plan(name: str, row: Mapping[str, Any], bound: float | None) -> str:
    if "same_as" in row:
        return f"{name}: the same plan as {row['same_as']}"
    if "step_s" not in row:
        return f"{name}: predicted {row.get('predicted_s', 0):.3f} s, did not run"
    of_bound = f", {row['tokens_per_s'] / bound:.3f} of the bound" if bound else ""
    return (
        f"{name}: {row['tokens_per_s']:,.0f} tokens/s{of_bound}, step "
        f"{row['step_s']:.3f} ({row['least_s']:.3f} to {row['most_s']:.3f}), predicted "
        f"{row['predicted_s']:.3f} = {row['predicted_s'] / row['step_s']:.3f}; "
        f"compiled in {row['compile_s']:.0f} s, dispatched in "
        f"{row.get('dispatch_s', 0):.2f} s; {_peaks(row)}"
    )


def _peaks(row: Mapping[str, Any]) -> str:
    promised = row.get("promised_bytes", {})
    return "peak of promised GiB " + ", ".join(
        f"{device} {peak / GIB:.2f}/{promised.get(device, 0) / GIB:.2f}"
        for device, peak in row.get("peak_bytes", {}).items()
    )
