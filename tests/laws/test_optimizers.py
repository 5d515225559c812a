"""How far each optimizer of optax looks; every one updates as plain optax does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hexijax.layers.names import flatten
from hexijax.runtime.optimizer import GroupUpdate
from hexijax.runtime.reach import OptimizerError, Reach, classify

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
CLIP, NO_FIELD = (
    "set the Experiment's clip_norm",
    "Nothing in an Experiment does the same",
)
FINITE, STEPS = (
    "set the Experiment's skip_nonfinite=True",
    "set the Experiment's batch_size",
)
ACROSS = {
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        CLIP,
    ),
    "clip_by_global_norm before adamw": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        CLIP,
    ),
    "clip_by_global_norm before muon": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-3)),
        CLIP,
    ),
    "normalize_by_update_norm": (
        optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
        NO_FIELD,
    ),
    "prodigy": (optax.contrib.prodigy(1e-3), NO_FIELD),
    "dadapt": (optax.contrib.dadapt_adamw(), NO_FIELD),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 3), FINITE),
    "apply_if_finite in a chain": (
        optax.chain(optax.apply_if_finite(optax.sgd(0.1), 3), optax.scale(0.5)),
        FINITE,
    ),
    "MultiSteps": (optax.MultiSteps(optax.sgd(0.1), 2), STEPS),
    "MultiSteps that skips": (
        optax.MultiSteps(
            optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
        ),
        STEPS,
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_by_element(name: str):
    assert classify(ELEMENTWISE[name], PARAMS) is Reach.ELEMENTWISE


@pytest.mark.parametrize("name", INSIDE)
def test_inside_one_leaf(name: str):
    assert classify(INSIDE[name], PARAMS) is Reach.PER_LEAF


@pytest.mark.parametrize("name", ACROSS)
def test_across_leaves_is_refused_with_the_field_to_set(name: str):
    optimizer, way_out = ACROSS[name]
    with pytest.raises(OptimizerError) as caught:
        classify(optimizer, PARAMS)
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    ("name", "primitive"),
    [
        ("clip_by_global_norm", "reduce_sum"),
        ("clip_by_global_norm before muon", "reduce_sum"),
        ("normalize_by_update_norm", "reduce_sum"),
        ("prodigy", "dot_general"),
        ("apply_if_finite", "reduce_and"),
    ],
)
def test_what_mixes_leaves_is_named_with_its_primitive(name: str, primitive: str):
    with pytest.raises(OptimizerError) as caught:
        classify(ACROSS[name][0], PARAMS)
    assert "'a/bias' depends on other leaves (a/kernel, b/0, b/1, ...)" in str(
        caught.value
    )
    assert f"through `{primitive}`" in str(caught.value)


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
