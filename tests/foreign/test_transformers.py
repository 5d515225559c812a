"""transformers' Flax models are cut, planned and trained as they are."""

import functools
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("transformers", reason="the extra `thirdparty` is not installed")

from hexijax.checkpoint import Saver, Tiers
from hexijax.experiment import Experiment
from hexijax.layers import samples
from hexijax.runtime.intake import initial_params
from hexijax.weights import export
from hexijax.weights.stored.files import open_files
from tests.foreign.families import DEPTH, MODELS, Foreign, logits
from tests.laws.cases import (
    BATCH_SIZE,
    OPTIMIZER,
    Case,
    Outcome,
    chain,
    check,
    run,
)
from tests.laws.drawing import draw_plan
from tests.laws.law_models import LENGTH, tokens

SEEDS = {"gpt2": 66, "bert": 195, "llama": 53}
"""Plans of few segments: two stages, one of two lanes, whose backward is in two parts;
two replicas with tensor parallelism; two stages of four devices."""

BLOCKS = {
    "gpt2": "transformer/h",
    "bert": "bert/encoder/layer",
    "llama": "model/layers",
}


def draw(family: str, seed: int, train: bool = False) -> Case:
    """A random plan for one of them."""
    shape: Any = Foreign(family, train)
    rng = random.Random(seed)
    clipped = rng.random() < 0.5
    return Case(
        seed, shape, clipped, draw_plan(rng, chain(shape), batch_size=BATCH_SIZE)
    )


FAMILIES = [
    "gpt2",
    pytest.param("bert", marks=pytest.mark.laws),
    pytest.param("llama", marks=pytest.mark.laws),
]
"""One is compiled each time, the others with the laws."""


@pytest.mark.parametrize("family", FAMILIES)
def test_each_block_is_a_layer_and_one_array_crosses(family: str):
    model = chain(Foreign(family))
    blocks = [f"{BLOCKS[family]}/{i}" for i in range(DEPTH)]
    assert [layer.name for layer in model.layers] == ["embed", *blocks, "head"]
    assert model.notes == ()
    borders = {layer.border_bytes for layer in model.layers[:-1]}
    assert len(borders) == 1


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_it_is_known_to_be_a_sum_over_samples(
    family: str, train: bool, monkeypatch: Any
):
    monkeypatch.setattr(samples, "probe", None)
    loss = Foreign(family, train).loss()
    # Llama's configuration has no dropout.
    assert loss.uses_keys == (train and family != "llama")
    verdict = samples.check(loss, loss.abstract_params(), tokens(2))
    assert verdict.kind == "sum"


@functools.cache
def trained(family: str) -> tuple[Case, Outcome]:
    """A drawn plan, one step old; shared, because compiling it is what takes long."""
    case = draw(family, SEEDS[family])
    with pytest.MonkeyPatch.context() as patch:
        return case, run(case, patch)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_gives_the_plain_program_s_numbers(family: str):
    check(*trained(family))


@pytest.mark.laws
@pytest.mark.parametrize(
    ("seed", "train"),
    [*((seed, False) for seed in range(10)), *((seed, True) for seed in range(2))],
)
@pytest.mark.parametrize("family", MODELS)
def test_any_plan_gives_the_plain_program_s_numbers(
    family: str, seed: int, train: bool, monkeypatch: Any
):
    case = draw(family, seed, train)
    check(case, run(case, monkeypatch))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_was_trained(family: str, tmp_path: Path):
    case, outcome = trained(family)
    engine, shape = outcome.engine, case.shape
    model, loss = shape.model, shape.loss()
    theirs = model.init_weights(jax.random.key(5), (1, LENGTH))
    model.save_pretrained(tmp_path / "in", params=theirs, safe_serialization=True)
    given = Experiment(loss=loss, init=tmp_path / "in", optimizer=OPTIMIZER)
    engine.set_params(initial_params(given, jax.devices()[0]))
    jax.tree.map(np.testing.assert_array_equal, engine.params(), theirs)

    for step in range(20):
        engine.step(tokens(BATCH_SIZE, step), step).fetch()
    folder = tmp_path / "run" / "checkpoints"
    Saver(engine, Tiers(fast=open_files(folder))).save(20)
    written = export(tmp_path / "run", "safetensors")
    model.config.save_pretrained(written.path.parent)
    # What is missing in a file, transformers fills at random and warns of.
    again = type(model).from_pretrained(written.path.parent, local_files_only=True)

    trained_params = engine.params()
    ids = tokens(4, 77)["tokens"][:, :-1]
    ours = logits(model, trained_params, ids)
    np.testing.assert_allclose(logits(again, again.params, ids), ours, atol=1e-5)
    assert np.abs(ours - logits(model, theirs, ids)).max() > 0.05
