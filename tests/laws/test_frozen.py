"""Parameters that do not train: exact under any plan, and as they were after a step."""

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hexijax
from hexijax.checkpoint import Saver, Tiers, inventory, restore
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.layers.names import flatten
from hexijax.plan.plan import Replica, Schedule, Stage
from hexijax.program import names as buffers
from hexijax.program.program import Backward, Forward, Kind
from hexijax.runtime import trainable
from hexijax.runtime.plain import PlainEngine
from hexijax.runtime.reach import OptimizerError
from hexijax.runtime.trainable import frozen_names
from hexijax.weights.runs import CHECKPOINTS
from hexijax.weights.stored.files import open_files
from tests.laws import cases
from tests.laws.cases import (
    BATCH_SIZE,
    Case,
    chain,
    check,
    experiment,
    model,
    run,
)
from tests.laws.drawing import draw_plan
from tests.laws.law_models import Shape, tokens
from tests.laws.test_exactness import by_hand

LORA = Shape(lora=True, trained=("*lora*",))
LATE = Shape(tied=False, trained=("blocks/2/*", "blocks/3/*norm*", "head/*"))
TRAINED = (
    ("*norm*", "*bias*"),
    ("*kernel*",),
    ("blocks*",),
    ("embed*",),
    ("*head*", "norm/*", "*embed*"),
    ("blocks*kernel", "*scale"),
    ("*blocks_2*", "*blocks/2/*", "norm/*"),
)


def lora_case() -> Case:
    """A split pipeline with lanes; the embedding is frozen, the first block's adapter
    is the first that trains."""
    layers = len(chain(LORA).layers)
    stages = (
        Stage(devices=("fast/0",), layers=(0, 2)),
        Stage(devices=("fast/1", "fast/2"), layers=(2, 4), lanes=2, segments=(1, 1)),
        Stage(devices=("slow/0",), layers=(4, layers)),
    )
    replica = Replica(stages=stages, microbatches=3, microbatch_size=4, samples=12)
    return by_hand(LORA, replica, schedule=Schedule.ZERO_BUBBLE)


def late_case() -> Case:
    """Two replicas, cut in unlike places; a stage of one has no backward at all."""
    layers = len(chain(LATE).layers)
    stages = (
        Stage(devices=("fast/0",), layers=(0, 2)),
        Stage(devices=("slow/0", "slow/1"), layers=(2, layers), tensor=2),
    )
    one = Stage(devices=("fast/1", "fast/2"), layers=(0, layers), lanes=2)
    return dataclasses.replace(
        by_hand(
            LATE,
            Replica(stages=stages, microbatches=4, microbatch_size=2, samples=8),
            Replica(stages=(one,), microbatches=1, microbatch_size=4, samples=4),
        ),
        clipped=True,
    )


@pytest.mark.parametrize(
    "make", [lora_case, pytest.param(late_case, marks=pytest.mark.laws)]
)
def test_a_plan_trains_what_trains_and_nothing_else(make: Any, monkeypatch: Any):
    case = make()
    outcome = run(case, monkeypatch)
    check(case, outcome)
    engine = outcome.engine
    states = engine.state()
    for (home, name), held in states.items():
        if not engine.groups[name].group.trainable:
            assert held["moments"] == [], name
            assert engine.groups[name].state_buffer(home).memory == "device"
    moved = [b for i in engine.program.body for b in i.writes]
    trained = {n for n, g in engine.groups.items() if g.group.trainable}
    assert {b.subject for b in moved if b.kind is Kind.GRAD} == trained


def test_frozen_parameters_are_their_own_masters(monkeypatch: Any):
    """Where their home computes with them as they are, they take no memory twice."""
    engine = run(late_case(), monkeypatch).engine
    (home,) = engine.groups["embed"].homes
    masters = engine.state()[home, "embed"]["master"]
    params = engine._executor.get(buffers.param(home, "embed"))
    assert len(masters) == len(params) > 1
    assert all(a is b for a, b in zip(masters, params, strict=True))
    assert not [i for i in engine.program.body if _goes_back(i, "r0.s0")]


def _goes_back(instruction: Any, place: str) -> bool:
    if isinstance(instruction, Backward):
        return instruction.place == place
    return (
        isinstance(instruction, Forward)
        and instruction.place == place
        and instruction.grad
    )


def test_of_a_bfloat16_stage_the_masters_wait_on_the_host(
    monkeypatch: Any, tmp_path: Path
):
    shape = dataclasses.replace(LATE, dtype="bfloat16")
    layers = len(chain(shape).layers)
    stages = (
        Stage(devices=("fast/0", "fast/1"), layers=(0, 3), lanes=2, dtype="bfloat16"),
        Stage(devices=("slow/0",), layers=(3, layers), dtype="bfloat16"),
    )
    replica = Replica(stages=stages, microbatches=2, microbatch_size=6, samples=12)
    text = Path("experiments/clusters/quickstart.toml").read_text()
    both = Cluster.from_toml(
        re.sub(r"float32 = (\S+) }", r"float32 = \1, bfloat16 = \1 }", text)
    )
    monkeypatch.setattr(cases, "cluster", lambda: both)
    engine = run(by_hand(shape, replica), monkeypatch).engine
    first = flatten(model(shape)[1])
    for (home, name), held in engine.state().items():
        group = engine.groups[name]
        kinds = {x.sharding.memory_kind for x in held["master"]}
        on_host = group.state_buffer(home).memory == "host"
        assert kinds == ({"pinned_host"} if on_host else {"device"}), name
        assert {x.dtype.name for x in held["master"]} == {"float32"}
        # Rows of a table are looked up before they are cast: it is used as it is.
        assert on_host == (not group.group.trainable and name != "embed"), name
    tiers = Tiers(fast=open_files(tmp_path / CHECKPOINTS))
    Saver(engine, tiers).save(1)
    now, source = flatten(engine.params()), engine.weights()
    stored = flatten(hexijax.load(tmp_path))
    for name, value in first.items():
        box = tuple((0, n) for n in value.shape)
        np.testing.assert_array_equal(source.read(name, box), now[name], err_msg=name)
        np.testing.assert_array_equal(stored[name], now[name], err_msg=name)
        if not shape.trains(name):
            np.testing.assert_array_equal(now[name], value, err_msg=name)
    batch = tokens(BATCH_SIZE, 5)
    once = engine.step(batch, 1).fetch()
    engine.set_params(model(shape)[1])
    restore(engine, inventory(tiers), where="here", facts={})
    assert engine.step(batch, 1).fetch() == once


def test_the_plain_program_has_no_state_of_them_either():
    job = dataclasses.replace(experiment(LATE, True), optimizer=optax.adam(1e-2))
    plain = PlainEngine(job, device=jax.devices()[0])
    plain.init()
    before = flatten(plain.params())
    assert plain.step(tokens(BATCH_SIZE), 0).fetch()["grad_norm"] > 0
    moved = {n for n, x in flatten(plain.params()).items() if (x != before[n]).any()}
    assert moved == {n for n in before if LATE.trains(n)}
    held = sum(x.size for x in jax.tree.leaves(plain.moments()) if x.ndim)
    assert held == 2 * sum(before[n].size for n in moved)


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(24))
def test_any_plan_of_any_frozen_model_is_exact(seed: int, monkeypatch: Any):
    case = frozen_case(seed)
    check(case, run(case, monkeypatch))


def frozen_case(seed: int) -> Case:
    """A random plan for a random model of which a random part trains."""
    rng = random.Random(seed)
    api, scanned = rng.choice(["nnx", "linen"]), rng.random() < 0.4
    lora = api == "nnx" and not scanned and rng.random() < 0.5
    shape = Shape(
        api=api,
        tied=rng.random() < 0.5,
        scanned=scanned,
        lora=lora,
        trained=("*lora*",) if lora else rng.choice(TRAINED),
    )
    clipped = rng.random() < 0.5
    plan = draw_plan(rng, chain(shape), batch_size=BATCH_SIZE)
    return Case(seed, shape, clipped, plan)


# What does not train.


def asked(**fields: Any) -> frozenset[str]:
    """Names of the frozen parameters of a model with adapters."""
    shape = Shape(lora=True)
    loss = shape.loss()
    job = dataclasses.replace(
        experiment(Shape(), False), loss=loss, init=None, trainable=None
    )
    job = dataclasses.replace(job, optimizer=optax.adamw(1e-3))
    return frozen_names(dataclasses.replace(job, **fields))


def names() -> set[str]:
    return set(flatten(Shape(lora=True).loss().abstract_params()))


BASE = {n for n in names() if "lora" not in n}


def mask(of: set[str]) -> Any:
    """A tree of bools: whether a parameter is one of these."""
    tree = Shape(lora=True).loss().abstract_params()
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(str(getattr(k, "key", k)) for k in path) in of, tree
    )


@pytest.mark.parametrize(
    "which",
    [
        "*lora*",
        ["*/lora_a", "*/lora_b"],
        lambda path: "lora" in path,
        nnx.LoRAParam,
        mask(names() - BASE),
    ],
    ids=["pattern", "patterns", "function", "kind of variable", "tree of bools"],
)
def test_what_trains_is_said_in_any_of_five_ways(which: Any):
    assert asked(trainable=which) == BASE


def test_all_parameters_train_unless_something_says_otherwise():
    assert asked() == frozenset()
    assert asked(trainable=nnx.Param) == frozenset()


ADAM, ZERO = optax.adamw(1e-3), optax.set_to_zero()


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.multi_transform({True: ZERO, False: ADAM}, mask(BASE)),
        optax.partition({True: ZERO, False: optax.contrib.muon(1e-3)}, mask(BASE)),
        optax.selective_transform(ADAM, freeze_mask=mask(BASE)),
        optax.chain(ADAM, optax.freeze(mask(BASE))),
        optax.chain(
            optax.masked(ADAM, mask(names() - BASE)), optax.masked(ZERO, mask(BASE))
        ),
        optax.chain(
            optax.partition({True: ZERO, False: optax.sgd(1.0)}, mask(BASE)),
            optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
        ),
        optax.inject_hyperparams(
            lambda rate: optax.partition(
                {True: ZERO, False: optax.sgd(rate)}, mask(BASE)
            )
        )(rate=0.1),
        optax.masked(ADAM, mask(names() - BASE)),
    ],
    ids=[
        "multi_transform",
        "partition",
        "selective_transform",
        "freeze",
        "two masks",
        "schedule behind",
        "inject_hyperparams",
        "masked, of a model with adapters",
    ],
)
def test_what_the_optimizer_leaves_as_it_is_does_not_train(optimizer: Any):
    assert asked(optimizer=optimizer) == BASE


def test_a_weight_decay_beside_a_freeze_trains():
    decays = optax.chain(optax.freeze(mask(BASE)), optax.add_decayed_weights(0.1))
    assert asked(optimizer=optax.chain(decays, optax.scale(-0.1))) == frozenset()


def test_a_gradient_that_is_handed_on_as_it_came_is_refused():
    with pytest.raises(OptimizerError) as caught:
        asked(optimizer=optax.masked(ADAM, mask(BASE)))
    said = str(caught.value)
    assert "hands 8 gradients on as they came" in said
    assert "(blocks/0/ff/up/lora_a, blocks/0/ff/up/lora_b," in said
    assert "would climb the loss" in said
    assert "set Experiment.trainable" in said
    frozen = asked(
        optimizer=optax.masked(ADAM, mask(BASE)), trainable=lambda n: n in BASE
    )
    assert frozen == names() - BASE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"trainable": "*lorra*"},
            "has the pattern '*lorra*', which matches none of the",
        ),
        ({"trainable": nnx.BatchStat}, "the model's are LoRAParam, Param"),
        ({"trainable": lambda _: False}, "trains (blocks/0/attention/key/bias"),
        ({"optimizer": ZERO}, "the labels of its multi_transform"),
        ({"trainable": {"blocks": True}}, "or a tree of bools like the parameters'"),
        ({"trainable": mask(BASE) | {"norm": 3}}, "has 3 for 'norm/bias'"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: Any, said: str):
    with pytest.raises(UserError) as caught:
        asked(**fields)
    assert said in str(caught.value)


def test_a_kind_of_variable_needs_a_loss_that_knows_them():
    linen = Shape(api="linen").loss()
    with pytest.raises(UserError, match="does not know the kinds of its parameters"):
        asked(loss=linen, trainable=nnx.LoRAParam)


def test_a_chain_that_was_traced_for_others_is_refused(monkeypatch: Any):
    case = lora_case()
    with pytest.raises(UserError, match="was traced as one that does not train it"):
        run(case, monkeypatch, trainable=None)


def test_a_base_that_trains_beside_adapters_is_told():
    job = dataclasses.replace(experiment(LORA, False), loss=LORA.loss(), init=None)
    job = dataclasses.replace(job, optimizer=optax.adamw(1e-3), trainable=None)
    (note,) = trainable.notes(job, frozenset())
    assert "The model has 8 adapters (nnx.LoRAParam), and its base trains" in note
    assert "Experiment.trainable=nnx.LoRAParam keeps the base as it is" in note
    assert not trainable.notes(dataclasses.replace(job, trainable="*"), frozenset())
    (told,) = chain(LORA).notes
    assert told.startswith(f"{chain(LORA).num_trained:,} of {chain(LORA).num_params:,}")
    assert "arrays stay as they are: blocks/0/attention/key/bias," in told


def test_moments_are_those_of_the_parameters_that_train():
    from hexijax.job.intake import training_facts

    job = dataclasses.replace(
        experiment(LORA, False), loss=LORA.loss(), optimizer=optax.adamw(1e-3)
    )
    assert training_facts(job).moments == 2
    masked = optax.partition(
        {True: ZERO, False: ADAM},
        jax.tree.map(lambda trains: not trains, mask(names() - BASE)),
    )
    assert (
        training_facts(
            dataclasses.replace(job, trainable=None, optimizer=masked)
        ).moments
        == 2
    )
