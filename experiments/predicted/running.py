"""One listed plan in a process of its own: how fast, and how much memory.

    python -m experiments.predicted.running LIST NAME CHAIN RESULT --gate FILE

Peaks of memory are counted from a process's start, so a process runs one plan. What
needs no card (imports, the list) is done at once; the cards are opened when the gate,
a file, is there: a process can so begin while another one still measures.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.bench_llama import measure
from experiments.predicted.cells import cell
from experiments.predicted.listing import Listed, read_list
from hexijax.layers.chain import Chain
from hexijax.runtime.engine import Engine

LONGEST_S = 900.0
"""That a gate is waited for."""


def wait_for(gate: Path) -> None:
    """Until the file is there.

    Raises:
      TimeoutError: it did not come.
    """
    until = time.monotonic() + LONGEST_S
    while not gate.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no gate {gate} in {LONGEST_S:.0f} s")
        time.sleep(0.02)


def run(
    listed: Listed,
    name: str,
    chain: Chain,
    keep: Callable[[dict[str, Any]], None],
    steps: int,
    warm: int,
) -> None:
    """Measures; ``keep`` is given what is known so far, after each part."""
    plan = listed.promises[name].plan
    experiment = cell(listed.cell).experiment(plan.batch_size, clip=listed.clip)
    used = {device for _, stage in plan.stages() for device in stage.devices}
    names = [d.name for d in listed.cluster.devices if d.name in used]
    devices = dict(zip(names, jax.devices(), strict=False))
    began = time.perf_counter()
    engine = Engine(experiment, plan, chain, listed.cluster, devices)
    compiled = time.perf_counter()
    engine.init()
    engine.wait()
    ready = time.perf_counter()
    found: dict[str, Any] = {
        "compile_s": compiled - began,
        "init_s": ready - compiled,
        "card": devices[names[0]].device_kind,
        "jax": jax.__version__,
    }
    keep(found)
    batches = experiment.data.batches(plan.batch_size)

    def step(i: int) -> Callable[[], Any]:
        return engine.step(next(batches), i).fetch

    # One more: from its end the first of the measured steps is timed.
    found |= measure(step, steps + 1, warm=warm)
    tokens = plan.batch_size * experiment.tokens_per_sample
    found["tokens_per_s"] = tokens / found["step_s"]
    found["peak_bytes"] = engine.peak_bytes_by_device()
    keep(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("list", type=Path)
    parser.add_argument("name")
    parser.add_argument("chain", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--gate", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=1, help="steps before them")
    args = parser.parse_args()
    listed = read_list(args.list)
    chain = Chain.from_json(json.loads(args.chain.read_text()))
    wait_for(args.gate)
    run(
        listed,
        args.name,
        chain,
        lambda found: args.result.write_text(json.dumps(found, indent=1)) and None,
        args.steps,
        args.warm,
    )


if __name__ == "__main__":
    main()
