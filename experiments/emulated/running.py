"""A plan in a process of its own: how fast, how much memory, and what overlapped.

    python -m experiments.emulated.running PLAN CHAIN CLUSTER RESULT --steps 5

Peaks of memory are counted from a process's start, so a process runs one plan. The
result is written after each part, so that a part that fails costs the others nothing.
"""

import argparse
import collections
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.bench_llama import batches, make_experiment, measure
from experiments.emulated.cards import SETTINGS, Setting
from experiments.emulated.overlap import overlaps
from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan import text
from hexijax.plan.plan import Plan
from hexijax.runtime.engine import Engine
from hexijax.runtime.profiling import Times, instruction_times


def make_engine(
    setting: Setting, plan: Plan, chain: Chain, cluster: Cluster
) -> tuple[Engine, dict[str, float]]:
    """The plan compiled, with its first parameters, and the seconds it took.

    The plan's devices are JAX's, in the cluster's order.
    """
    used = {name for _, stage in plan.stages() for name in stage.devices}
    names = [name for name in setting.devices if name in used]
    devices = dict(zip(names, jax.devices(), strict=False))
    experiment = make_experiment(setting.size, plan.batch_size)
    began = time.perf_counter()
    engine = Engine(experiment, plan, chain, cluster, devices)
    compiled = time.perf_counter()
    engine.init()
    engine.wait()
    ready = time.perf_counter()
    return engine, {"compile_s": compiled - began, "init_s": ready - compiled}


def stepper(setting: Setting, engine: Engine) -> Callable[[int], Callable[[], Any]]:
    """Dispatches a step of new random tokens; what waits for it."""
    batch = batches(setting.size, engine.plan.batch_size)

    def step(i: int) -> Callable[[], Any]:
        return engine.step({"tokens": batch()}, i).fetch

    return step


def by_kind(times: Times) -> dict[str, dict[str, float]]:
    """Seconds and number of the instructions of a step, by place and kind."""
    found: dict[str, dict[str, float]] = collections.defaultdict(
        lambda: {"count": 0, "seconds": 0.0}
    )
    for instruction, seconds in times:
        places = {b.place for b in instruction.writes}
        where = f"{next(iter(places))} " if len(places) == 1 else ""
        row = found[f"{where}{type(instruction).__name__}"]
        row["count"] += 1
        row["seconds"] += seconds
    return dict(found)


def run(
    setting: Setting,
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    keep: Callable[[dict[str, Any]], None],
    *,
    steps: int,
    trace: Path | None,
    brief: bool,
) -> None:
    """Measures; ``keep`` is given what is known so far, again and again."""
    engine, result = make_engine(setting, plan, chain, cluster)
    step = stepper(setting, engine)
    found: dict[str, Any] = {**result, **measure(step, steps)}
    found["tokens_per_s"] = plan.batch_size * setting.size.length / found["step_s"]
    found["peak_bytes"] = engine.peak_bytes_by_device()
    keep(found)
    if brief:
        return
    began = time.perf_counter()
    wait = step(100)
    found["dispatch_s"] = time.perf_counter() - began
    wait()
    tokens = batches(setting.size, plan.batch_size)()
    times = instruction_times(engine, {"tokens": tokens}, 101)
    found["one_by_one"] = by_kind(times)
    keep(found)
    if trace is not None:
        with jax.profiler.trace(str(trace)):
            step(200)()
        found["overlap"] = overlaps(trace)
        keep(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("chain", type=Path)
    parser.add_argument("cluster", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--brief", action="store_true", help="no more than the steps")
    parser.add_argument("--setting", choices=SETTINGS, default="four")
    args = parser.parse_args()
    run(
        SETTINGS[args.setting],
        text.read(args.plan),
        Chain.from_json(json.loads(args.chain.read_text())),
        Cluster.from_json(json.loads(args.cluster.read_text())),
        lambda found: _write(args.result, found),
        steps=args.steps,
        trace=args.trace,
        brief=args.brief,
    )


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
