"""Losses that are sums over samples pass; others are refused by line and reason."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import zoo

from hexijax.errors import UserError
from hexijax.layers import samples, trace
from hexijax.layers.trace import trace_model

PARAMS = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
BATCH = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}


@pytest.mark.parametrize("name", zoo.CASES)
def test_every_model_is_known_to_be_a_sum_without_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(samples, "probe", None)
    case = zoo.case(name)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.params)
    assert samples.check(case.loss, shapes, case.batch).kind == "sum"


def project(params: Any, batch: Any) -> Any:
    return batch["x"] @ params["w"]


def ones(batch: Any) -> Any:
    return jnp.ones(batch["x"].shape[0])


def batch_statistics(params: Any, batch: Any, keys: Any) -> Any:
    x = project(params, batch)
    return jnp.square(x - x.mean(0)).sum(1), ones(batch)


def contrastive(params: Any, batch: Any, keys: Any) -> Any:
    x = project(params, batch)
    return -jnp.diag(jax.nn.log_softmax(x @ x.T)), ones(batch)


def mean(params: Any, batch: Any, keys: Any) -> Any:
    return jnp.square(project(params, batch)).mean(), batch["x"].sum()


def mean_of_one(params: Any, batch: Any, keys: Any) -> Any:
    return jnp.square(project(params, batch)).sum(), 1.0


def weight_decay(params: Any, batch: Any, keys: Any) -> Any:
    decay = jnp.square(params["w"]).sum()
    return jnp.square(project(params, batch)).sum() + decay, batch["x"].sum()


def by_place(params: Any, batch: Any, keys: Any) -> Any:
    x = jnp.square(project(params, batch)).sum(1)
    return x * jnp.arange(len(x)), ones(batch)


def one_key(params: Any, batch: Any, keys: Any) -> Any:
    x = jnp.square(project(params, batch)).sum(1)
    return x * jax.random.normal(keys[0]), ones(batch)


def sorted_samples(params: Any, batch: Any, keys: Any) -> Any:
    return jnp.sort(project(params, batch), axis=0).sum(1), ones(batch)


def repeated_sum(params: Any, batch: Any, keys: Any) -> Any:
    total = project(params, batch).sum()
    return jnp.broadcast_to(total, (batch["x"].shape[0],)), ones(batch)


@pytest.mark.parametrize(
    ("loss", "primitive", "how"),
    [
        (batch_statistics, "sub", "combines each sample with a sum over samples"),
        (contrastive, "dot_general", "multiplies every sample with every other"),
        (mean, "div", "contains the number of samples in the microbatch"),
        (mean_of_one, "constant", "is 1 for 4 and 1 for 3 samples"),
        (weight_decay, "add", "adds a term that no sample owns, once a microbatch"),
        (by_place, "mul", "depends on the place of a sample in its microbatch"),
        (one_key, "slice", "takes some samples of the microbatch"),
        (sorted_samples, "sort", "sorts samples"),
        (
            repeated_sum,
            "broadcast_in_dim",
            "is a sum over samples already, repeated for each",
        ),
    ],
)
def test_what_mixes_samples_is_refused(
    loss: Callable[..., Any], primitive: str, how: str
):
    with pytest.raises(UserError) as error:
        trace_model(loss, PARAMS, BATCH, microbatch_size=4)
    text = str(error.value)
    assert text.startswith("The loss is no sum over samples: its ")
    assert f"goes through `{primitive}` at " in text
    assert f", which {how}. The loss of a sample must depend on that" in text
    assert "or set per_microbatch=True" in text
    # A constant has no line, and of what jnp.sort compiles the line before is named.
    if loss not in (mean_of_one, sorted_samples):
        (line,) = re.findall(rf"test_samples\.py:(\d+) \({loss.__name__}\)", text)
        first = loss.__code__.co_firstlineno
        assert first < int(line) < first + 5
    model = trace_model(loss, PARAMS, BATCH, microbatch_size=4, per_microbatch=True)
    assert model.layering.names == ("model",)


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_a_mean_is_found_at_every_size(size: int):
    """Its divisor is a number; the trace at hand is one of two that are compared."""
    with pytest.raises(UserError, match="contains the number of samples"):
        trace_model(mean, PARAMS, BATCH, microbatch_size=size)


def test_a_weight_that_depends_on_parameters_is_refused():
    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return project(params, batch).sum(1), jnp.full(4, params["w"].sum())

    with pytest.raises(UserError, match=r"weight depends on parameters \(w, ...\)"):
        trace_model(loss, PARAMS, BATCH, microbatch_size=4)


def test_other_forms_are_refused():
    def one(params: Any, batch: Any, keys: Any) -> Any:
        return project(params, batch).sum()

    def matrix(params: Any, batch: Any, keys: Any) -> Any:
        return project(params, batch), ones(batch)

    with pytest.raises(
        UserError, match=r"returned one array; the rule is loss\(params"
    ):
        trace_model(one, PARAMS, BATCH, microbatch_size=4)
    with pytest.raises(UserError, match=r"sum has shape \(4, 8\); with 4 samples it"):
        trace_model(matrix, PARAMS, BATCH, microbatch_size=4)
    scalar = {"n": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(UserError, match=r"Batch array 'n' has no dims"):
        trace_model(one, PARAMS, scalar, microbatch_size=4)


def rotated(params: Any, batch: Any, keys: Any) -> Any:
    """Positions, the same for every sample, look up a table that is then split."""
    x = project(params, batch)
    places = jnp.broadcast_to(jnp.arange(8), x.shape)
    table = jnp.linspace(0.0, 1.0, 32).reshape(8, 4)
    sines, cosines = jnp.split(table[places], 2, axis=-1)
    turned = jnp.concatenate([sines, cosines[:, ::-1]], -1) @ table[:4]
    reach = jnp.cumsum(jnp.pad(turned, ((0, 0), (1, 0), (0, 0)))[:, 1:], 1)
    return (x * jnp.expand_dims(reach.sum(-1), 0)[0].reshape(x.shape)).sum(1), ones(
        batch
    )


def rolled(params: Any, batch: Any, keys: Any) -> Any:
    """The same, but each sample has its own place in the table."""
    x = project(params, batch)
    table = jnp.linspace(0.0, 1.0, 32).reshape(8, 4)
    own = jnp.broadcast_to(jnp.arange(len(x))[:, None], x.shape)
    return (x * jnp.split(table[own], 2, axis=-1)[0].sum(-1)).sum(1), ones(batch)


def test_what_is_equal_for_all_samples_stays_so_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(samples, "probe", None)
    assert samples.check(rotated, PARAMS, BATCH).kind == "sum"
    verdict = samples.check(rolled, PARAMS, BATCH)
    assert (verdict.kind, verdict.how) == (
        "mixes",
        "depends on the place of a sample in its microbatch",
    )


def picked(params: Any, batch: Any, keys: Any) -> Any:
    """No rule follows samples through a gather by arange; it keeps them apart."""
    x = project(params, batch)
    rows = jnp.arange(len(x))
    return x[rows, (batch["x"][:, 0] > 0).astype(jnp.int32)], ones(batch)


def transformed(params: Any, batch: Any, keys: Any) -> Any:
    """No rule knows an FFT; this one runs over samples."""
    return jnp.abs(jnp.fft.fft(project(params, batch), axis=0)).sum(1), ones(batch)


def test_numbers_decide_what_no_rule_knows():
    assert samples.check(picked, PARAMS, BATCH).kind == "sum"
    verdict = samples.check(transformed, PARAMS, BATCH)
    assert (verdict.kind, verdict.primitive) == ("mixes", "fft")


def test_a_large_unknown_model_gets_a_note(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples, "PROBE_MAX_PARAMS", 10)
    (note,) = trace._sample_notes(samples.check(transformed, PARAMS, BATCH))
    assert note.startswith("Not known to be a sum over samples: `fft` at ")
    assert note.endswith("and the model is too large to try with numbers.")
