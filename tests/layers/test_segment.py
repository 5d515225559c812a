"""What the runtime relies on: padding, lanes, apart lowering, signatures, borders."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from jax.sharding import Mesh, PartitionSpec
from test_cut_law import full_batch, leaf_value, run, traced

from hexijax.layers import names
from hexijax.layers.chain import LeafPart, Remat
from hexijax.layers.segment import KEYS, MASK
from hexijax.layers.trace import trace_model


def whole(model, remat=Remat.NONE):
    return model.segment(0, len(model.layering), (remat,) * len(model.layering))


@pytest.mark.parametrize("name", ["plain-aux", "scalar"])
def test_padding_counts_for_nothing_even_if_it_is_not_a_number(name: str):
    case = zoo.case(name)
    batch = dict(case.batch)
    model = trace_model(case.loss, case.params, batch, microbatch_size=3, padded=True)
    mask = jnp.asarray([1.0, 0.0, 1.0])
    scalars, got, _ = run(model, case.params, full_batch(case, mask), [whole(model)])

    real = {k: x[jnp.asarray([0, 2])] for k, x in batch.items()}
    keys = case.keys[jnp.asarray([0, 2])]
    loss, want = jax.value_and_grad(
        lambda params: jnp.sum(case.loss(params, real, keys)[0])
    )(case.params)
    assert float(scalars["sum"]) == pytest.approx(float(loss), rel=1e-6)
    assert float(scalars["weight"]) == 2 * zoo.LENGTH
    want = names.flatten(want)
    for leaf, d in got.items():
        np.testing.assert_allclose(d, want[leaf], rtol=1e-5, atol=1e-6)


def test_a_padded_sample_that_is_nan_leaves_the_sum_alone():
    def loss(params, batch, keys):
        x = batch["x"] @ params["w"]
        return x.sum(1), jnp.ones(len(x)), {"x": x.max(1)}

    params = {"w": jnp.ones((4, 4))}
    model = trace_model(loss, params, {"x": jnp.ones((3, 4))}, microbatch_size=3)
    x = jnp.ones((3, 4)).at[1].set(jnp.nan)
    out = whole(model).evaluate(
        (params["w"],), (), {"x": x, MASK: jnp.asarray([1.0, 0.0, 1.0])}
    )
    assert {k: float(v) for k, v in out.items()} == {
        "sum": 32.0,
        "weight": 2.0,
        "metric:x": 8.0,
        "metric_weight:x": 2.0,
    }


def test_a_leaf_may_come_in_parts():
    def loss(params, batch, keys):
        return jnp.tanh(batch["x"] @ params["w"]).sum(1), jnp.ones(len(batch["x"]))

    w = jnp.arange(12.0).reshape(4, 3)
    batch = {"x": jnp.ones((2, 4))}
    model = trace_model(loss, {"w": w}, batch, microbatch_size=2)
    (group,) = model.chain.groups
    (leaf,) = group.leaves
    cuts = [(0, 3), (3, 4)]
    parts = tuple(
        LeafPart(
            name=leaf.name, shape=(stop - start, 3), whole=leaf, dim=0, start=start
        )
        for start, stop in cuts
    )
    groups = [dataclasses.replace(group, leaves=(part,)) for part in reversed(parts)]
    cut = model.segment(0, 1, (Remat.NONE,), groups)
    given = [w[3:], w[:3]]
    batch[MASK] = jnp.ones(2)
    both = [whole(model), cut]
    for segment, params in zip(both, ([w], given), strict=True):
        out, kept = segment.forward(params, (), batch)
        d_w, _ = segment.backward(params, (), batch, kept, jnp.ones(()))
        assert float(out["sum"]) == float(whole(model).evaluate([w], (), batch)["sum"])
        d_w = d_w if len(d_w) == 1 else (jnp.concatenate(d_w[::-1]),)
        np.testing.assert_array_equal(d_w[0], jax.grad(_sum(loss, batch))(w))
    assert cut.signature != whole(model).signature


def _sum(loss, batch):
    return lambda w: loss({"w": w}, batch, None)[0].sum()


def test_weights_depend_on_the_batch_alone_at_any_size():
    case = zoo.case("bert")
    model = traced("bert")
    want = case.batch["masked"].sum(1)
    np.testing.assert_array_equal(jax.jit(model.weight)(dict(case.batch)), want)
    two = {k: x[:2] for k, x in case.batch.items()}
    np.testing.assert_array_equal(jax.jit(model.weight)(two), want[:2])


@pytest.mark.parametrize(
    "name", ["gpt-dropout", pytest.param("plain-bf16", marks=pytest.mark.laws)]
)
def test_lanes_under_shard_map_keep_their_gradients_apart(name: str):
    """Forward and backward are lowered apart; two lanes hold the same samples."""
    case, model = zoo.case(name), traced(name)
    segment = whole(model, Remat.DOTS)
    flat, given = names.flatten(case.params), full_batch(case)
    params = tuple(
        leaf_value(flat, leaf).astype(dtype)
        for leaf, dtype in zip(segment.leaves, segment.param_dtypes, strict=True)
    )
    lanes = 2
    batch = {k: jnp.stack([given[k]] * lanes) for k in segment.batch}
    mesh = Mesh(np.array(jax.devices()[:lanes]), ("data",))
    first, by_lane = PartitionSpec(), PartitionSpec("data")

    def over_lanes(f, num_laned):
        def body(params, *laned):
            out = f(params, *jax.tree.map(lambda x: x[0], laned))
            return jax.tree.map(lambda x: x[None], out)

        in_specs = (first, *[by_lane] * num_laned)
        return jax.jit(
            jax.shard_map(
                body, mesh=mesh, in_specs=in_specs, out_specs=by_lane, check_vma=False
            )
        )

    forward = over_lanes(lambda p, batch: segment.forward(p, (), batch), 1)
    out, residuals = forward.lower(params, batch).compile()(params, batch)
    seeds = jnp.asarray([1.0, 2.0])
    backward = over_lanes(
        lambda p, batch, res, seed: segment.backward(p, (), batch, res, seed)[0], 3
    )
    args = (params, batch, residuals, seeds)
    gradients = backward.lower(*args).compile()(*args)
    text = backward.lower(*args).as_text()
    assert "all_reduce" not in text
    loss, _ = case.reference
    np.testing.assert_allclose(out["sum"], [loss, loss], rtol=1e-2)
    for d in gradients:
        np.testing.assert_array_equal(2 * d[0], d[1])


def test_equal_blocks_share_a_signature_and_nothing_else_does():
    model = traced("gpt")
    blocks = [model.segment(i, i + 1, (Remat.NONE,)).signature for i in (1, 2)]
    assert blocks[0] == blocks[1]
    others = [
        model.segment(0, 1, (Remat.NONE,)),
        model.segment(1, 2, (Remat.FULL,)),
        model.segment(1, 2, (Remat.DOTS,)),
        model.segment(1, 3, (Remat.NONE,) * 2),
        traced("gpt-bf16").segment(1, 2, (Remat.NONE,)),
        traced("gpt-scanned").segment(1, 2, (Remat.NONE,)),
    ]
    assert len({blocks[0], *(s.signature for s in others)}) == 1 + len(others)


def test_integers_cross_borders_without_cotangents():
    segment = traced("routed").segment(1, 2, (Remat.NONE,))
    dtypes = [x.dtype.name for x in segment.border_out]
    assert sorted(dtypes) == ["float32", "int32"]
    assert segment.float_out == (dtypes.index("float32"),)


def test_batch_names():
    model = traced("gpt-dropout")
    assert model.uses_keys
    assert model.segment(0, 1, (Remat.NONE,)).batch == ("inputs",)
    assert model.segment(1, 2, (Remat.NONE,)).batch == (KEYS,)
    last = len(model.layering) - 1
    assert model.segment(last, last + 1, (Remat.NONE,)).batch == ("targets", MASK)
    assert not traced("gpt").uses_keys


def test_weights_are_handed_in_the_dtype_of_their_first_use():
    gpt = traced("gpt-bf16").segment(1, 2, (Remat.NONE,))
    assert set(gpt.param_dtypes) == {"bfloat16"}
    # Cast inside a remat inside a scan; this model's norms compute in float32.
    scanned = traced("linen-scan-remat-bf16").segment(1, 2, (Remat.NONE,))
    for leaf, dtype in zip(scanned.leaves, scanned.param_dtypes, strict=True):
        assert dtype == ("float32" if "norm" in leaf.name else "bfloat16"), leaf.id


def test_large_constants_are_arguments():
    model = traced("scalar")
    assert [x.shape for x in model.consts.values()] == [(zoo.VOCAB, 1024)]
    last = len(model.layering) - 1
    assert model.segment(last, last + 1, (Remat.NONE,)).consts == ("@const/0",)
    assert model.segment(0, 1, (Remat.NONE,)).consts == ()
