"""One card alone: its rate on the whole model, and the times of its layers.

    python -m experiments.emulated.alone CARD CHAIN RESULT

For each microbatch size the whole model is trained as one program a microbatch, then
timed instruction by instruction, as one program and in segments. The result is written
after each size.
"""

import argparse
import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.bench_llama import batches, measure
from experiments.emulated.cards import SETTINGS, Setting
from experiments.emulated.plans import A_SEGMENT, on_one
from experiments.emulated.running import make_engine, stepper
from hexijax.costs.compute import fused_attention
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan
from hexijax.runtime.profiling import (
    Times,
    even_segments,
    instruction_times,
    layer_rows,
    update_row,
)

PROFILED = 3
"""Microbatches of a step that is timed in segments."""


def alone(
    setting: Setting, number: int, chain: Chain, keep: Callable[[Any], None]
) -> None:
    """Measures a card; ``keep`` is given what is known so far, after each size."""
    card, name = setting.cards[number], setting.devices[number]
    cluster = setting.cluster()
    segments = even_segments(chain, A_SEGMENT)
    fused = fused_attention(cluster.device(name).profile, setting.size.dtype)
    layers = chain.layers_under(fused_attention=fused)
    profiled = setting.first_of_kind[card.kind] == number
    found: dict[str, Any] = {"rates": [], "rows": []}

    def timed(plan: Plan, steps: int) -> tuple[dict[str, Any], Times]:
        engine, row = make_engine(setting, plan, chain, cluster)
        step = stepper(setting, engine)
        if steps:
            row |= measure(step, steps)
        else:
            step(0)()
        if not profiled:
            return row, ()
        tokens = batches(setting.size, plan.batch_size)()
        return row, instruction_times(engine, {"tokens": tokens}, 100)

    for size, remat in itertools.product(card.sizes, card.remats):
        count = max(1, card.a_step // size)
        given = {"setting": setting, "chain": chain, "device": name, "remat": remat}
        plan = on_one(**given, size=size, microbatches=count)
        row, whole = timed(plan, setting.steps - 1)
        rate = plan.batch_size * setting.size.length / row["step_s"]
        row |= {"microbatch": size, "remat": remat.value}
        row |= {"batch_size": plan.batch_size, "tokens_per_s": rate}
        found["rates"].append(row)
        keep(found)
        gc.collect()
        if not profiled or remat is not card.remats[0]:
            continue
        plan = on_one(**given, size=size, microbatches=PROFILED, segments=segments)
        _, apart = timed(plan, 0)
        found["rows"] += layer_rows(
            layers,
            segments,
            apart,
            whole,
            dtype=setting.size.dtype,
            samples=size,
            remat=remat,
        )
        if size == card.sizes[0]:
            found["rows"].append(update_row(chain, whole))
        keep(found)
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("card", type=int)
    parser.add_argument("chain", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--setting", choices=SETTINGS, default="four")
    args = parser.parse_args()
    alone(
        SETTINGS[args.setting],
        args.card,
        Chain.from_json(json.loads(args.chain.read_text())),
        lambda found: args.result.write_text(json.dumps(found, indent=1)) and None,
    )


if __name__ == "__main__":
    main()
