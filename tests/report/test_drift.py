"""What a drift is, and which instructions, or which waits, are named for it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.report.drift import REST, WAITS, Drift, Span, parts, predicted_spans
from hexijax.simulator import Cause, Timeline, predict
from tests.plan.examples import make_chain, make_cluster

CHAIN = make_chain(3)
CLUSTER = make_cluster()
STAGES = (
    Stage(devices=("n0/0",), layers=(0, 3)),
    Stage(devices=("n1/0",), layers=(3, len(CHAIN.layers))),
)
PLAN = Plan(
    replicas=(Replica(stages=STAGES, microbatches=4, microbatch_size=2, samples=8),),
    batch_size=8,
)
TIMELINE: Timeline = predict(PLAN, CHAIN, CLUSTER, folded=False)
STEP_S = TIMELINE.step_s
SPANS = [span for span in predicted_spans(TIMELINE) if span.computes]
DEVICE = SPANS[0].device


def drift(measured: list[Span], measured_s: float) -> Drift:
    found = parts(TIMELINE, measured, measured_s=measured_s)
    return Drift(
        predicted_s=STEP_S,
        measured_s=measured_s,
        promised_bytes={"a/0": 2**30, "b/0": 2**31},
        peak_bytes={"a/0": 2**29},
        parts=found,
    )


def longer(spans: list[Span], what: str, more_s: float) -> list[Span]:
    """The first of that kind on the device takes so much longer."""
    at = next(
        i for i, span in enumerate(spans) if span.device == DEVICE and span.what == what
    )
    slow = dataclasses.replace(spans[at], end_s=spans[at].end_s + more_s)
    return [*spans[:at], slow, *spans[at + 1 :]]


def test_the_instruction_that_grew_is_named_with_both_times():
    found = drift(longer(SPANS, "forward", 100 * STEP_S), 101 * STEP_S)
    forward = next(p for p in found.parts if p.what == "forward")
    assert found.parts[0] == forward
    assert forward.more_s == pytest.approx(100 * STEP_S)
    assert found.explanation.startswith(f"{DEVICE}: forward ")
    lines = list(found.lines())
    assert lines[0].endswith("a step: +10000.0%")
    assert lines[1] == f"    {found.explanation}"
    assert lines[2:] == ["    a/0: 512 MiB of 1.00 GiB promised"]


def test_waits_are_named_by_their_cause_where_they_are_the_difference():
    late = [
        dataclasses.replace(SPANS[0], waited_s=50 * STEP_S, waited_for=Cause.DISPATCH),
        *SPANS[1:],
    ]
    found = drift(late, 51 * STEP_S)
    assert found.parts[0].what == f"{WAITS} for dispatch"
    assert f"{DEVICE}: it waits for dispatch, " in found.explanation


def test_without_a_watched_step_it_is_said_what_to_do():
    found = Drift(
        predicted_s=1.0,
        measured_s=2.0,
        promised_bytes={},
        peak_bytes={},
        unmeasured=("slow", "fast"),
    )
    assert found.explanation == (
        "no layer was timed on slow or fast, whose figures are data sheets' or "
        "declared: `hexijax profile` measures them; run with --trace to see which "
        "instructions make the difference"
    )
    measured = dataclasses.replace(found, unmeasured=())
    assert measured.explanation.startswith("run with --trace")


@pytest.mark.parametrize("ratio", [0.92, 1.0, 1.08])
def test_what_is_tolerated_is_not_explained(ratio: float):
    assert drift(SPANS, ratio * STEP_S).explanation == ""


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted({span.device for span in SPANS})),
            st.sampled_from(["forward", "backward", "update"]),
            st.floats(0, 1),
            st.floats(0, 1),
            st.sampled_from(list(Cause)),
        )
    )
)
def test_a_devices_parts_make_its_step(times):
    measured = [
        Span(
            device=device,
            what=what,
            name=what,
            start_s=0,
            end_s=time_s,
            computes=True,
            waited_s=waited_s,
            waited_for=cause,
        )
        for device, what, time_s, waited_s, cause in times
    ]
    total_s = 1.0 + sum(time_s + waited_s for _, _, time_s, waited_s, _ in times)
    found = parts(TIMELINE, measured, measured_s=total_s)
    for device in {span.device for span in measured}:
        mine = [part for part in found if part.device == device]
        assert sum(p.measured_s for p in mine) == pytest.approx(total_s)
        assert sum(p.predicted_s for p in mine) == pytest.approx(STEP_S)
        assert sum(part.what == REST for part in mine) == 1
    differences = [abs(part.more_s) for part in found if part.what != REST]
    assert {part.what for part in found[len(differences) :]} <= {REST}, "they are last"
    assert differences == sorted(differences, reverse=True)
