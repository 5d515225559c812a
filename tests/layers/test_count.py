"""Costs against formulas done by hand."""

import functools
import operator
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
import zoo
from test_cut_law import traced

from hexijax.layers import count
from hexijax.layers.chain import Remat
from hexijax.layers.loss import nnx_loss
from hexijax.layers.table import chain_table
from hexijax.layers.trace import trace_model
from models.llama import Llama
from models.sizes import get_config

B, T, D, F, N, V = 3, zoo.LENGTH, zoo.WIDTH, 16, 2, zoo.VOCAB


def test_matrix_products_of_a_gpt():
    model = traced("gpt")
    layering = model.layering

    def products(layer: int) -> float:
        costs = map(count.equation_cost, layering.bodies[layer].eqns)
        return functools.reduce(operator.add, costs, count.NOTHING).matmul_total

    projections = 2 * B * T * (4 * D * D + 2 * D * F)
    attention = 2 * 2 * B * T * T * D  # scores and mixing, causality not exploited
    assert products(0) == 0
    assert products(1) == products(2) == projections + attention
    assert products(3) == 2 * B * T * D * V


def test_a_backward_costs_twice_a_forward_in_products():
    segment = traced("gpt").segment(1, 2, (Remat.NONE,))
    backward = count.program_cost(segment.backward_program.jaxpr).matmul_total
    forward = 2 * B * T * (4 * D * D + 2 * D * F) + 4 * B * T * T * D
    assert backward == 2 * forward


def test_full_remat_keeps_the_input_and_the_others_more():
    for layer in traced("gpt").chain.layers[1:-1]:
        kept = layer.activation_bytes
        assert kept[Remat.FULL] == layer.border_bytes == T * D * 4
        assert kept[Remat.FULL] < kept[Remat.DOTS] < kept[Remat.NONE]


def test_loops_branches_and_convolutions():
    def cost(f: object, *shapes: tuple[int, ...]) -> count.Cost:
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return count.program_cost(jax.make_jaxpr(f)(*args).jaxpr)

    scan = cost(lambda x, w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0],
                (2, 4), (5, 4, 4))  # fmt: skip
    assert scan.matmul_flops == {"float32": 5 * 2 * 2 * 4 * 4}
    branch = cost(lambda x: jax.lax.cond(True, lambda: x @ x, lambda: x), (4, 4))
    assert branch.matmul_total == 2 * 4 * 4 * 4
    conv = cost(
        lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), (2, 3, 8, 8), (5, 3, 3, 3)
    )
    assert conv.matmul_total == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    adds = cost(lambda x: x + x.sum(), (4, 4))
    assert adds.matmul_total == 0
    assert adds.other_flops == 4 * 4 + 4 * 4
    assert adds.num_bytes == (16 + 1) * 4 + (16 + 1 + 16) * 4


@pytest.mark.parametrize("name", ["gpt-scanned", "linen-scanned"])
def test_a_scanned_model_costs_what_the_unrolled_one_does(name: str):
    layers = traced(name).chain.layers
    plain = traced("linen" if "linen" in name else "gpt").chain.layers
    for layer, other in zip(layers, plain, strict=True):
        assert layer.forward_flops == other.forward_flops
        assert layer.activation_bytes == other.activation_bytes


@pytest.mark.laws
def test_eighty_layers_are_traced_in_seconds(
    record_property: Callable[[str, object], None],
):
    config = get_config("llama", "70B", dtype="bfloat16")
    loss = nnx_loss(lambda rngs: Llama(config, rngs=rngs), zoo.next_token)
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    start = time.perf_counter()
    chain = trace_model(
        loss,
        loss.abstract_params(),
        {"inputs": tokens, "targets": tokens},
        microbatch_size=1,
    ).chain
    record_property("tracing 80 layers", f"{time.perf_counter() - start:.1f} s")
    assert chain.num_params == config.num_params
    assert len(chain.layers) == 82
    assert len({layer.signature for layer in chain.layers[1:-1]}) == 1
    assert "blocks/0..79 x80" in chain_table(chain)
    head = 2 * 2048 * config.width * config.vocab_size
    assert chain.layers[-1].forward_flops == pytest.approx(head, rel=1e-2)


def test_the_table_reads_well():
    table = chain_table(traced("gpt").chain).splitlines()
    assert table[0].split()[:4] == ["layer", "parameters", "forward", "GFLOP"]
    assert [line.split()[:2] for line in table[2:5]] == [
        ["embed", "320"],
        ["blocks/0..1", "x2"],
        ["head", "16"],
    ]
    assert table[6:] == [
        "1,536 parameters, computed in float32",
        "embed/embedding is tied: embed, head",
    ]
