"""Predictions against iterations that others measured."""

import dataclasses
import re
from pathlib import Path

import pytest

from hexijax.simulator.validate import (
    EVEN,
    MIXED,
    Row,
    faults,
    main,
    mean_errors,
    rankings,
    table,
)
from tests.public_data import FOLDER, needs_public_data

ROW = Row(
    name="a",
    group=EVEN,
    measured_s=1.0,
    predicted_s=1.02,
    valid=True,
    contest=("model", 64),
    promised_bytes=2**30,
    peak_bytes=None,
)


def other(name: str, **changed: object) -> Row:
    """A row for other cards, unless it says otherwise."""
    return dataclasses.replace(ROW, **({"name": name, "contest": (name,)} | changed))


@needs_public_data
def test_predictions_are_within_their_limits(capsys: pytest.CaptureFixture[str]):
    assert main([str(FOLDER)]) == 0
    text = capsys.readouterr().out
    for group in (MIXED, EVEN):
        assert re.search(rf"mean error, {group}: \d\.\d\d% of \d+ rows", text)
    assert "suspect, not counted" in text
    assert "0.0% slower than the best" in text


def test_a_folder_without_plans_is_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(tmp_path)]) == 2
    assert "Give the folder that holds sailor/" in capsys.readouterr().err


def test_a_group_past_its_limit_is_named():
    found = [ROW, other("b", predicted_s=0.86)]
    assert mean_errors(found) == pytest.approx({EVEN: 0.08})
    assert faults(found) == [
        "The mean error over one kind is 8.00%; the limit is 7%.",
    ]
    # What fits the one limit may pass the other.
    mixed = [dataclasses.replace(row, group=MIXED) for row in found]
    assert "over mixed kinds is 8.00%; the limit is 5%" in faults(mixed)[0]


def test_a_better_plan_that_is_ranked_behind_is_named():
    slow = other("slow", measured_s=1.1, predicted_s=1.01, contest=ROW.contest)
    assert faults([ROW, slow]) == [
        "slow is ranked first of 2 plans for the same cards and was 10.0% slower than "
        "a; the limit is 4%."
    ]
    # Other cards or another batch are another contest, and 3% are within the limit.
    assert not rankings([ROW, dataclasses.replace(slow, contest=("model", 32))])
    near = dataclasses.replace(slow, measured_s=1.03)
    assert not faults([ROW, near])


def test_a_suspect_row_is_shown_and_counts_nowhere():
    suspect = other("far", predicted_s=9.0, valid=False, contest=ROW.contest)
    assert mean_errors([ROW, suspect]) == mean_errors([ROW])
    assert not rankings([ROW, suspect])
    assert "+800.0%  in doubt           1.0  suspect" in table([ROW, suspect])
