"""One card alone: its rate on the whole model, and the times of its layers.

    python -m experiments.emulated.alone CARD CHAIN RESULT

For each microbatch size the whole model is trained as one program a microbatch; then
its layers are timed as `hexijax profile` times them. The result is written after each.
"""

import argparse
import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.bench_llama import make_experiment, measure
from experiments.emulated.cards import SETTINGS, Setting
from experiments.emulated.plans import on_one
from experiments.emulated.running import make_engine, stepper
from hexijax.layers.chain import Chain
from hexijax.program.program import Site
from hexijax.runtime.layer_timing import layer_rows
from hexijax.runtime.update_timing import update


def alone(
    setting: Setting, number: int, chain: Chain, keep: Callable[[Any], None]
) -> None:
    """Measures a card; ``keep`` is given what is known so far, after each size."""
    card, name = setting.cards[number], setting.devices[number]
    cluster = setting.cluster()
    found: dict[str, Any] = {"rates": [], "rows": []}

    for size, remat in itertools.product(card.sizes, card.remats):
        count = max(1, card.a_step // size)
        given = {"setting": setting, "chain": chain, "device": name, "remat": remat}
        plan = on_one(**given, size=size, microbatches=count)
        engine, row = make_engine(setting, plan, chain, cluster)
        row |= measure(stepper(setting, engine), setting.steps - 1)
        del engine
        rate = plan.batch_size * setting.size.length / row["step_s"]
        row |= {"microbatch": size, "remat": remat.value}
        row |= {"batch_size": plan.batch_size, "tokens_per_s": rate}
        found["rates"].append(row)
        keep(found)
        gc.collect()
    if setting.first_of_kind[card.kind] != number:
        return
    experiment = make_experiment(setting.size, 1)
    dtype, devices = setting.size.dtype, {name: jax.devices()[0]}
    for size, remat in itertools.product(card.sizes, card.profiled):
        if remat is not card.profiled[0] and size != card.sizes[0]:
            continue  # slowed cards compile slowly, too
        found["rows"] += layer_rows(
            experiment,
            chain,
            cluster,
            devices,
            [name],
            dtype=dtype,
            samples=size,
            remat=remat,
        )
        keep(found)
        gc.collect()
    on_device = update(experiment, chain, devices, name, dtype=dtype, site=Site.DEVICE)
    found["rows"].append(
        {"update_params": on_device.params, "update_s": on_device.seconds}
    )
    keep(found)


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
