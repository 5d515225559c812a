"""What a drift is, and which instructions are named for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.report.drift import WAITS, Drift, Span, parts


def span(device: str, what: str, start_s: float, end_s: float, computes: bool = True):
    return Span(
        device=device,
        what=what,
        name=what,
        start_s=start_s,
        end_s=end_s,
        computes=computes,
    )


PREDICTED = [
    span("a/0", "forward", 0, 1),
    span("a/0", "forward", 1, 2),
    span("a/0", "backward", 2, 4),
    span("a/0", "move", 0, 3, computes=False),
    span("b/0", "forward", 1, 3),
]


def drift(measured: list[Span], predicted_s: float, measured_s: float) -> Drift:
    found = parts(PREDICTED, measured, predicted_s=predicted_s, measured_s=measured_s)
    return Drift(
        predicted_s=predicted_s,
        measured_s=measured_s,
        promised_bytes={"a/0": 2**30, "b/0": 2**31},
        peak_bytes={"a/0": 2**29},
        parts=found,
    )


def test_the_instruction_that_grew_is_named_with_both_times():
    slow = [*PREDICTED[:2], span("a/0", "backward", 2, 9), *PREDICTED[3:]]
    found = drift(slow, 5, 10)
    assert found.explanation.startswith("a/0: backward 7.00 s, predicted 2.00 s")
    assert list(found.lines()) == [
        "  beside its prediction of 5.00 s a step: +100.0%",
        f"    {found.explanation}",
        "    a/0: 512 MiB of 1.00 GiB promised",
    ]


def test_waits_are_named_where_they_are_the_difference():
    found = drift(PREDICTED, 5, 9)
    assert found.parts[0].what == WAITS
    assert "it waits 5.00 s, predicted 1.00 s" in found.explanation


@pytest.mark.parametrize("measured_s", [4.6, 5.0, 5.4])
def test_what_is_tolerated_is_not_explained(measured_s: float):
    assert drift(PREDICTED, 5, measured_s).explanation == ""


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a/0", "b/0"]),
            st.sampled_from(["forward", "backward", "update"]),
            st.floats(0, 1),
        )
    )
)
def test_a_devices_parts_make_its_step(times):
    measured = [span(device, what, 0, time_s) for device, what, time_s in times]
    total_s = 1.0 + sum(time_s for *_, time_s in times)
    found = parts(PREDICTED, measured, predicted_s=5.0, measured_s=total_s)
    for device in {part.device for part in found}:
        mine = [part for part in found if part.device == device]
        assert sum(p.measured_s for p in mine) == pytest.approx(total_s)
        assert sum(p.predicted_s for p in mine) == pytest.approx(5.0)
    differences = [abs(part.more_s) for part in found]
    assert differences == sorted(differences, reverse=True)
