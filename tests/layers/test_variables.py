"""Variables of a module that are no parameters: derived, let go, or refused by name."""

from collections.abc import Mapping
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hexijax.layers.loss import ModelError, linen_loss, nnx_loss
from hexijax.layers.trace import trace_model

BATCH = {"x": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)}
KEYS = jax.random.split(jax.random.key(3), 4)


def by_sample(model: Any, batch: Mapping[str, Any]) -> Any:
    x = model(batch["x"])
    return jnp.square(x).sum(1), jnp.ones(len(x))


def trace(loss: Any, **options: Any) -> Any:
    return trace_model(
        loss, loss.abstract_params(), BATCH, microbatch_size=4, **options
    )


class Normed(nnx.Module):
    """A batch norm after a matrix, and another one inside a transform."""

    def __init__(self, rngs: nnx.Rngs, stored: bool = False):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs, use_running_average=stored)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.jit(lambda self, x: self.norm(self.up(x)))(self, x)


class LinenNormed(linen.Module):
    """The same."""

    stored: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(8, name="up")(x)
        return linen.BatchNorm(use_running_average=self.stored, name="norm")(x)


def normed(api: str, stored: bool = False) -> Any:
    if api == "nnx":
        return nnx_loss(lambda rngs: Normed(rngs, stored), by_sample)
    return linen_loss(LinenNormed(stored), by_sample, example=BATCH)


NAMES = {"nnx": "'norm/mean', 'norm/var'", "linen": "'batch_stats/norm/mean', 'batch"}


@pytest.mark.parametrize("api", NAMES)
def test_a_running_statistic_is_refused_by_name(api: str):
    with pytest.raises(ModelError) as error:
        trace(normed(api))
    assert f"Variable {NAMES[api]}" in str(error.value)
    assert "is a running statistic (" in str(error.value)
    assert "set per_microbatch=True" in str(error.value)


@pytest.mark.parametrize("api", NAMES)
def test_one_a_microbatch_is_allowed_and_says_what_is_not_carried(api: str):
    loss = normed(api)
    traced = trace(loss, per_microbatch=True)
    assert f"The running statistics {NAMES[api]}" in traced.chain.notes[0]
    assert "carries none on" in traced.chain.notes[0]
    params = loss.init(jax.random.key(0))
    total, _ = loss.variant(per_microbatch=True)(params, BATCH, KEYS)
    x = BATCH["x"] @ params["up"]["kernel"]
    scaled = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(total, jnp.square(scaled).sum(1), rtol=1e-4)


@pytest.mark.parametrize("api", NAMES)
def test_stored_statistics_are_constants(api: str):
    loss = normed(api, stored=True)
    assert trace(loss).notes == ()
    params = loss.init(jax.random.key(0))
    x = BATCH["x"] @ params["up"]["kernel"]
    total, _ = loss(params, BATCH, KEYS)
    np.testing.assert_allclose(total, jnp.square(x).sum(1), rtol=1e-4)


@pytest.mark.parametrize("api", NAMES)
def test_statistics_follow_from_trained_parameters_and_data(api: str):
    loss = normed(api)
    params = loss.init(jax.random.key(0))
    after = loss.statistics(params, [BATCH] * 3)
    x = np.asarray(BATCH["x"] @ params["up"]["kernel"])
    mean = (1 - 0.99**3) * x.mean(0)
    np.testing.assert_allclose(after["norm"]["mean"], mean, rtol=1e-4, atol=1e-6)
    var = 0.99**3 + (1 - 0.99**3) * x.var(0)
    np.testing.assert_allclose(after["norm"]["var"], var, rtol=1e-4)


class Count(nnx.Variable):
    """Calls so far."""


class Counting(nnx.Module):
    """A counter that the output does not need, or does."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.calls = Count(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return self.up(x) * self.calls[...]


def test_a_variable_that_is_written_is_refused_or_named():
    with pytest.raises(ModelError) as error:
        trace(nnx_loss(lambda rngs: Counting(rngs), by_sample))
    assert "Variable 'calls' (" in str(error.value)
    assert "Count) is written in the forward pass" in str(error.value)
    assert "Count,)." in str(error.value)
    named = nnx_loss(lambda rngs: Counting(rngs), by_sample, scratch=(Count,))
    assert trace(named).layering.names == ("model",)


class Sower(Counting):
    """Sows a number a sample."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "size", jnp.square(x).sum(1))
        return self.up(x)


def test_what_a_module_sows_can_be_part_of_the_loss():
    def sown(model: Any, batch: Mapping[str, Any]) -> Any:
        x, seen = nnx.capture(model, nnx.Intermediate)(batch["x"])
        (size_B,) = seen["size"]
        return jnp.square(x).sum(1) + size_B, jnp.ones(len(x))

    loss = nnx_loss(lambda rngs: Sower(rngs), sown)
    params = loss.init(jax.random.key(0))
    assert trace(loss).layering.names == ("model",)
    total, _ = loss(params, BATCH, KEYS)
    x = BATCH["x"] @ params["up"]["kernel"]
    want = jnp.square(x).sum(1) + jnp.square(BATCH["x"]).sum(1)
    np.testing.assert_allclose(total, want, rtol=1e-6)


class Sowing(linen.Module):
    """Sows a number a sample in a collection of its own, or keeps a cache."""

    cached: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.cached:
            last = self.variable("cache", "last", jnp.zeros, x.shape)
            last.value = x
        self.sow("losses", "size", jnp.square(x).sum(1))
        self.sow("intermediates", "seen", x)
        return linen.Dense(8, name="up")(x)


def test_linen_collections_are_handled_by_name():
    def sown(model: Any, batch: Mapping[str, Any]) -> Any:
        total, weight = by_sample(model, batch)
        (size_B,) = model.variables["losses"]["size"]
        return total + size_B, weight

    def make(module: Any, score: Any, **options: Any) -> Any:
        return linen_loss(module, score, example=BATCH, **options)

    with pytest.raises(ModelError, match=r"'losses/size/1' \('losses'\) is written in"):
        trace(make(Sowing(), by_sample))
    with pytest.raises(ModelError, match=r"'cache/last' .* \(decoding caches, coun"):
        trace(make(Sowing(cached=True), by_sample, scratch=("losses",)))
    loss = make(Sowing(), sown, scratch=("losses",))
    assert trace(loss).layering.names == ("model",)
    params = loss.init(jax.random.key(0))
    assert params.keys() == {"up"}
    total, _ = loss(params, BATCH, KEYS)
    base, _ = make(Sowing(), by_sample, scratch=("losses",))(params, BATCH, KEYS)
    np.testing.assert_allclose(total, base + jnp.square(BATCH["x"]).sum(1), rtol=1e-6)


def test_what_holds_a_linen_module_stands_for_it():
    class Holder:
        module = LinenNormed(stored=True)

        def __call__(self, x: jax.Array) -> jax.Array:
            raise AssertionError("the outer class is not called")

    held = linen_loss(Holder(), by_sample, example=BATCH)
    assert trace(held).layering.names == trace(normed("linen", True)).layering.names


class Noisy(nnx.Module):
    """Draws from two streams, one of them in copies."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.noise = nnx.Rngs(noise=1).split(2)
        self.other = nnx.Rngs(other=0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x) + jax.random.normal(self.other.other(), x.shape)


def test_random_states_follow_from_the_sample_s_key():
    loss = nnx_loss(lambda rngs: Noisy(rngs), by_sample)
    params = loss.init(jax.random.key(0))
    assert loss.uses_keys
    total, _ = loss(params, BATCH, KEYS)
    again, _ = loss(params, BATCH, KEYS)
    np.testing.assert_array_equal(total, again)
    other, _ = loss(params, BATCH, jax.random.split(jax.random.key(4), 4))
    assert not np.allclose(total, other)
    # A sample's draws are its own, whatever stands beside it.
    last, _ = loss(params, {"x": BATCH["x"][3:]}, KEYS[3:])
    np.testing.assert_allclose(last[0], total[3], rtol=1e-5)
    states = nnx.state(loss.merge(params), nnx.RngKey)
    keys = [jax.random.key_data(x) for x in jax.tree.leaves(states)]
    rows = np.concatenate([x.reshape(-1, 2) for x in keys])
    assert len(np.unique(rows, axis=0)) == len(rows)
