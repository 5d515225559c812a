"""How far each optimizer of optax looks; every one updates as plain optax does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hexijax.layers.names import flatten
from hexijax.runtime.optimizer import GroupUpdate, OptimizerError, Reach, classify

PARAMS = {
    "a": {"kernel": jnp.ones((5, 7)), "bias": jnp.ones((7,))},
    "b": [jnp.ones((3, 5, 7)), jnp.ones((9,))],
    "scale": jnp.ones(()),
}


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


ELEMENTWISE = {
    "adamw": optax.adamw(1e-3),
    "adamw, mask by function": optax.adamw(1e-3, mask=matrices),
    "adamw, mask as a tree": optax.adamw(1e-3, mask=matrices(PARAMS)),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(1e-3),
    "nadamw": optax.nadamw(1e-3),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "multi_transform": optax.multi_transform(
        {True: optax.adam(1e-3), False: optax.sgd(0.1)}, matrices
    ),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "clip by value": optax.chain(optax.clip(1.0), optax.adam(1e-3)),
}
INSIDE = {
    "adafactor": optax.adafactor(1e-3),
    "lamb": optax.lamb(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "block_rms": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "agc": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
}
ACROSS = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "normalize_by_update_norm": optax.chain(
        optax.normalize_by_update_norm(), optax.sgd(0.1)
    ),
    "prodigy": optax.contrib.prodigy(1e-3),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_by_element(name: str):
    assert classify(ELEMENTWISE[name], PARAMS) is Reach.ELEMENTWISE


@pytest.mark.parametrize("name", INSIDE)
def test_inside_one_leaf(name: str):
    assert classify(INSIDE[name], PARAMS) is Reach.PER_LEAF


@pytest.mark.parametrize("name", ACROSS)
def test_across_leaves_is_refused_with_the_field_to_set(name: str):
    with pytest.raises(OptimizerError, match="set the Experiment's clip_norm"):
        classify(ACROSS[name], PARAMS)


def test_a_global_norm_is_named_with_its_primitive_and_leaves():
    with pytest.raises(OptimizerError) as caught:
        classify(ACROSS["clip_by_global_norm"], PARAMS)
    assert "'a/bias' depends on other leaves (a/kernel, b/0, b/1, ...)" in str(
        caught.value
    )
    assert "`reduce_sum`" in str(caught.value)


@pytest.mark.parametrize("name", [*ELEMENTWISE, "lamb", "centralize"])
def test_some_leaves_alone_are_updated_as_in_the_whole_tree(name: str):
    optimizer = (ELEMENTWISE | INSIDE)[name]
    grads = jax.tree.map(
        lambda p: jnp.sin(jnp.arange(p.size) + 1.0).reshape(p.shape), PARAMS
    )
    updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    want = flatten(optax.apply_updates(PARAMS, updates))
    alone, gradients = flatten(PARAMS), flatten(grads)
    group = GroupUpdate.of(optimizer, PARAMS)
    for names in (["a/bias", "b/0"], ["a/kernel"], ["scale", "b/1"]):
        params = [alone[n] for n in names]
        moments = group.init(names, params)
        new, _ = group.update(names, [gradients[n] for n in names], moments, params)
        for n, value in zip(names, new, strict=True):
            np.testing.assert_allclose(value, want[n], rtol=1e-6, err_msg=n)
