"""Packed documents train as documents apart do: nothing is seen across a border."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hexijax
from hexijax import Cluster, Trainer
from hexijax.data import Packed, RandomTokens
from hexijax.errors import UserError
from hexijax.layers.loss import nnx_loss
from hexijax.planner import PlanOptions
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss

CONFIG = LlamaConfig(
    vocab_size=256, width=16, depth=2, num_heads=2, num_kv_heads=1, ff_width=32
)


def build(rngs: nnx.Rngs) -> Llama:
    return Llama(CONFIG, rngs=rngs)


def score(model: Any, batch: Any) -> Any:
    logits = model(batch["inputs"], batch["segments"])
    return next_token_loss(logits, batch["targets"], batch["weights"])


@pytest.mark.parametrize("stacked", [pytest.param(False, marks=pytest.mark.laws), True])
def test_packed_documents_have_the_loss_of_documents_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = ["one two", "three", "four five six", "seven eight nine ten", "11 12"]
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    data = Packed(str(folder), 24)
    windows = len(data._packing)
    assert windows < len(texts)
    batch = data.take(np.arange(windows))
    config = dataclasses.replace(CONFIG, scan_layers=stacked)
    model = Llama(config, rngs=nnx.Rngs(0))
    total, weight = score(model, jax.tree.map(jnp.asarray, batch))
    apart = 0.0
    for text in texts:
        tokens = jnp.asarray([list(text.encode())])
        apart += next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])[0].sum()
    assert weight.sum() == sum(len(text) - 1 for text in texts)
    assert total.sum() == pytest.approx(float(apart), rel=1e-5)


@pytest.mark.laws
@pytest.mark.usefixtures("backend")
def test_packed_documents_train_under_plans_as_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cluster = Path(__file__).parents[2] / "experiments/clusters/quickstart.toml"
    chain, machines = None, Cluster.from_toml(cluster)
    losses = {}
    for plan in ("single", "planned"):
        given: Any = plan
        if plan == "planned":
            assert chain is not None
            options = PlanOptions(use_all_devices=True)
            given = hexijax.make_plan(chain, machines, batch_size=8, options=options)
            assert len({d for _, stage in given.stages() for d in stage.devices}) == 8
        own = Trainer(
            nnx_loss(build, score), None, optax.sgd(0.1), cluster=machines, plan=given
        )
        data = Packed(None, 24).batches(8)
        losses[plan] = [own.step(next(data))["loss"] for _ in range(3)]
        chain = own.chain
    assert losses["planned"] == pytest.approx(losses["single"], rel=1e-5)


@pytest.mark.usefixtures("backend")
def test_a_tokenizer_with_too_many_tokens_is_refused_by_both_numbers():
    own = Trainer(nnx_loss(build, score), None, optax.sgd(0.1), plan="single")
    good = next(Packed(None, 24).batches(2))
    own.step(good)
    wrong = {**good, "inputs": good["inputs"].copy()}
    wrong["inputs"][1, 3] = 300
    with pytest.raises(
        UserError,
        match=r"batch of step 1: 'inputs' has the number 300 in sample 1, and the "
        r"model's embed/embedding has 256 rows",
    ):
        own.step(wrong)
    assert own.steps_done == 1
    # Where the data says what it may hold, no token needs to turn up first.
    for steps, eval_data in [(1, None), (0, RandomTokens(300, 24))]:
        data = RandomTokens(257 if steps else 256, 24)
        with pytest.raises(
            UserError, match=r"has a vocabulary of (257|300) tokens, and the model's em"
        ):
            own.fit(data, 1, eval_data=eval_data, eval_every=int(not steps))
