"""The promise of every program of a segment, beside XLA's own figures.

Bytes given and returned are exact; what is alive within is an upper bound, whose
factor depends on the JAX version (`costs.temp`).
"""

import json

import pytest

from experiments.memory_table import (
    MODELS,
    Row,
    Sizes,
    make_cluster,
    make_experiment,
    rows,
    two_stages,
)
from hexijax.costs.memory import plan_memory
from hexijax.costs.temp import Temps
from hexijax.layers.chain import Remat
from hexijax.layers.kernels import trace_chain
from hexijax.plan.plan import stage_place
from hexijax.runtime.compiled import program_bytes
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine, abstract_params


def check(row: Row) -> None:
    held, promised = row.compiled.held_bytes, row.promised.held_bytes
    assert promised == pytest.approx(held, rel=0.02), row
    assert row.compiled.aliases_bytes == pytest.approx(
        row.promised.aliases_bytes, rel=0.02
    )
    assert row.compiled.temp_bytes <= row.promised.temp_bytes, row


def test_a_llama_in_two_stages_is_what_was_promised():
    found = list(rows("llama", Sizes(length=64), Remat.DOTS))
    assert [row.way for row in found] == ["forward", "backward", "fused"]
    for row in found:
        check(row)


@pytest.mark.laws
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_what_was_promised(model: str, remat: Remat, dtype: str):
    for row in rows(model, Sizes(dtype=dtype), remat):
        check(row)


def test_a_compiled_plan_s_figures_are_its_next_promise():
    sizes = Sizes(length=64)
    experiment, batch = make_experiment("llama", sizes)
    cluster = make_cluster()
    chain = trace_chain(
        experiment.loss, abstract_params(experiment), batch, dtype="float32"
    )
    plan = two_stages(chain, cluster, sizes, Remat.DOTS)
    engine = Engine(experiment, plan, chain, cluster, assign(cluster, emulate=True))
    temps = Temps.from_json(json.loads(json.dumps(engine.temps().to_json())))
    promised = plan_memory(plan, chain, cluster, temps=temps)
    for s, device in enumerate(cluster.devices):
        (way,) = {"backward", "fused"} & (
            made := program_bytes(engine.segments[stage_place(0, s), 0])
        ).keys()
        assert promised[device.name].transient_bytes == made[way].temp_bytes
