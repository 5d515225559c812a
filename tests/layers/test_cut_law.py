"""The law of the room: any cut, under any remat, is the uncut loss and its gradient."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.layers import names
from hexijax.layers.chain import Remat
from hexijax.layers.segment import KEYS, MASK, Segment
from hexijax.layers.trace import TracedModel, trace_model


@functools.cache
def traced(name: str) -> TracedModel:
    case = zoo.case(name)
    return trace_model(
        case.loss, case.params, case.batch, microbatch_size=case.num_samples, name=name
    )


def leaf_value(params: Mapping[str, Any], leaf: Any) -> Any:
    whole = params[leaf.name]
    return whole if leaf.row is None else whole[leaf.row : leaf.row + 1]


def run(
    model: TracedModel,
    params: Any,
    batch: Mapping[str, Any],
    segments: Sequence[Segment],
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Scalars, gradients by leaf id, and all residuals of one step."""
    flat, given = names.flatten(params), {**batch, **model.consts}
    act: Any = ()
    tape = []
    for s in segments:
        handed = tuple(
            leaf_value(flat, leaf).astype(dtype)
            for leaf, dtype in zip(s.leaves, s.param_dtypes, strict=True)
        )
        read = {name: given[name] for name in (*s.batch, *s.consts)}
        out, residuals = jax.jit(s.forward)(handed, act, read)
        tape.append((s, handed, act, read, residuals))
        act = out
    gradients: dict[str, Any] = {}
    cotangents: Any = jnp.float32(1)
    for s, handed, entered, read, residuals in reversed(tape):
        backward = jax.jit(s.backward)
        d_params, cotangents = backward(handed, entered, read, residuals, cotangents)
        for leaf, d in zip(s.leaves, d_params, strict=True):
            gradients[leaf.id] = gradients.get(leaf.id, 0) + d.astype(jnp.float32)
    return act, gradients, [r for *_, residuals in tape for r in residuals]


def full_batch(case: zoo.Case, mask: Any = None) -> dict[str, Any]:
    mask = jnp.ones(case.num_samples) if mask is None else mask
    return {**case.batch, KEYS: jax.random.key_data(case.keys), MASK: mask}


def assert_equal_gradients(
    model: TracedModel, got: Mapping[str, Any], want: Mapping[str, Any], rtol: float
) -> None:
    """Error of each leaf <= rtol x its norm + rtol / 100 x the norm of all."""
    total = sum(float(jnp.sum(jnp.square(d))) for d in want.values()) ** 0.5
    leaves = [leaf for group, _ in model.layering.groups for leaf in group.leaves]
    assert {leaf.id for leaf in leaves} == set(got)
    for leaf in leaves:
        true = leaf_value(want, leaf)
        error = float(jnp.linalg.norm((got[leaf.id] - true).ravel()))
        bound = rtol * float(jnp.linalg.norm(true.ravel())) + rtol / 100 * total
        assert error <= bound, (leaf.id, error, bound)


def assert_law(name: str, edges: Sequence[int], remat: Sequence[Remat]) -> None:
    case, model = zoo.case(name), traced(name)
    segments = [model.segment(a, b, remat[a:b]) for a, b in itertools.pairwise(edges)]
    scalars, got, residuals = run(model, case.params, full_batch(case), segments)
    loss, want = case.reference
    rtol = 5e-2 if "bf16" in name or "nested" in name else 1e-5
    assert float(scalars["sum"]) == pytest.approx(float(loss), rel=rtol / 10)
    assert_equal_gradients(model, got, want, rtol)
    weights = weight_shapes(case)
    assert not [r.shape for r in residuals if jnp.shape(r) in weights]


def weight_shapes(case: zoo.Case) -> set[tuple[int, ...]]:
    """Shapes of all matrices and their transposes; no activation has one."""
    shapes = {x.shape for x in jax.tree.leaves(case.params) if x.ndim > 1}
    shapes |= {shape[1:] for shape in shapes if len(shape) == 3}
    return shapes | {tuple(reversed(shape)) for shape in shapes}


TWICE = ("gpt", "llama-tied", "llama-scanned", "linen", "linen-scanned", "plain")
"""Cases of which another shows all, and more: dropout, scans, metrics, remat."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.laws] if name in TWICE else [])
        for name in zoo.CASES
    ],
)
def test_every_layer_apart_gives_the_loss_and_gradients_of_the_whole(name: str):
    num_layers = len(traced(name).layering)
    policies = itertools.islice(itertools.cycle(Remat), num_layers)
    assert_law(name, range(num_layers + 1), tuple(policies))


@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize(
    "name", ["gpt-bf16", pytest.param("plain-aux", marks=pytest.mark.laws)]
)
def test_one_segment_keeps_no_weight_under_any_remat(name: str, remat: Remat):
    num_layers = len(traced(name).layering)
    assert_law(name, (0, num_layers), (remat,) * num_layers)


@pytest.mark.laws
@pytest.mark.parametrize("name", zoo.CASES)
@settings(max_examples=10)
@given(data=st.data())
def test_any_cut_gives_the_loss_and_gradients_of_the_whole(
    name: str, data: st.DataObject
):
    num_layers = len(traced(name).layering)
    inner = data.draw(st.sets(st.integers(1, num_layers - 1)), label="cuts")
    policies = st.tuples(*[st.sampled_from(list(Remat))] * num_layers)
    edges = [0, *sorted(inner), num_layers]
    assert_law(name, edges, data.draw(policies, label="remat"))
