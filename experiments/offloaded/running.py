"""Plans on one card, one after another: how fast, how much memory, what overlapped.

    python -m experiments.offloaded.running MODEL CLUSTER RESULT NAME=PLAN NAME=PLAN ...

Peaks of memory are counted from a process's start: give plans that need less first.
Pinned memory is kept from one to the next, which saves its pinning. The result is
written after each part of each plan.
"""

import argparse
import dataclasses
import functools
import gc
import json
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.bench_llama import measure
from experiments.emulated.overlap import Spans, events_in, of_events, spans_of
from experiments.offloaded import cells
from hexijax.cluster import Cluster
from hexijax.experiment import Experiment
from hexijax.job.intake import trace_chain
from hexijax.job.tracing import Traced
from hexijax.layers.chain import Chain
from hexijax.plan import text
from hexijax.plan.plan import Plan
from hexijax.runtime.engine import Engine

A_PLAN_S = 15.0
"""Of steps that are measured: of slow plans fewer."""

LEAST_STEPS = 2
"""From the end of one to the end of the next."""

FULL_BYTES = (cells.HOST_GIB - 3) * 2**30
"""With so much resident a plan is given up: the machine would end all that runs."""


def run(
    experiment: Experiment,
    chain: Chain,
    plan: Plan,
    cluster: Cluster,
    keep: Callable[[Mapping[str, Any]], None],
    *,
    steps: int,
    trace: Path | None,
    watch: bool,
) -> None:
    """Measures a plan; ``keep`` is given what is known, again and again."""
    began = time.perf_counter()
    devices = {cells.DEVICE: jax.devices()[0]}
    before = (devices[cells.DEVICE].memory_stats() or {}).get("peak_bytes_in_use", 0)
    engine = Engine(experiment, plan, chain, cluster, devices)
    found: dict[str, Any] = {"compile_s": time.perf_counter() - began}
    began = time.perf_counter()
    engine.init()
    engine.wait()
    found["init_s"] = time.perf_counter() - began
    keep(found)
    batches = experiment.data.batches(plan.batch_size)
    losses: list[Any] = []

    def step(i: int) -> Callable[[], Any]:
        result = engine.step(next(batches), i)

        def wait() -> Any:
            fetched = result.fetch()
            losses.append(float(fetched["loss"]))
            return fetched

        return wait

    took_s = timed(lambda: step(0)())
    if took_s < A_PLAN_S:  # else it is told from what the first one pins as well
        took_s = timed(lambda: step(1)())
    fewer = max(LEAST_STEPS, min(steps, int(A_PLAN_S / took_s)))
    found |= measure(step, fewer, warm=0)
    samples = plan.batch_size * experiment.tokens_per_sample
    found["tokens_per_s"] = samples / found["step_s"]
    found["losses"] = losses
    peaks = engine.peak_bytes_by_device()
    if sum(peaks.values()) > before:  # else it is an earlier plan's
        found["peak_bytes"] = peaks
    found["most_resident_bytes"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    keep(found)
    if fewer == steps:
        began = time.perf_counter()
        wait = step(100)
        found["dispatch_s"] = time.perf_counter() - began
        wait()
    if trace is not None:
        with jax.profiler.trace(str(trace)):
            for wait in [step(200), step(201)]:
                wait()
        events = events_in(trace)
        found["overlap"] = of_events(events)
        found["timeline"] = {
            card: {kind: joined(each) for kind, each in kinds.items()}
            for card, kinds in spans_of(events).items()
        }
        keep(found)
    if watch:
        watched = Traced(engine, 302)
        for i in (300, 301):  # the first compiles what it is watched by
            watched.step(next(batches), i)
        found["watched"] = [
            f"{span.name}, {span.start_s * 1e3:.1f}, {span.end_s * 1e3:.1f}"
            for span in watched.spans()
        ]
    keep(found)


def timed(step: Callable[[], Any]) -> float:
    """Seconds until a step has ended."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def watch_memory(full: Callable[[str], None]) -> None:
    """Tells ``full`` and ends the process when the host's memory is nearly gone.

    Pinned memory is not given back, and a program call is not interrupted, so nothing
    less would do.
    """

    def look() -> None:
        page = resource.getpagesize()
        statm = Path("/proc/self/statm")
        while (resident := int(statm.read_text().split()[1]) * page) < FULL_BYTES:
            time.sleep(0.1)
        full(
            f"{resident:,} bytes of host memory are resident; the plan is given up at "
            f"{FULL_BYTES:,} of {cells.HOST_GIB * 2**30:,}."
        )
        os._exit(3)

    threading.Thread(target=look, daemon=True).start()


def joined(spans: Spans, least_s: float = 5e-4) -> list[tuple[float, float]]:
    """Spans with gaps below ``least_s`` closed, in milliseconds."""
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start - found[-1][1] < least_s:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return [(round(a * 1e3, 2), round(b * 1e3, 2)) for a, b in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("cluster", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--trace", nargs="*", default=[], help="of these plans")
    parser.add_argument("--watch", nargs="*", default=[], help="these plans")
    parser.add_argument("--clipped", nargs="*", default=[], help="these plans")
    args = parser.parse_args()
    experiment = cells.model(args.model)
    # Its updates wait for the norm, which changes nothing.
    never_clipped = dataclasses.replace(experiment, clip_norm=1e9)
    chain = trace_chain(experiment)
    cluster = Cluster.from_json(json.loads(args.cluster.read_text()))
    rows: dict[str, Any] = {}

    def keep(name: str, found: Mapping[str, Any]) -> None:
        rows[name] = dict(found)
        args.result.write_text(json.dumps(rows, indent=1))

    def fail(name: str, why: str) -> None:
        keep(name, {**rows.get(name, {}), "failed": why})

    running = [""]
    watch_memory(lambda why: fail(running[0], why))
    for words in args.plans:
        name, path = words.split("=", 1)
        running[0] = name

        folder = args.result.with_name(f"trace {len(rows)}")
        try:
            run(
                never_clipped if name in args.clipped else experiment,
                chain,
                text.read(Path(path)),
                cluster,
                functools.partial(keep, name),
                steps=args.steps,
                trace=folder if name in args.trace else None,
                watch=name in args.watch,
            )
        except Exception as error:  # said and kept; the other plans still run
            traceback.print_exc()
            fail(name, str(error)[-800:])
        gc.collect()


if __name__ == "__main__":
    main()
