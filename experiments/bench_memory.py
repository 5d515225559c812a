"""What plans promise of memory and time, beside what a card takes: drawn plans.

Run:     python -m experiments.bench_memory --seed 0 --plans 20 --out FOLDER
         (--small, to see that it works, draws tiny plans and runs them on the CPU)
Needs:   one card of 80 GB, nine minutes; neither a solver nor a data loader
Expect:  every promise at least the peak and at most 8% above it

A peak is counted from a process's start, so each plan runs in a process of its own:
one step to warm up, then two. Rows are written as they come; plans that the time left
does not reach are said to be missing.
"""

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.known import llama
from hexijax.plan.plan import Plan, Replica, Schedule, Stage
from hexijax.simulator import predict

LIMIT = 1.08
"""A promise is at least the peak and at most this times it."""

ONE_PLAN_S = 120.0
"""After which a plan's process is given up."""

Draw = dict[str, Any]
"""A plan in numbers: the JSON a child process is given."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What plans are drawn from."""

    kind: str
    """Cluster file's name."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    lengths: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    head: int
    """Features of an attention head."""

    vocab_size: int
    dtype: str
    promised_gib: tuple[float, float]
    """Plans that promise less, or more, are not run."""


LARGE = Family(
    kind="h100.toml",
    widths=(1024, 2048, 3072, 4096),
    depths=(4, 6, 8, 12),
    lengths=(1024, 2048, 4096),
    microbatch_sizes=(1, 2, 4, 8, 16),
    head=128,
    vocab_size=32_000,
    dtype="bfloat16",
    promised_gib=(12, 74),
)
SMALL = Family(
    kind="quickstart.toml",
    widths=(32, 64),
    depths=(2, 4),
    lengths=(32, 64),
    microbatch_sizes=(1, 2),
    head=16,
    vocab_size=128,
    dtype="float32",
    promised_gib=(0, 1),
)


def draw(rng: random.Random, family: Family) -> Draw:
    """Sizes and a plan for one device, all free choices drawn."""
    depth = rng.choice(family.depths)
    segments = rng.choice([1, 1, 2, 3])
    layers = depth + 2
    cuts = sorted(rng.sample(range(1, layers), segments - 1))
    changed = rng.randint(0, layers)
    first, later = rng.choice(list(Remat)), rng.choice(list(Remat))
    return {
        "width": rng.choice(family.widths),
        "depth": depth,
        "length": rng.choice(family.lengths),
        "microbatch_size": rng.choice(family.microbatch_sizes),
        "microbatches": rng.choice([1, 2, 3]),
        "schedule": rng.choice([Schedule.ONE_F_ONE_B, Schedule.GPIPE]).value,
        "segments": [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)],
        "remat": [first.value] * changed + [later.value] * (layers - changed),
    }


def make_cluster(family: Family) -> Cluster:
    """The card and its host."""
    file = Path(__file__).parent / "clusters" / family.kind
    return Cluster.from_toml(file.read_text())


def make_chain(drawn: Draw, family: Family) -> Chain:
    """The model by formula: planning traces nothing."""
    return llama(
        depth=drawn["depth"],
        width=drawn["width"],
        num_heads=drawn["width"] // family.head,
        length=drawn["length"],
        ff_width=ff_width(drawn["width"]),
        vocab_size=family.vocab_size,
        dtype=family.dtype,
    )


def ff_width(width: int) -> int:
    """Two thirds of four widths, in whole tiles."""
    return -(-8 * width // 3 // 64) * 64


def make_plan(drawn: Draw, family: Family) -> Plan:
    """The drawn plan."""
    cluster = make_cluster(family)
    stage = Stage(
        devices=(cluster.devices[0].name,),
        layers=(0, drawn["depth"] + 2),
        dtype=family.dtype,
        segments=tuple(drawn["segments"]),
        remat=tuple(map(Remat, drawn["remat"])),
    )
    samples = drawn["microbatches"] * drawn["microbatch_size"]
    replica = Replica(
        stages=(stage,),
        microbatches=drawn["microbatches"],
        microbatch_size=drawn["microbatch_size"],
        samples=samples,
    )
    return Plan(
        replicas=(replica,), batch_size=samples, schedule=Schedule(drawn["schedule"])
    )


def promise(drawn: Draw, family: Family) -> dict[str, Any]:
    """Bytes by part, and seconds of a step."""
    chain, cluster = make_chain(drawn, family), make_cluster(family)
    plan = make_plan(drawn, family)
    parts = plan_memory(plan, chain, cluster)[cluster.devices[0].name]
    return {
        "promised_bytes": parts.total_bytes,
        "parts": dataclasses.asdict(parts),
        "predicted_s": predict(plan, chain, cluster).step_s,
    }


def draw_plans(seed: int, count: int, family: Family) -> list[Draw]:
    """Plans that promise to fit, and enough to be worth measuring."""
    rng, found = random.Random(seed), list[Draw]()
    low, high = family.promised_gib
    while len(found) < count:
        drawn = draw(rng, family)
        promised = int(promise(drawn, family)["promised_bytes"])
        if low <= promised / 2**30 <= high:
            found.append(drawn)
    return found


def run_one(drawn: Draw, family: Family) -> dict[str, Any]:
    """In a process of its own: the peak, and seconds of two steps after the first."""
    import jax
    import numpy as np
    import optax

    from hexijax.experiment import Experiment
    from hexijax.layers.loss import nnx_loss
    from hexijax.runtime.engine import Engine
    from models.llama import Llama, LlamaConfig
    from models.losses import next_token_loss

    def build(rngs: Any, dtype: str = "float32", attention: str = "xla") -> Llama:
        heads = drawn["width"] // family.head
        config = LlamaConfig(
            vocab_size=family.vocab_size,
            width=drawn["width"],
            depth=drawn["depth"],
            num_heads=heads,
            num_kv_heads=heads,
            ff_width=ff_width(drawn["width"]),
            dtype=dtype,
            attention=attention,
        )
        return Llama(config, rngs=rngs)

    def score(model: Any, batch: Any) -> Any:
        return next_token_loss(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    plan, cluster = make_plan(drawn, family), make_cluster(family)
    experiment = Experiment(
        loss=nnx_loss(build, score),
        optimizer=optax.adamw(1e-4),
        batch_size=plan.batch_size,
        dtype=family.dtype,
        tokens_per_sample=drawn["length"],
    )
    name = cluster.devices[0].name
    began = time.perf_counter()
    engine = Engine(
        experiment,
        plan,
        make_chain(drawn, family),
        cluster,
        {name: jax.devices()[0]},
    )
    compile_s = time.perf_counter() - began
    engine.init()
    rng = np.random.default_rng(0)
    shape = (plan.batch_size, drawn["length"] + 1)
    ends = []
    for step in range(3):
        tokens = rng.integers(0, family.vocab_size, shape).astype(np.int32)
        engine.step({"tokens": tokens}, step).fetch()
        ends.append(time.perf_counter())
    return {
        "peak_bytes": engine.peak_bytes_by_device().get(name, 0),
        "measured_s": (ends[2] - ends[0]) / 2,
        "compile_s": compile_s,
        "jax": jax.__version__,
        "card": jax.devices()[0].device_kind,
    }


def run_child(drawn: Draw, small: bool, limit_s: float) -> dict[str, Any]:
    """Runs a plan in a process of its own; its last line is the result."""
    command = [sys.executable, "-m", "experiments.bench_memory"]
    command += ["--one", json.dumps(drawn), *(["--small"] if small else [])]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            # JAX takes three quarters of a card by default.
            env={**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {limit_s:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip()[-400:]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def line(row: dict[str, Any]) -> str:
    """One plan, for people."""
    d = row["plan"]
    what = (
        f"{d['depth']:2} x {d['width']} length {d['length']} {d['microbatches']} x "
        f"{d['microbatch_size']} {d['schedule']} {'+'.join(map(str, d['segments']))} "
        f"{d['remat'][0]}..{d['remat'][-1]}"
    )
    if "failed" in row:
        return f"{what:64} FAILED {row['failed']}"
    gib = 2**30
    peak = f"{row['peak_bytes'] / gib:6.2f}" if row["peak_bytes"] else "not read"
    ratio = f"{row['ratio']:5.3f}" if row["peak_bytes"] else "    -"
    return (
        f"{what:64} {row['promised_bytes'] / gib:6.2f} GiB promised, {peak} peak, "
        f"{ratio}; {row['predicted_s'] * 1e3:7.1f} ms predicted, "
        f"{row['measured_s'] * 1e3:7.1f} measured"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all plans")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_memory"))
    args = parser.parse_args()
    family = SMALL if args.small else LARGE
    if args.one:
        print(json.dumps(run_one(json.loads(args.one), family)))
        return
    deadline = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for drawn in draw_plans(args.seed, args.plans, family):
        left_s = deadline - time.monotonic()
        if left_s < 10:
            print(f"{args.plans - len(rows)} plans missing: no time left")
            break
        row: dict[str, Any] = {"plan": drawn, **promise(drawn, family)}
        row |= run_child(drawn, args.small, min(left_s, ONE_PLAN_S))
        if row.get("peak_bytes"):
            row["ratio"] = row["promised_bytes"] / row["peak_bytes"]
        rows.append(row)
        print(line(row), flush=True)
        (args.out / "bench_memory.json").write_text(json.dumps(rows, indent=1))
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    paces = [row["predicted_s"] / row["measured_s"] for row in rows if "jax" in row]
    if paces:
        print(f"predicted over measured seconds: median {statistics.median(paces):.3f}")
    if ratios:
        kept = sum(1 <= ratio <= LIMIT for ratio in ratios)
        print(
            f"promised over peak: {min(ratios):.3f} to {max(ratios):.3f}, median "
            f"{statistics.median(ratios):.3f}; {kept} of {len(rows)} plans within "
            f"1 to {LIMIT}"
        )


if __name__ == "__main__":
    main()
