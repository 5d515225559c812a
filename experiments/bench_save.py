"""What saving costs: a run that saves its whole state, beside the same without.

Run:     python -m experiments.bench_save --out FOLDER [--fast DIR] [--seconds 560]
         (--small, to see that it works, takes one CPU device and half a minute)
Needs:   one card of 80 GB, 100 GB of host memory, room for three states of 16 GB in
         --fast (default: /dev/shm if it has it, else the temporary folder)
Expect:  docs/performance.md; saves cost below 2% of the throughput

A Llama of 1.35 B under a one-card plan, 64 sequences a step. A save every 20 steps,
each read back and compared, two kept and both restored; then a copy of the state into a
neighbour's memory after every step. With too little time there are fewer saves.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench_llama import (
    LARGE,
    SMALL,
    Size,
    batches,
    data_parallel,
    make_chain,
    make_cluster,
    make_experiment,
    step_flops,
)
from hexijax.checkpoint import Saver, Tiers, restore
from hexijax.checkpoint.snapshot import take
from hexijax.runtime.engine import Engine
from hexijax.weights.stored.files import open_files

NODE = "box"

AFTER_S = {False: 90.0, True: 5.0}
"""Left for what follows the saves: both restores, copies to a neighbour."""


class Run:
    """An engine that steps on, and how long each step took."""

    def __init__(self, size: Size):
        experiment = make_experiment(size, size.a_card)
        cluster, chain = make_cluster(size, 1), make_chain(size)
        names = [device.name for device in cluster.devices][:1]
        devices = dict(zip(names, jax.devices(), strict=False))
        began = time.perf_counter()
        plan = data_parallel(size, chain, 1)
        self.engine = Engine(experiment, plan, chain, cluster, devices)
        self.compile_s = time.perf_counter() - began
        self.engine.init()
        self.node_of = dict.fromkeys([*jax.devices(), *jax.devices("cpu")], NODE)
        self._batch, self.done = batches(size, size.a_card), 0

    def steps(self, count: int, saver: Saver | None = None) -> list[float]:
        """Seconds between the ends of steps, each dispatched one ahead.

        What is saved is copied when a step is dispatched, before the next one is.
        """
        ends, waiting = [time.perf_counter()], list[Callable[[], Any]]()
        for _ in range(count):
            waiting.append(self.engine.step({"tokens": self._batch()}, self.done).fetch)
            self.done += 1
            if saver is not None and saver.due(self.done):
                saver.write(saver.take(self.done, {"at": self.done}))
            if len(waiting) > 1:
                waiting.pop(0)()
                ends.append(time.perf_counter())
        waiting.pop(0)()
        ends.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(ends)]


def state_bytes(run: Run) -> int:
    """Of parameters and moments."""
    return sum(x.nbytes for copies in run.engine.slices().values() for x in copies[:1])


def pinning(run: Run) -> float:
    """Seconds of a first snapshot: the host's memory is pinned for all later ones."""
    began = time.perf_counter()
    take(run.engine, run.node_of).arrays(NODE)
    return time.perf_counter() - began


def saved(
    run: Run, saver: Saver, every: int, saves: int, until: float
) -> dict[str, Any]:
    """Windows of ``every`` steps, each of which ends with a save that is written while
    the next one computes."""
    plain = run.steps(max(2, every // 2))
    while run.done % every:  # a save at the end of each window
        plain += run.steps(1)
    windows: list[float] = []
    run.steps(every, saver)  # its save is written in the first window that counts
    for _ in range(saves - 1):
        took = run.steps(every, saver)
        windows.append(sum(took))
        if time.monotonic() + 1.5 * windows[-1] > until:
            break
    saver.close()
    plain += run.steps(max(2, every // 2))
    plain_s = statistics.median(plain)
    written = [save for save in saver.saves if save.tier == "disk"]
    return {
        "plain_step_s": plain_s,
        "step_s": statistics.mean(windows) / every,
        "windows_s": windows,
        "overhead": statistics.mean(windows) / every / plain_s - 1,
        "saves": len(written),
        "failed": [save.error for save in written if save.error],
        "bytes": written[-1].num_bytes,
        "write_and_verify_s": [save.seconds for save in written],
        "waited_s": saver.waited_s,
    }


def restored(run: Run, saver: Saver) -> list[dict[str, Any]]:
    """Every step that is kept, loaded, and compared slice by slice with what lies on
    the disk, which the writer compared with what it saved."""
    found = []
    kept = saver.inventory()
    for step in kept.whole():
        began = time.perf_counter()
        result = restore(
            run.engine, kept, where="fast", facts={}, step=step, node_of=run.node_of
        )
        seconds = time.perf_counter() - began
        held = take(run.engine, run.node_of).arrays(NODE)
        (source,) = kept.sources(step)
        wrong = [
            str(each)
            for each, x in held.items()
            if x.size and not np.array_equal(x, source.read(*each))
        ]
        found.append(
            {
                "step": step,
                "seconds": seconds,
                "slices": len(held),
                "unequal": wrong,
                "moved": str(result.moved),
            }
        )
    return found


def copied(run: Run, every: int) -> dict[str, Any]:
    """A copy into a neighbour's memory after every step."""
    tiers = Tiers(fast=open_files("unused"), neighbour_every=1)
    saver = Saver(run.engine, tiers, node_of=run.node_of)
    plain = run.steps(max(2, every // 4))
    run.steps(3, saver)  # its buffers are made
    saver.waited_s = 0.0
    steps = run.steps(max(2, every // 2), saver)
    saver.close()
    plain_s = statistics.median(plain)
    return {
        "plain_step_s": plain_s,
        "step_s": statistics.mean(steps),
        "overhead": statistics.mean(steps) / plain_s - 1,
        "copies": len(saver.saves),
        "copy_s": statistics.median(save.seconds for save in saver.saves),
        "waited_s": saver.waited_s,
    }


def roomy(given: str | None, num_bytes: int) -> Path:
    """A folder with room for three states."""
    places = [given] if given else ["/dev/shm", tempfile.gettempdir()]
    for place in places:
        if Path(place).is_dir() and shutil.disk_usage(place).free > 3.1 * num_bytes:
            return Path(tempfile.mkdtemp(prefix="hexijax-save-", dir=place))
    raise SystemExit(
        f"None of {', '.join(places)} has {3.1 * num_bytes:,.0f} bytes free: name a "
        "folder with --fast."
    )


def main() -> None:
    """Measures, prints and writes ``bench_save.json`` after each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--fast", help="where to save; default: see above")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--every", type=int, help="steps between saves")
    parser.add_argument("--saves", type=int, default=11)
    parser.add_argument("--sequences", type=int, help="of a step")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    small = arguments.small
    size = SMALL if small else LARGE
    sequences = arguments.sequences or (16 if small else 64)
    size = dataclasses.replace(size, a_card=sequences)
    every = arguments.every or (4 if small else 20)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {
        "what": {
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "sequences": sequences,
            "every": every,
        }
    }

    def tell(name: str, found: Any) -> None:
        rows[name] = found
        print(f"[{until - time.monotonic():5.0f} s left] {name}: {json.dumps(found)}")
        text = json.dumps(rows, indent=1)
        (arguments.out / "bench_save.json").write_text(text + "\n")

    run = Run(size)
    run.steps(2)
    num_bytes = state_bytes(run)
    tell("made", {"compile_s": run.compile_s, "state_bytes": num_bytes})
    tell("pinning_s", pinning(run))
    folder = roomy(arguments.fast, num_bytes)
    tell("fast", str(folder))
    try:
        tiers = Tiers(fast=open_files(folder), every=every, keep=2)
        saver = Saver(run.engine, tiers, node_of=run.node_of, tell=print, verify=True)
        left = until - AFTER_S[small]
        found = saved(run, saver, every, arguments.saves, left)
        flops = step_flops(size, sequences) / found["step_s"]
        tell("saved", found | {"tflops_per_s": flops / 1e12})
        tell("restored", restored(run, saver))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tell("neighbour", copied(run, every))
    print(
        "saves cost {:+.2%}, copies every step {:+.2%}".format(
            rows["saved"]["overhead"], rows["neighbour"]["overhead"]
        )
    )


if __name__ == "__main__":
    main()
