"""A backward in two parts is the backward: same numbers, nothing computed twice."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from test_cut_law import full_batch, leaf_value, traced, weight_shapes

from hexijax.layers import count, jaxprs, names
from hexijax.layers.chain import Remat
from hexijax.layers.segment import Segment


def halves(name: str, remat: Remat) -> list[Segment]:
    """A model in two segments."""
    model = traced(name)
    edges = (0, len(model.layering) // 2, len(model.layering))
    return [
        model.segment(a, b, (remat,) * (b - a)) for a, b in itertools.pairwise(edges)
    ]


def both(segment: Segment, *args: Any) -> Any:
    """Gradients and cotangents of the whole backward, and of its parts."""
    params, act, batch, cotangents = args
    _, residuals = segment.forward(params, act, batch)
    whole = segment.backward(params, act, batch, residuals, cotangents)
    split = segment.split
    d_act, made = segment.backward_input(params, act, batch, residuals, cotangents)
    kept = [residuals[i] for i in split.residuals]
    handed = split.hand_on(act, kept, () if segment.is_last else cotangents, made)
    return whole, (segment.backward_weight(params, batch, handed), d_act)


def assert_parts_agree(name: str, remat: Remat) -> None:
    case, model = zoo.case(name), traced(name)
    flat, given = names.flatten(case.params), {**full_batch(case), **model.consts}
    act: Any = ()
    for segment in halves(name, remat):
        params = tuple(
            leaf_value(flat, leaf).astype(dtype)
            for leaf, dtype in zip(segment.leaves, segment.param_dtypes, strict=True)
        )
        batch = {k: given[k] for k in (*segment.batch, *segment.consts)}
        rng = np.random.default_rng(0)
        cotangents: Any = jnp.float32(0.5)
        if not segment.is_last:
            out = [segment.border_out[i] for i in segment.float_out]
            cotangents = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in out]

        def apart(*args: Any, segment: Segment = segment) -> tuple[Any, Any]:
            return segment.forward(*args[:3])[0], both(segment, *args)

        act, (whole, parts) = jax.jit(apart)(params, act, batch, cotangents)
        rtol = 2e-2 if "bf16" in name or "nested" in name else 1e-5
        for want, got in zip(
            jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True
        ):
            want, got = (np.asarray(x, np.float32) for x in (want, got))
            assert np.linalg.norm(got - want) <= rtol * np.linalg.norm(want) + 1e-7


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("llama-tied", Remat.NONE),
        ("plain-nested", Remat.FULL),
        ("routed", Remat.DOTS),
    ],
)
def test_parts_give_the_numbers_of_the_whole(name: str, remat: Remat):
    assert_parts_agree(name, remat)


@pytest.mark.laws
@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("name", zoo.CASES)
def test_any_model_s_parts_give_the_numbers_of_the_whole(name: str, remat: Remat):
    assert_parts_agree(name, remat)


SOME = ["gpt-dropout", "llama-tied", "linen-scan-remat-bf16", "plain-nested", "routed"]


@pytest.mark.parametrize("remat", [Remat.NONE, Remat.FULL])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.laws)
        for name in zoo.CASES
    ],
)
def test_no_product_is_computed_twice_and_no_weight_is_handed_on(
    name: str, remat: Remat
):
    weights = weight_shapes(zoo.case(name))
    for segment in halves(name, remat):
        split = segment.split
        whole = count.program_cost(segment.backward_program.jaxpr).matmul_total
        parts = [
            count.program_cost(piece.closed.jaxpr).matmul_total
            for piece in (split.input, split.weight)
        ]
        assert sum(parts) == whole
        # A gradient may have a weight's shape: that of a sum over a small array.
        handed = {*split.weight.invars[len(split.again) :]} - {*split.weight.outvars}
        assert weights.isdisjoint(v.aval.shape for v in handed)


def test_a_block_hands_on_the_operands_of_its_products_alone():
    segment = traced("gpt").segment(1, 2, (Remat.NONE,))
    split = segment.split
    B, T, D = segment.border_in[0].shape
    shapes = sorted(x.shape for x in split.handed)
    F = zoo.SHAPE["ff_width"]
    # Of norms and biases their gradients; of four products each both operands.
    wide = [(B, T, F)] * 2
    assert sum(map(jaxprs.num_bytes, split.handed)) <= 4 * B * T * (9 * D + 2 * F) + 512
    assert [s for s in shapes if s == (B, T, F)] == wide
    products = [
        eqn
        for eqn in split.weight.closed.jaxpr.eqns
        if eqn.primitive.name == "dot_general"
    ]
    assert len(products) == 6
    half = count.program_cost(split.weight.closed.jaxpr).matmul_total
    assert half == 2 * B * T * (4 * D * D + 2 * D * F)


@pytest.mark.parametrize("name", ["gpt", "llama-scanned"])
def test_a_segment_hands_on_no_more_than_its_layers_promise(name: str):
    chain, model = traced(name).chain, traced(name)
    for remat in Remat:
        for segment in halves(name, remat)[1:]:
            handed = sum(map(jaxprs.num_bytes, segment.split.handed))
            layers = chain.layers[slice(*segment.layers)]
            promised = sum(layer.handed_bytes or 0 for layer in layers)
            assert 0 < handed <= promised * model.microbatch_size
