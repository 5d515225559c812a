"""Helpers that make losses of modules."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from flax import nnx

from hexijax.layers import names
from hexijax.layers.loss import linen_loss, nnx_loss
from models.gpt import GPT, GPTConfig
from models.linen_gpt import LinenGPT

CONFIG = GPTConfig(vocab_size=zoo.VOCAB, max_length=16, **zoo.SHAPE)


def build(rngs: nnx.Rngs, dtype: str = "float32", attention: str | None = None) -> GPT:
    config = dataclasses.replace(CONFIG, dtype=dtype, attention=attention)
    return GPT(config, rngs=rngs)


def test_parameters_are_plain_named_and_follow_the_key():
    loss = nnx_loss(build, zoo.next_token)
    params = loss.init(jax.random.key(1))
    flat = names.flatten(params)
    assert type(params) is dict
    assert flat["blocks/1/ff/up/kernel"].shape == (zoo.WIDTH, 16)
    abstract = names.flatten(loss.abstract_params())
    assert {k: x.shape for k, x in flat.items()} == {
        k: x.shape for k, x in abstract.items()
    }
    again, other = (names.flatten(loss.init(jax.random.key(k))) for k in (1, 2))
    kernel = "blocks/0/ff/up/kernel"
    np.testing.assert_array_equal(flat[kernel], again[kernel])
    assert not np.array_equal(flat[kernel], other[kernel])
    assert names.flatten(names.unflatten(params, flat)).keys() == flat.keys()


def test_a_builder_without_rngs_keeps_its_own_seed():
    loss = nnx_loss(lambda: build(nnx.Rngs(3)), zoo.next_token)
    one, two = (names.flatten(loss.init(jax.random.key(k))) for k in (1, 2))
    np.testing.assert_array_equal(one["embed/embedding"], two["embed/embedding"])


def test_a_variant_computes_otherwise_with_the_same_parameters():
    loss = nnx_loss(build, zoo.next_token)
    half = loss.variant(dtype="bfloat16", attention="xla")
    params = zoo.fill(loss.abstract_params())
    keys = jax.random.split(jax.random.key(0), 3)
    assert jax.tree.structure(half.abstract_params()) == jax.tree.structure(params)
    full_B, half_B = (f(params, zoo.tokens(), keys)[0] for f in (loss, half))
    assert 0 < jnp.abs(full_B - half_B).max() < 0.1 * full_B.max()
    assert half.merge(params).config.dtype == "bfloat16"
    assert loss.variant(dtype="bfloat16", attention="xla") is half
    assert loss.variant(dtype="bfloat16") is not half


@pytest.mark.parametrize(
    "name", ["gpt-dropout", pytest.param("linen-dropout", marks=pytest.mark.laws)]
)
def test_dropout_does_not_depend_on_the_microbatch(name: str):
    case = zoo.case(name)
    assert case.loss.uses_keys
    together, _ = case.loss(case.params, case.batch, case.keys)
    alone = [
        case.loss(
            case.params,
            {k: x[i : i + 1] for k, x in case.batch.items()},
            case.keys[i][None],
        )[0][0]
        for i in range(3)
    ]
    np.testing.assert_allclose(together, jnp.stack(alone), rtol=1e-5)
    other = jax.random.split(jax.random.key(8), 3)
    assert not np.allclose(together, case.loss(case.params, case.batch, other)[0])


def test_a_model_without_dropout_takes_its_batch_whole():
    assert not nnx_loss(build, zoo.next_token).uses_keys
    linen = linen_loss(LinenGPT(CONFIG), zoo.next_token, example=zoo.tokens())
    assert not linen.uses_keys


def test_per_sample_may_ask_for_the_key():
    def noisy(model: Any, batch: Mapping[str, Any], key: Any) -> Any:
        total, weight = zoo.next_token(model, batch)
        return total * jax.random.uniform(key), weight

    loss = nnx_loss(build, noisy)
    params = zoo.fill(loss.abstract_params())
    keys = jax.random.split(jax.random.key(0), 3)
    plain = nnx_loss(build, zoo.next_token)(params, zoo.tokens(), keys)[0]
    scale = jax.vmap(jax.random.uniform)(keys)
    np.testing.assert_allclose(
        loss(params, zoo.tokens(), keys)[0], plain * scale, rtol=1e-5
    )


def test_other_variables_and_plain_arrays_come_along():
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.table = nnx.Variable(jnp.arange(4.0))
            self.array = jnp.arange(4.0) * 2
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.linear(x) * self.table[...] + self.array

    def by_sample(model: Any, batch: Mapping[str, Any]) -> Any:
        return model(batch["x"]).sum(1), jnp.ones(2)

    loss = nnx_loss(lambda rngs: Model(rngs), by_sample)
    params = {"linear": {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}}
    total, _ = jax.jit(loss)(
        params, {"x": jnp.ones((2, 4))}, jax.random.split(jax.random.key(0), 2)
    )
    np.testing.assert_allclose(total, [18.0, 18.0])


def test_linen_parameters_have_the_names_of_the_module():
    loss = linen_loss(LinenGPT(CONFIG), zoo.next_token, example=zoo.tokens())
    params = names.flatten(loss.init(jax.random.key(0)))
    assert params["blocks_1/ff/up/kernel"].shape == (zoo.WIDTH, 16)
    assert params.keys() == names.flatten(loss.abstract_params()).keys()


def test_a_module_class_is_its_own_builder():
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)

    params = nnx_loss(Net, lambda model, batch: None).abstract_params()
    assert params["linear"]["kernel"].shape == (2, 3)
