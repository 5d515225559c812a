"""The plain program on all cards, in a process of its own.

    python -m experiments.equal.plain CELL RESULT --microbatches 8 16 --gate FILE

Each microbatch is tried on a short step; the fastest is then measured. The cards are
opened when the gate, a file, is there.
"""

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench_llama import measure, optimizer
from experiments.peers.plain_lanes import PlainLanes
from experiments.predicted.cells import Cell, cell
from experiments.predicted.running import wait_for

TRY_SEQUENCES = 32
"""Of a card, in the step by which a microbatch is chosen."""


def make(of: Cell, size: int, sequences: int, cards: int) -> PlainLanes:
    """With its weights and state."""
    dtype = of.make().dtype
    attention = "cudnn" if jax.devices()[0].platform != "cpu" else "xla"
    config = dataclasses.replace(of.config, dtype=dtype, attention=attention)
    made = PlainLanes(
        config, optimizer(), size, sequences // size, jax.devices()[:cards]
    )
    made.init()
    return made


def stepper(of: Cell, plain: PlainLanes) -> Callable[[int], Callable[[], Any]]:
    """Dispatches a step of new random tokens; what waits for it."""
    rng = np.random.default_rng(0)
    samples = plain.microbatches * plain.microbatch_size * len(plain.devices)
    shape = (samples, of.make().tokens_per_sample + 1)

    def step(i: int) -> Callable[[], Any]:
        tokens = rng.integers(0, of.config.vocab_size, shape).astype(np.int32)
        total = plain.step(tokens)
        return lambda: float(total)

    return step


def tried_s(of: Cell, size: int, cards: int) -> float:
    """Seconds of a sequence in short steps, of the second of two."""
    count = max(1, TRY_SEQUENCES // size) * size
    step = stepper(of, make(of, size, count, cards))
    step(0)()
    began = time.perf_counter()
    step(1)()
    return (time.perf_counter() - began) / (count * cards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cell")
    parser.add_argument("result", type=Path)
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gate", type=Path, required=True)
    args = parser.parse_args()
    of = cell(args.cell)
    wait_for(args.gate)
    tried: dict[int, float] = {}
    if len(args.microbatches) > 1:
        for size in args.microbatches:
            tried[size] = tried_s(of, size, args.cards)
            gc.collect()
    size = min(tried, key=tried.__getitem__) if tried else args.microbatches[0]
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {what}", flush=True)

    plain = make(of, size, of.batch_size // args.cards, args.cards)
    say("weights and state")
    step = stepper(of, plain)

    def told(i: int) -> Callable[[], Any]:
        wait = step(i)
        say(f"step {i} dispatched")
        return wait

    found: dict[str, Any] = {"microbatch": size, "tried_s": tried}
    found |= measure(told, args.steps + 1, warm=0)
    say("measured")
    tokens = of.batch_size * of.make().tokens_per_sample
    found["tokens_per_s"] = tokens / found["step_s"]
    args.result.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
