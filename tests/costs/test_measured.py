"""Measured tables: refused by name or interpolated and said, never free."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.costs import MeshShape, layer_times
from hexijax.costs.compute import missing_times, time_basis
from hexijax.costs.measured import (
    Basis,
    NotMeasuredError,
    basis,
    measured_s,
    missing,
    update_s_per_param,
)
from hexijax.layers.chain import Remat
from tests.plan.examples import make_chain, make_kind

CHAIN = make_chain(3)
SIGNATURE = CHAIN.layers[1].signature


def measured_kind(points, tensor=2, **row):
    """A kind with a table of (samples, forward_s, backward_s)."""
    rows = tuple(
        {
            "signature": SIGNATURE,
            "dtype": "float32",
            "tensor": tensor,
            "samples": samples,
            "forward_s": forward_s,
            "backward_s": backward_s,
            **row,
        }
        for samples, forward_s, backward_s in points
    )
    return dataclasses.replace(make_kind(), layer_times=rows)


def joined_s(kind, samples, policy=Remat.NONE):
    """Forward and backward in one program, at tensor degree 2."""
    found = measured_s(kind, SIGNATURE, "float32", 2, samples)[policy]
    return found.forward_s, found.backward_s


def test_a_degree_that_was_not_measured_is_refused_by_name():
    kind = measured_kind([(1, 0.1, 0.2)])
    with pytest.raises(NotMeasuredError) as error:
        layer_times(CHAIN, MeshShape(profile=kind, dtype="float32", tensor=4), 1)
    assert str(error.value) == (
        f"Layer {SIGNATURE} in float32 at tensor degree 4 was asked of a {kind.kind}, "
        "which has measured times of it at tensor degree 2 only. A time is never "
        "guessed from another degree: let the same `hexijax profile` go on until "
        "it has degree 4, or use a plan of degree 2."
    )


def test_a_search_can_ask_without_failing():
    kind = measured_kind([(1, 0.1, 0.2)])
    assert missing(kind, SIGNATURE, "float32", 2) is None
    assert "tensor degree 4" in (missing(kind, SIGNATURE, "float32", 4) or "")
    mesh = MeshShape(profile=kind, dtype="float32", tensor=4)
    assert missing_times(CHAIN, mesh) == missing(kind, SIGNATURE, "float32", 4)
    assert missing_times(CHAIN, dataclasses.replace(mesh, tensor=2)) is None
    # Nothing of the layer, or nothing in the dtype: the roofline answers.
    assert missing(kind, "another", "float32", 4) is None
    assert missing(kind, SIGNATURE, "bfloat16", 4) is None
    assert basis(kind, "another", "float32", 4, 1) is Basis.ROOFLINE


def test_it_says_what_a_time_rests_on():
    kind = measured_kind([(2, 0.1, 0.2), (4, 0.3, 0.4)])
    found = [basis(kind, SIGNATURE, "float32", 2, samples) for samples in range(1, 6)]
    assert found == ["extrapolated", "measured", "interpolated", "measured", found[0]]
    assert joined_s(kind, 3) == pytest.approx((0.2, 0.3))
    assert joined_s(kind, 6) == pytest.approx((0.5, 0.6))
    # Below the table: never less than half of its first point.
    assert joined_s(kind, 1) == pytest.approx((0.05, 0.1))


def test_a_chain_says_how_many_of_its_times_were_measured():
    kind = measured_kind([(1, 0.1, 0.2), (4, 0.3, 0.4)])
    mesh = MeshShape(profile=kind, dtype="float32", tensor=2)
    assert time_basis(CHAIN, mesh, 1) == {Basis.MEASURED: 3, Basis.ROOFLINE: 2}
    assert time_basis(CHAIN, mesh, 2) == {Basis.INTERPOLATED: 3, Basis.ROOFLINE: 2}


def test_the_update_is_priced_by_the_largest_profiled_slice():
    assert update_s_per_param(make_kind()) is None
    rows = (
        {"update_params": 100, "update_s": 5.0},
        {"update_params": 1000, "update_s": 10.0},
    )
    kind = dataclasses.replace(make_kind(), layer_times=rows)
    assert update_s_per_param(kind) == 0.01


@given(
    st.dictionaries(
        st.integers(1, 64),
        st.tuples(st.floats(1e-6, 10), st.floats(1e-6, 10)),
        min_size=1,
    )
)
def test_more_samples_never_take_less_time_and_none_is_free(table):
    kind = measured_kind([(n, *times) for n, times in table.items()])
    times_s = [joined_s(kind, n) for n in range(1, 80)]
    for column in range(2):
        column_s = [both[column] for both in times_s]
        assert min(column_s) > 0
        assert all(b >= a - 1e-12 for a, b in itertools.pairwise(column_s))


def test_a_row_may_say_what_programs_apart_take():
    kind = measured_kind([(2, 0.1, 0.2)], apart_forward_s=0.13, apart_backward_s=0.25)
    mesh = MeshShape(profile=kind, dtype="float32", tensor=2)
    measured, reckoned = layer_times(CHAIN, mesh, 2)[1], layer_times(CHAIN, mesh, 2)[0]
    assert reckoned.residual_s[Remat.NONE] != (0.03, 0.05)
    assert measured.forward(Remat.NONE, joined=True) == pytest.approx(0.1)
    assert measured.forward(Remat.NONE, joined=False) == pytest.approx(0.13)
    assert measured.backward(Remat.NONE, joined=False) == pytest.approx(0.25)
    # A policy that keeps less pays for what it keeps.
    kept = [sum(measured.residual_s[policy]) for policy in Remat]
    assert kept == sorted(kept, reverse=True)
    # Without those figures nothing is known, and nothing added.
    mesh = dataclasses.replace(mesh, profile=measured_kind([(2, 0.1, 0.2)]))
    assert set(layer_times(CHAIN, mesh, 2)[1].residual_s.values()) == {(0.0, 0.0)}


def test_each_policy_goes_by_its_own_rows_and_the_others_by_those_of_none():
    none = measured_kind([(2, 0.1, 0.2)], apart_forward_s=0.13, apart_backward_s=0.25)
    full = measured_kind(
        [(2, 0.1, 0.27)], remat="full", apart_forward_s=0.11, apart_backward_s=0.29
    )
    # In any order of rows.
    rows = full.layer_times + none.layer_times
    both = dataclasses.replace(none, layer_times=rows)

    def times(kind):
        mesh = MeshShape(profile=kind, dtype="float32", tensor=2)
        return layer_times(CHAIN, mesh, 2)[1]

    assert joined_s(both, 2, Remat.FULL) == (0.1, 0.27)
    measured, alone = times(both), times(none)
    assert measured.forward(Remat.FULL, joined=False) == pytest.approx(0.11)
    assert measured.backward(Remat.FULL, joined=True) == pytest.approx(0.27)
    assert measured.backward(Remat.FULL, joined=False) == pytest.approx(0.29)
    for policy in (Remat.NONE, Remat.DOTS):
        for joined in (False, True):
            assert measured.forward(policy, joined=joined) == alone.forward(
                policy, joined=joined
            )
            assert measured.backward(policy, joined=joined) == alone.backward(
                policy, joined=joined
            )
    # Where full alone was measured it adds nothing to its own times.
    assert times(full).recompute_s[Remat.FULL] == 0.0
    assert times(full).backward(Remat.FULL, joined=False) == pytest.approx(0.29)
