"""Planning with parameters that do not train: less memory, less time, more fits."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from hexijax.cluster import Cluster
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain
from hexijax.layers.kernels import trace_chain
from hexijax.layers.loss import nnx_loss
from hexijax.layers.names import flatten
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.planner import InfeasiblePlanError, PlanOptions, make_plan
from hexijax.planner.baselines import all_baselines
from hexijax.simulator import predict
from models.llama import Llama, LlamaConfig
from models.losses import next_token_loss

CONFIG = LlamaConfig(
    vocab_size=2048, width=512, depth=6, num_heads=8, num_kv_heads=8, ff_width=2048
)


def build(rngs: nnx.Rngs, dtype: str = "bfloat16") -> Any:
    """A Llama with an adapter beside each block's gate."""
    model = Llama(CONFIG, rngs=rngs)
    for block in model.blocks:
        gate = block.ff.gate
        block.ff.gate = nnx.LoRA(
            gate.in_features, 8, gate.out_features, base_module=gate, rngs=rngs
        )
    return model


@functools.cache
def chain(*trained: str) -> Chain:
    """Its layers; of the parameters, those train whose path holds one of these."""

    def score(model: Any, batch: dict[str, Any]) -> Any:
        return next_token_loss(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    loss = nnx_loss(build, score)
    params = loss.abstract_params()
    frozen = {n for n in flatten(params) if not any(part in n for part in trained)}
    batch = {"tokens": np.zeros((1, 129), np.int32)}
    return trace_chain(loss, params, batch, name="llama", frozen=frozen)


ON_CARDS = PlanOptions(offload=False)
"""Nothing rests on a host."""

ALL, LORA, LATE = ("",), ("lora",), ("blocks/5/", "head/")


PARTS = {
    "parameters": "params_bytes",
    "gradients": "grads_bytes",
    "state": "state_bytes",
}
"""Rows of the table in docs/training.md."""


def cluster(mib: int, *, count: int = 1) -> Cluster:
    """Cards of one small kind."""
    return Cluster.from_toml(f"""
format = 1
name = "small"
[kinds.card]
vendor = "nvidia"
memory_gib = {mib / 1024}
compute_capability = "8.0"
peak_tflops = {{ float32 = 10 }}
memory_gb_per_s = 500
host_link_gb_per_s = 10
source = "declared"
[[nodes]]
name = "n"
devices = [{{ kind = "card", count = {count} }}]
host_memory_gib = 64
host_cores = 8
link = {{ latency_us = 5, bandwidth_gb_per_s = 20 }}
""")


def one_stage(of: Chain, segments: tuple[int, ...] = ()) -> Plan:
    """All layers on one card."""
    stage = Stage(devices=("n/0",), layers=(0, len(of.layers)), segments=segments)
    replica = Replica(stages=(stage,), microbatches=2, microbatch_size=2, samples=4)
    return Plan(replicas=(replica,), batch_size=4)


def test_a_frozen_model_is_held_once():
    card = cluster(8000)
    whole, lora = (
        plan_memory(one_stage(c), c, card)["n/0"] for c in (chain(*ALL), chain(*LORA))
    )
    size, trained = chain(*LORA).num_params, chain(*LORA).num_trained
    assert chain(*ALL).num_params == chain(*ALL).num_trained == size
    assert 0 < trained < 0.02 * size
    assert lora.params_bytes == whole.params_bytes == 4 * size
    assert (whole.grads_bytes, whole.state_bytes) == (4 * size, 12 * size)
    assert (lora.grads_bytes, lora.state_bytes) == (4 * trained, 12 * trained)
    assert lora.transient_bytes < 0.8 * whole.transient_bytes
    assert lora.sync_bytes < 0.05 * whole.sync_bytes
    page = Path("docs/training.md").read_text(encoding="utf-8")
    assert f"Llama of {size / 1e6:.0f} M parameters" in page
    assert f"{trained / 1e3:.0f},000 of them in adapters" in page
    for name, field in PARTS.items():
        mib = [getattr(parts, field) / 2**20 for parts in (whole, lora)]
        cells = [f"{x:.1f}" if x < 10 else f"{x:.0f}" for x in mib]
        assert f"| {name} | {' MiB | '.join(cells)} MiB |" in page


def test_layers_before_the_first_that_trains_keep_nothing_and_go_no_way_back():
    late, whole = chain(*LATE), chain(*ALL)
    assert [layer.backward for layer in late.layers] == [False] * 6 + [True] * 2
    for layer in late.layers[:6]:
        assert set(layer.activation_bytes.values()) == {0}
        assert layer.backward_flops == 0
        assert {p.back for p in layer.products} <= {0}
    card = cluster(8000)
    held, every = (
        plan_memory(one_stage(c, segments=(6, 2)), c, card)["n/0"].activations_bytes
        for c in (late, whole)
    )
    assert held < 0.4 * every


def test_a_step_of_what_does_not_train_is_shorter():
    card = cluster(8000)
    whole, lora, late = (
        predict(one_stage(c), c, card, events=False).step_s
        for c in (chain(*ALL), chain(*LORA), chain(*LATE))
    )
    # Of three products a weight two are left, and no update; of six blocks one.
    assert 0.5 * whole < lora < 0.75 * whole
    assert 0.3 * whole < late < 0.6 * whole


def test_a_card_that_is_too_small_to_train_a_model_holds_it_frozen():
    card = cluster(700)
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(chain(*ALL), card, batch_size=4, options=ON_CARDS)
    need = 20 * chain(*ALL).num_params
    assert f"hold {need:,} bytes of parameters, gradients and state" in str(
        caught.value
    )
    for trained in (LORA, LATE):
        plan = make_plan(chain(*trained), card, batch_size=4, options=ON_CARDS)
        (parts,) = plan_memory(plan, chain(*trained), card).values()
        assert parts.total_bytes <= card.devices[0].usable_memory_bytes
    tiny = cluster(100)
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(chain(*LORA), tiny, batch_size=4, options=ON_CARDS)
    lora = chain(*LORA)
    need = 4 * lora.num_params + 16 * lora.num_trained
    assert f"hold {need:,} bytes" in str(caught.value)


def test_two_cards_share_a_frozen_model_as_any_other():
    cards, made = cluster(280, count=2), chain(*LORA)
    plan = make_plan(made, cards, batch_size=8, options=ON_CARDS)
    promised = plan_memory(plan, made, cards)
    room = cards.devices[0].usable_memory_bytes
    assert max(p.total_bytes for p in promised.values()) <= room
    assert {d for _, stage in plan.stages() for d in stage.devices} == {"n/0", "n/1"}
    with pytest.raises(InfeasiblePlanError):
        make_plan(made, cluster(280), batch_size=8, options=ON_CARDS)


def test_other_systems_plans_know_it_too():
    """Cards that have no room for the whole have it for what is left."""
    card, options = cluster(520, count=2), PlanOptions()
    for style in ("megatron-style", "fsdp-style"):
        whole, lora = (
            all_baselines()[style](
                c, card, batch_size=4, dtype="float32", options=options
            )
            for c in (chain(*ALL), chain(*LORA))
        )
        assert whole is None, style
        assert lora is not None, style


def test_no_gradient_of_the_base_crosses_between_replicas():
    cards = cluster(8000, count=2)
    replicas = tuple(
        Replica(
            stages=(Stage(devices=(f"n/{i}",), layers=(0, len(chain(*LORA).layers))),),
            microbatches=1,
            microbatch_size=2,
            samples=2,
        )
        for i in range(2)
    )
    plan = Plan(replicas=replicas, batch_size=4)
    timeline = predict(plan, chain(*LORA), cards)
    # Half of each sum goes out and half of the new parameters, and as much comes in.
    assert timeline.link_bytes["n/0 out"] == 4 * chain(*LORA).num_trained
    assert predict(plan, chain(*ALL), cards).link_bytes["n/0 out"] == pytest.approx(
        4 * chain(*ALL).num_params, rel=1e-3
    )


def test_a_plan_belongs_to_what_trains():
    prints = {chain(*trained).fingerprint() for trained in (ALL, LORA, LATE)}
    assert len(prints) == 3
    for trained in (ALL, LORA):
        data = chain(*trained).to_json()
        assert Chain.from_json(data) == chain(*trained)


def test_a_chain_of_the_last_version_is_read_as_one_that_trains():
    data = chain(*ALL).to_json()
    text = json.dumps({**data, "version": 2})
    text = text.replace(', "trainable": true', "").replace(', "backward": true', "")
    old = json.loads(text.replace(', "back": 2', ""))
    assert "back" not in str(old).replace("backward_", "")
    assert Chain.from_json(old) == chain(*ALL)
    with pytest.raises(ValueError, match="this hexijax reads versions 2 and 3"):
        Chain.from_json({**data, "version": 4})
