"""What plans promise of memory and time, beside what a card takes: drawn plans.

Run:     python -m experiments.bench_memory --seed 0 --plans 20 --out FOLDER
         (--small, to see that it works, draws tiny plans and runs them on the CPU)
Needs:   one card that the catalog knows, nine minutes; neither a solver nor a loader
Expect:  every promise at least the peak and at most 8% above it

A peak is counted from a process's start, so each plan runs in a process of its own:
one step to warm up, then two. Rows are written as they come; plans that the time left
does not reach are said to be missing. The JSON beside them has each program's bytes.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.memory_draws import (
    LARGE,
    SMALL,
    Draw,
    Family,
    card_cluster,
    describe,
    draw_plans,
    make_chain,
    make_plan,
)
from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.simulator import predict

LIMIT = 1.08
"""A promise is at least the peak and at most this times it."""

ONE_PLAN_S = 120.0
"""After which a plan's process is given up."""

SMALL_CLUSTER = Path(__file__).parent / "clusters" / "quickstart.toml"


def promise(drawn: Draw, family: Family, cluster: Cluster) -> dict[str, Any]:
    """Bytes by part, and seconds of a step."""
    chain, plan = make_chain(drawn, family), make_plan(drawn, family, cluster)
    parts = plan_memory(plan, chain, cluster)[cluster.devices[0].name]
    return {
        "promised_bytes": parts.total_bytes,
        "parts": dataclasses.asdict(parts),
        "predicted_s": predict(plan, chain, cluster).step_s,
    }


def child(arguments: list[str], limit_s: float) -> str:
    """The last line a process of this file printed; an error says why there is none."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench_memory", *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        # JAX takes three quarters of a card by default.
        env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", **os.environ},
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])
    return done.stdout.strip().splitlines()[-1]


def run_child(drawn: Draw, card: str, limit_s: float) -> dict[str, Any]:
    """Runs a plan in a process of its own."""
    try:
        result = child(["--one", json.dumps(drawn), "--card", card], limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {limit_s:.0f} s"}
    except RuntimeError as error:
        return {"failed": str(error)}
    found: dict[str, Any] = json.loads(result)
    return found


def find_card() -> str:
    """The kind of this machine's card, as the catalog has it."""
    from hexijax.runtime.devices import local_cluster

    return local_cluster().devices[0].profile.kind


def run_one(drawn: Draw, family: Family, cluster: Cluster) -> dict[str, Any]:
    """In a process of its own."""
    import jax

    from experiments.memory_run import run

    return run(drawn, family, cluster, jax.devices()[0])


def line(row: dict[str, Any]) -> str:
    """One plan, for people."""
    what = f"{describe(row['plan']):66}"
    if "failed" in row:
        return f"{what} FAILED {row['failed']}"
    gib = 2**30
    peak = f"{row['peak_bytes'] / gib:6.2f}" if row["peak_bytes"] else "not read"
    ratio = f"{row['ratio']:5.3f}" if row["peak_bytes"] else "    -"
    return (
        f"{what} {row['promised_bytes'] / gib:6.2f} GiB promised, {peak} peak, "
        f"{ratio}; {row['predicted_s'] * 1e3:7.1f} ms predicted, "
        f"{row['measured_s'] * 1e3:7.1f} measured, "
        f"{row['predicted_s'] / row['measured_s']:5.3f}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """The ratios of all plans."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    paces = [row["predicted_s"] / row["measured_s"] for row in rows if "jax" in row]
    lines: list[str] = []
    if paces:
        lines.append(
            f"predicted over measured seconds: {min(paces):.3f} to {max(paces):.3f}, "
            f"median {statistics.median(paces):.3f}"
        )
    if ratios:
        kept = sum(1 <= ratio <= LIMIT for ratio in ratios)
        lines.append(
            f"promised over peak: {min(ratios):.3f} to {max(ratios):.3f}, median "
            f"{statistics.median(ratios):.3f}; {kept} of {len(rows)} plans within "
            f"1 to {LIMIT}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all plans")
    parser.add_argument("--only", help="numbers of the drawn plans to run: 0,3,7")
    parser.add_argument("--card", help="the catalog's name; otherwise JAX is asked")
    parser.add_argument("--as-drawn-for", help="draw the plans of another card")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--find", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_memory"))
    args = parser.parse_args()
    if args.find:
        print(find_card())
        return
    deadline = time.monotonic() + args.seconds
    card = "small" if args.small else args.card or child(["--find"], ONE_PLAN_S)
    family = SMALL if card == "small" else LARGE
    if card == "small":
        cluster = Cluster.from_toml(SMALL_CLUSTER.read_text())
    else:
        cluster = card_cluster(card)
    if args.one:
        print(json.dumps(run_one(json.loads(args.one), family, cluster)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    like = card_cluster(args.as_drawn_for) if args.as_drawn_for else cluster
    plans = list(enumerate(draw_plans(args.seed, args.plans, family, like)))
    if args.only:
        plans = [plans[int(i)] for i in args.only.split(",")]
    rows: list[dict[str, Any]] = []
    print(f"{card}, {len(plans)} plans, seed {args.seed}")
    for number, drawn in plans:
        left_s = deadline - time.monotonic()
        if left_s < 10:
            print(f"{len(plans) - len(rows)} plans missing: no time left")
            break
        row: dict[str, Any] = {"plan": drawn, **promise(drawn, family, cluster)}
        row |= run_child(drawn, card, min(left_s, ONE_PLAN_S))
        if row.get("peak_bytes"):
            row["ratio"] = row["promised_bytes"] / row["peak_bytes"]
        rows.append(row)
        print(f"{number:2} {line(row)}", flush=True)
        (args.out / "bench_memory.json").write_text(json.dumps(rows, indent=1))
    print(summary(rows))


if __name__ == "__main__":
    main()
