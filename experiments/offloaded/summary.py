"""A short table of what a run of ``bench_offload`` has found."""

from collections.abc import Iterator, Mapping
from typing import Any

GIB = 2**30


def summary(rows: Mapping[str, Any]) -> str:
    """Lines of about a hundred letters."""
    return "\n".join(_lines(rows["offload"]))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    profile = found.get("profile")
    if profile:
        links = " ".join(f"{k} {v / 1e9:.1f}" for k, v in profile["links"].items())
        yield (
            f"products {profile['product_flops_per_s'] / 1e12:.0f} TFLOP/s; link "
            f"{links} GB/s; host updates {profile['update_params_per_s'] / 1e9:.2f} "
            f"billion/s on {profile['cores']} cores"
        )
    for model, plans in found.get("runs", {}).items():
        for name, row in plans.items():
            yield f"{model} {name}: {_line(row)}"
    for name, row in found.get("peers", {}).items():
        yield f"{name}: {row['line']}"
    for name, text in found["failed"].items():
        yield f"failed: {name}: {text[-200:]}"


def _line(row: Mapping[str, Any]) -> str:
    said = f"predicted {row['predicted_s']:.3f} s"
    if "failed" in row:
        return f"{said}; failed: {row['failed'][-300:]}"
    if "step_s" not in row:
        return said
    promised = sum(row["promised_bytes"].values()) / GIB
    peak = sum(row.get("peak_bytes", {}).values()) / GIB
    return (
        f"{row['tokens_per_s']:,.0f} tokens/s, step {row['step_s']:.3f} "
        f"({row['least_s']:.3f} to {row['most_s']:.3f}), {said}; peak {peak:.1f} of "
        f"{promised:.1f} GiB; compiled {row['compile_s']:.0f} s, begun "
        f"{row['init_s']:.0f} s, dispatch {row.get('dispatch_s', 0):.2f} s; overlap "
        f"{row.get('overlap')}"
    )
